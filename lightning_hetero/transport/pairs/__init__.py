"""Between nodes: one standalone torch.distributed group per worker (layer T)."""
