"""`pytorch_lightning` is a second copy of Lightning: our strategies say so there; our callbacks observe its DDP."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.programs import run

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import lightning_hetero  # sorted by name, so it comes first
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

for strategy in ("hetero_balanced", "hetero_stale_spawn", lightning_hetero.LoadBalancedStrategy()):
    try:
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=2)
    except (TypeError, ValueError) as error:
        print(error)
callbacks = [lightning_hetero.StragglerMonitor(), lightning_hetero.HeteroTrace("traced")]
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=callbacks, **quiet)
trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 8), 4))
"""


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="not installed")
def test_the_other_package_is_told_of_in_our_words_and_our_callbacks_work_there(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(["program.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    name, spawned, given = done.stdout.splitlines()
    assert name == spawned and "Import lightning.pytorch instead of pytorch_lightning" in name
    assert "not for pytorch_lightning's: import lightning.pytorch instead" in given
    assert (tmp_path / "traced" / "rank0.jsonl").stat().st_size
