"""The online controller against plans that stay, at work."""
