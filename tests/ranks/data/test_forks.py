"""DataLoader workers of a process that has process groups which nobody needs any more."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression


class Collecting(Dataset[Any]):
    """Has the worker collect garbage, as any program does now and then."""

    def __init__(self) -> None:
        self.data = regression(24)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return self.data[index]


class Kept:
    """A circle: the group is garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me, self.group = self, dist.new_group(backend="gloo")
        dist.destroy_process_group(self.group)


def with_garbage(rank: int, world: int) -> int:
    trainer = rank_trainer(rank, world, balanced(), max_epochs=2)
    gc.disable()  # until the workers are forked
    try:
        Kept()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(
                Toy(), DataLoader(Collecting(), batch_size=2, num_workers=2, multiprocessing_context="fork")
            )
    finally:
        gc.enable()
    return trainer.global_step


def test_a_worker_does_not_collect_its_parents_groups() -> None:
    """It would wait in the group's destructor for threads that were not forked, or crash."""
    assert run_ranks(2, with_garbage, timeout_s=40.0) == [12, 12]
