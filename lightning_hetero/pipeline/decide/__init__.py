"""Who holds which layers, and in which order a device does what; pure (layer P)."""
