"""One fit of the pipeline engine inside Lightning: planning, a batch, logs, checkpoints (layer L)."""
