"""How long the decisions take: see `python -m benchmarks.solvers --help`."""
