"""What moving gradients and parameters costs: see `python -m benchmarks.transport --help`."""
