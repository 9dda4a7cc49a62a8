"""`pytorch_lightning` is a second copy of Lightning: our names there say so instead of being unknown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc
gc.disable()  # imports make no garbage, and are a fifth faster
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import lightning_hetero
pl.Trainer(strategy="hetero_balanced", accelerator="cpu", devices=2)
"""


def test_our_name_in_the_other_package_is_refused_with_the_reason() -> None:
    pytest.importorskip("pytorch_lightning")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, timeout=100, check=False
    )
    assert done.returncode != 0
    assert "Import lightning.pytorch instead of pytorch_lightning" in done.stderr
