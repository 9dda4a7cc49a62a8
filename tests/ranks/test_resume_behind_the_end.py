"""A checkpoint that is saved when ``max_steps`` has ended a run, at the end of an epoch, and resumed with more steps.

Lightning trains the epoch's first batch once more in that epoch, numbered on; engines do what it does under stock DDP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, stale, weights
from tests.ranks.pipeline.kit import Deep, pipeline

pytestmark = pytest.mark.ranks
PER_EPOCH = 4


class Behind(Callback):
    """Saves when training is over; knows the batches that were begun."""

    def __init__(self, path: str) -> None:
        self.path, self.begun = path, list[tuple[int, int, int]]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.begun.append((trainer.current_epoch, batch_idx, trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


ENGINES: dict[str, Any] = {
    "balanced": lambda: balanced(),
    "stale": lambda: stale(policy="bsp"),
    "pipeline": lambda: pipeline("2x1"),
    "ddp": lambda: DDPStrategy(),
}


def resumed_twice(
    rank: int, world: int, engine: str, deep: bool, folder: str, longer: int = 0
) -> tuple[list[Any], Weights]:
    path, begun, most = None, [], PER_EPOCH if longer else None
    for part, steps in enumerate((2 * PER_EPOCH, 2 * PER_EPOCH + 1, 4 * PER_EPOCH)):
        module, behind = (Deep if deep else Toy)(), Behind(f"{folder}/{part}.ckpt")
        trainer = rank_trainer(rank, world, ENGINES[engine](), max_epochs=-1, max_steps=steps, callbacks=[behind],
                               limit_train_batches=most)  # fmt: skip
        trainer.fit(module, DataLoader(regression(16 * (PER_EPOCH + longer)), batch_size=8), ckpt_path=path)
        path = behind.path
        begun += behind.begun
    return begun, weights(module)


@pytest.mark.parametrize("engine", ["balanced", "stale", "pipeline"])
@pytest.mark.parametrize("longer", [0, 2], ids=["whole", "limited"])  # batches behind limit_train_batches
@pytest.mark.short("limited")
def test_it_goes_on_as_under_stock_ddp(engine: str, longer: int, tmp_path: Path) -> None:
    deep = engine == "pipeline"
    folders = [tmp_path / name for name in ("engine", "ddp")]
    for folder in folders:
        folder.mkdir()
    found = run_ranks(2, resumed_twice, engine, deep, str(folders[0]), longer)
    stock = run_ranks(2, resumed_twice, "ddp", deep, str(folders[1]), longer)
    for (begun, trained), (expected, weighed) in zip(found, stock, strict=True):
        assert begun == expected and begun[2 * PER_EPOCH] == (2, PER_EPOCH, 2 * PER_EPOCH)
        assert trained.distance(weighed) <= 1e-12
