"""The worker: pulls parameters, computes a chunk, pushes its gradients (layer T)."""
