"""Who holds which tensors: gradients across owners, whole-model state that no rank has whole (layer T)."""
