"""One folder per claim; `python -m benchmarks.<claim> [--quick]` measures it and writes its results."""
