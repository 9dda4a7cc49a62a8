"""The stale engine's claims, measured: simulated with real gradients, and in real processes."""
