"""The train loader under a plan: what each leader reads, micro-batch by micro-batch, against torch's own order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.pipeline.decide.plans import micro_sizes
from lightning_hetero.pipeline.fit.loaders import PipelineBinder
from lightning_hetero.types import GroupPlan, PipelinePlan
from tests.pure.predictors.simulated import cut, on_ranks
from tests.ranks.kit import Toy, quiet_trainer

SAMPLES, WORLD, PER_RANK = 47, 4, 3  # global batches of 12, the last of 11


def group(ranks: tuple[int, ...], micro: tuple[int, ...]) -> GroupPlan:
    cuts = tuple(range(len(ranks) + 1))
    return GroupPlan(ranks=ranks, cuts=cuts, samples=sum(micro), micro_batches=micro, depths=(1,) * len(ranks))


PLAN = PipelinePlan(groups=(group((2, 0), (2, 2, 1)), group((1,), (4, 3))))  # rank 1 leads, too; rank 3 rests


class Indices(Dataset[int]):
    def __getitem__(self, i: int) -> int:
        return i

    def __len__(self) -> int:
        return SAMPLES


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class EpochParts:
    """One epoch of a rank: its binder, and for each batch the part, the indices read, micro-batches of each group."""

    def __init__(
        self,
        channel: Any,
        make: Callable[[], Any],
        resume: dict[str, Any],
        done: int,
        plan: Any = PLAN,
        stream: Any = None,
        **shared: Any,
    ) -> None:
        trainer = quiet_trainer(devices=1)
        trainer.strategy.connect(Toy())  # type: ignore[attr-defined]
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        progress.ready = progress.processed = done  # type: ignore[attr-defined]
        self.binder = binder = PipelineBinder(trainer, channel, shared=SharedSettings(**shared), stream=stream)
        binder.orders.resume = resume
        loader = make()
        self.total = binder.global_batch_of(loader)
        self.loader = binder.process(loader)
        binder.settle(plan)
        self.steps = []
        trainer.fit_loop._combined_loader = read = CombinedLoader(self.loader)  # by which a binder knows who trains
        for t, (batch, *_) in enumerate(read, done):
            part = binder.open(t)
            self.steps.append((part, batch.tolist(), [binder.micro_batches(part, g) for g in (0, 1)]))
        self.state = binder.state_dict()


def epoch(make: Callable[[], Any], *, done: int = 0, **kwargs: Any) -> list[EpochParts]:
    resume = kwargs.pop("resume", {})
    return on_ranks(WORLD, lambda channel: EpochParts(channel, make, resume, done, **kwargs))


def read(ranks: list[EpochParts]) -> list[list[int]]:
    """The global batches, after a look at who read what."""
    batches = []
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        parts, read, micro = zip(*steps, strict=True)
        assert len({(p.step, p.shares, p.weight_base) for p in parts}) == 1 and micro == (micro[0],) * WORLD
        (first, number), (second, zero) = micro[0]
        assert zero == 0 and number == len(second)  # rank 1's samples come first, and so do its numbers
        assert parts[0].shares == (0, sum(second), sum(first), 0) and sum(parts[0].shares) == parts[0].weight_base
        assert [p.samples for p in parts] == list(parts[0].shares)
        assert [len(r) for r in read] == [max(1, share) for share in parts[0].shares]  # dummies of one sample
        batches.append([*read[1][: sum(second)], *read[2][: sum(first)]])
    return batches


def drawn(shuffle: bool = True) -> list[list[int]]:
    torchs = DistributedSampler(Indices(), num_replicas=1, rank=0, seed=0, shuffle=shuffle)
    return cut(list(torchs), WORLD * PER_RANK)


def plain(workers: int = 0) -> DataLoader:
    context = "fork" if workers else None
    return DataLoader(Indices(), batch_size=PER_RANK, num_workers=workers, multiprocessing_context=context)


def test_leaders_read_stock_ddps_global_batches_and_others_a_dummy() -> None:
    ranks = epoch(plain)
    assert read(ranks) == drawn() and ranks[0].total == 12 == ranks[3].binder.global_batch_size
    full, last = ranks[0].steps[0], ranks[0].steps[-1]
    assert full[2] == [((2, 2, 1), 2), ((4, 3), 0)]
    assert sum(last[0].shares) == 11 and [sum(sizes) for sizes, _ in last[2]] == [5, 6]
    assert last[2] == [((2, 2, 1), 2), ((4, 2), 0)]
    assert ranks[0].binder.micro_batches(full[0], None) == ((), 0)
    state = ranks[1].state
    assert state == json.loads(json.dumps(state))
    assert (state["global_batch_size"], state["world_size"], state["batch_size"], state["applied"]) == (12, 4, 3, {})


def test_a_resumed_epoch_goes_on_where_it_stopped_also_after_another_engine() -> None:
    assert read(epoch(plain, done=2)) == drawn()[2:]
    assert read(epoch(lambda: plain(workers=1), done=2)) == drawn()[2:]
    other_world = {"world_size": 2, "global_batch_size": 12, "batch_size": 6}
    assert read(epoch(plain, done=2, resume=other_world)) == drawn()[2:]
    # bounded staleness: two batches' worth was trained, but not the first 24 samples
    order = [i for batch in drawn() for i in batch]
    applied = {"epoch": 0, "tick": 2, "spans": [[0, 10], [14, 28]]}
    ranks = epoch(plain, done=2, resume={"applied": applied, "global_batch_size": 12, "world_size": 4})
    assert sorted(i for batch in read(ranks) for i in batch) == sorted(order[10:14] + order[28:])
    assert ranks[0].state["applied"] == applied
    with pytest.raises(ValueError, match="cannot be continued"):
        epoch(plain, done=2, resume={"world_size": 4, "global_batch_size": 16, "batch_size": 3})


def test_what_does_not_fit_the_plan_is_refused() -> None:
    def stream() -> DataLoader:
        return DataLoader(Counting(), batch_size=PER_RANK)

    assert read(epoch(stream, stream="shared", done=3)) == cut(list(range(SAMPLES)), 12)[3:]
    with pytest.raises(TypeError, match="stream='shared'"):
        epoch(stream)
    with pytest.raises(ValueError, match=r"divides 12 samples among 2 groups, .*global batch has 1:"):
        epoch(plain, global_batch_size=1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 80))
def test_micro_batches_of_any_part(planned: list[int], samples: int) -> None:
    sizes = micro_sizes(tuple(planned), samples)
    assert sum(sizes) == samples and all(1 <= s <= max(planned) for s in sizes)
    assert sizes[:-2] == (*planned, *[max(planned)] * 80)[: max(0, len(sizes) - 2)]
    if samples == sum(planned):
        assert sizes == tuple(planned)
    elif len(sizes) > 1 and sizes[-1] == 1:  # a single sample is left over only where the one before has none to spare
        assert sizes[-2] <= 2


def test_a_batch_too_small_for_all_groups() -> None:
    """A group has two samples or none, as long as that can be; a group without any has no micro-batches."""

    class Few(Indices):
        def __init__(self, samples: int) -> None:
            self.samples = samples

        def __len__(self) -> int:
            return self.samples

    ranks = epoch(lambda: DataLoader(Few(13), batch_size=PER_RANK))
    assert ranks[0].steps[-1][0].shares in ((0, 0, 1, 0), (0, 1, 0, 0))
    assert sorted(len(sizes) for sizes, _ in ranks[0].steps[-1][2]) == [0, 1]
    assert torch.tensor([i for batch in read(ranks) for i in batch]).sort().values.tolist() == list(range(13))
    assert all(a[0].step < b[0].step for a, b in pairwise(ranks[0].steps))
    small = PipelinePlan(groups=(group((2,), (1,)), group((1,), (11,))))
    ranks = epoch(lambda: DataLoader(Few(15), batch_size=PER_RANK), plan=small)
    assert ranks[0].steps[-1][0].shares == (0, 3, 0, 0)
