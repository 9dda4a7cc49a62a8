"""Work counted in items: what ranks tell of it, and that batches cut by cost train the weights of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hetero.types import SpeedSample
from tests.ranks.exact_models import Tokens, sequences, tokens_of
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression, single, weights

BATCH, SAMPLES, EXACT = 16, 160, 1e-12
STEPS = SAMPLES // BATCH


def cost(batch: Any) -> float:
    """Something that differs from step to step and is no number of samples."""
    return 3.0 * len(batch[0]) + abs(float(batch[1].flatten()[0]))


class Costly(Toy):
    def batch_cost(self, batch: Any) -> float:
        return cost(batch)


class BatchReport(Callback):
    """What every rank's batches cost, and what this rank's policy is told of all of them."""

    def __init__(self) -> None:
        self.own: list[tuple[int, float]] = []
        self.records: dict[int, tuple[SpeedSample, ...]] = {}
        self.events: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.own.append((len(batch[0]), cost(batch)))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if (report := trainer.strategy.step_report()) is not None:
            self.records[report.step] = report.records
        self.events += trainer.strategy.step_events()


def fit(
    rank: int, world: int, module: Toy, args: dict[str, Any], data: Any = None
) -> tuple[Any, BatchReport]:
    told = BatchReport()
    trainer = rank_trainer(rank, world, balanced(**args), callbacks=[told], max_epochs=1)
    trainer.fit(module, DataLoader(data or regression(SAMPLES), batch_size=BATCH // world, shuffle=True))
    return weights(module), told


def one_process(module: Toy, data: Any = None) -> Any:
    single(module, data or regression(SAMPLES), BATCH, max_epochs=1)
    return weights(module)


# ---- batch_cost --------------------------------------------------------------------------------------------------


def counted_job(rank: int, world: int) -> list[tuple[Any, BatchReport]]:
    return [
        fit(rank, world, Toy(), {"batch_cost": cost}),
        fit(rank, world, Costly(), {}),
        fit(rank, world, Toy(), {}),
        fit(rank, world, Tokens(), {"batch_weight": tokens_of}, sequences()),
    ]


@pytest.fixture(scope="module")
def counted() -> list[list[tuple[Any, BatchReport]]]:
    return run_ranks(2, counted_job)


@pytest.mark.parametrize("run", [0, 1], ids=["argument", "method of the module"])
def test_records_carry_every_ranks_work_to_every_rank(counted: list[list[tuple[Any, BatchReport]]], run: int) -> None:
    first, second = (rank[run][1] for rank in counted)
    assert len(first.records) >= STEPS - 2 and first.records.keys() == second.records.keys()
    for step, records in first.records.items():
        assert [(r.work, r.compute_s) for r in records] == [(r.work, r.compute_s) for r in second.records[step]]
        for told, record in zip((first, second), records, strict=True):
            assert (record.samples, record.work) == told.own[step]
    works = {record.work / record.samples for records in first.records.values() for record in records}
    assert len(works) > STEPS
    for told in (first, second):  # a trace has them, too
        noted = [event.data["work"] for event in told.events if event.kind == "step"]
        assert noted == [work for _, work in told.own][: len(noted)] and len(noted) >= STEPS - 1


def bad_job(rank: int, world: int) -> None:
    fit(rank, world, Toy(), {"batch_cost": lambda batch: 0.0 if rank == 1 else 1.0})


def test_a_cost_that_is_no_work_is_named_with_the_rank() -> None:
    said = "batch_cost returned 0.0 on rank 1; it must be a finite number > 0"
    with pytest.raises(Exception, match=re.escape(said)):
        run_ranks(2, bad_job)
