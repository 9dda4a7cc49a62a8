"""Who gets which samples, who is held, when a batch is complete; pure (layer P)."""
