"""One folder per claim; `python -m benchmarks.<claim> [--quick]` measures it and writes its results."""

import os

os.environ.setdefault("LIGHTNING_HETERO_CACHE", os.devnull)  # a run knows nothing of earlier ones
