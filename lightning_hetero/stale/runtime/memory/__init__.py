"""How parameters, gradients and settings lie in shared bytes (layer T)."""
