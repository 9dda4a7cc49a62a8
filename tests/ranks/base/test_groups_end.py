"""What a run makes ends with it: the Trainer, which lives on, holds no process group and no store of ours."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.ranks.federated.kit import federated
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression, stale
from tests.ranks.pipeline.kit import Deep, pipeline


class Validated(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Descent(Validated):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


ENGINES: dict[str, Any] = {
    "balanced": lambda: (Validated(), balanced(monitor=True)),
    "stale": lambda: (Validated(), stale(monitor=True)),
    "federated": lambda: (Descent(), federated()),
    "federated, clients may be lost": lambda: (Descent(), federated(min_clients=1)),
    "pipeline": lambda: (Deep(), pipeline("1x2", monitor=True)),
    "pipeline, one stage": lambda: (Deep(), pipeline("2x1")),
}


def job(rank: int, world: int) -> dict[str, list[str]]:
    made: list[tuple[str, Any]] = []
    new_group = dist.new_group
    store = dist.TCPStore.__init__

    def noted_group(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        made.append((f"group made in {_caller()}", weakref.ref(group)))
        return group

    def noted_store(self: Any, *args: Any, **kwargs: Any) -> None:
        store(self, *args, **kwargs)
        made.append((f"store made in {_caller()}", weakref.ref(self)))

    dist.new_group = dist.distributed_c10d.new_group = noted_group  # type: ignore[assignment]
    dist.TCPStore.__init__ = noted_store  # type: ignore[method-assign]
    left: dict[str, list[str]] = {}
    gc.collect()
    gc.disable()
    try:
        for name, make in ENGINES.items():
            made.clear()
            module, strategy = make()
            trainer = rank_trainer(rank, world, strategy, max_epochs=1)
            loaders = [DataLoader(regression(64), batch_size=8) for _ in range(2)]
            trainer.fit(module, *loaders)
            trainer.validate(module, loaders[1], verbose=False)
            assert made, f"{name}: makes neither groups nor stores, as far as this test sees"
            left[name] = [what for what, thing in made if thing() is not None]
    finally:
        gc.enable()
        dist.new_group = dist.distributed_c10d.new_group = new_group  # type: ignore[assignment]
        dist.TCPStore.__init__ = store  # type: ignore[method-assign]
    return left


def _caller() -> str:
    frame: Any = sys._getframe(2)
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


@pytest.mark.filterwarnings("ignore:The .*_dataloader. does not have many workers")
def test_groups_and_stores_end_with_the_run_and_not_with_a_garbage_collection() -> None:
    for left in run_ranks(2, job):
        assert left == {name: [] for name in ENGINES}
