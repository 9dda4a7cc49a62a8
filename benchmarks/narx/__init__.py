"""Which orders and sizes `Narx` has, and where it pays: see `python -m benchmarks.narx --help`."""
