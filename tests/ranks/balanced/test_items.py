"""Work counted in items: what ranks tell of it, and that batches cut by cost train the weights of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BalancePolicy
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


# ---- sample_costs ------------------------------------------------------------------------------------------------


def lengths() -> list[float]:
    return [1.0 + (i * i) % 17 for i in range(SAMPLES)]


class Texts(TensorDataset):
    """Knows what each sample costs."""

    def sample_cost(self, index: int) -> float:
        return lengths()[index]


def cut_job(rank: int, world: int) -> list[tuple[Any, BatchReport]]:
    texts = Texts(*regression(SAMPLES).tensors)
    return [
        fit(rank, world, Toy(), {"sample_costs": lengths(), "policy": BalancePolicy(dead_band=100.0)}),  # equal shares
        fit(rank, world, Toy(), {"min_samples": 0}, texts),
    ]


def test_batches_cut_by_cost_train_the_weights_of_one_process() -> None:
    """By a sequence under equal shares, and by the dataset's method under shares that change all the time."""
    expected = one_process(Toy())
    ranks = run_ranks(2, cut_job)
    for runs in ranks:
        for trained, _ in runs:
            assert trained.distance(expected) <= EXACT
    for run in range(2):
        sizes = list(zip(*([n for n, _ in rank[run][1].own] for rank in ranks), strict=True))
        assert len(set(sizes)) >= 5
    for told in (rank[0][1] for rank in ranks):
        for records in told.records.values():
            assert sum(record.samples for record in records) == BATCH
            assert abs(records[0].work - records[1].work) <= max(lengths())


def differing_job(rank: int, world: int) -> None:
    fit(rank, world, Toy(), {"sample_costs": [1.0 + rank] * SAMPLES})


def cost_by_rank(rank: int, world: int) -> None:
    class Texts(TensorDataset):
        def sample_cost(self, index: int) -> float:
            return 1.0 + (index * (rank + 1)) % 7

    fit(rank, world, Toy(), {}, Texts(*regression(SAMPLES).tensors))


def test_ranks_that_cut_differently_are_stopped() -> None:
    with pytest.raises(Exception, match="the ranks are configured differently: sample_costs is"):
        run_ranks(2, differing_job)
    with pytest.raises(Exception, match="ranks disagree on the shares"):
        run_ranks(2, cost_by_rank)


def several_job(rank: int, world: int) -> None:
    module, texts = Toy(), Texts(*regression(SAMPLES).tensors)
    both = {"a": DataLoader(texts, batch_size=4), "b": DataLoader(regression(SAMPLES), batch_size=4)}
    rank_trainer(rank, world, balanced(), max_epochs=1).fit(module, both)


def test_costs_of_one_of_several_loaders_are_refused() -> None:
    with pytest.raises(Exception, match="cannot be combined with several train loaders"):
        run_ranks(2, several_job)
