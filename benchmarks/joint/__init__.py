"""The online controller against plans that stay, in simulation."""
