"""One step of `tests.gpu.check` in a process of its own: ``python -m tests.gpu.check.run_step module.function``."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

if __name__ == "__main__":
    name, _, function = sys.argv[1].rpartition(".")
    step = getattr(importlib.import_module(f"tests.gpu.check.{name}"), function)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        step()
        os.chdir("/")
