"""Iterable datasets under real Trainers: shared and infinite streams, workers, ends, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from multiprocessing import active_children
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.ranks.data.indexed import EXACT, Fit, Noting, by_name, cut, fit, indexed, refusal, together
from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, quiet_trainer, rank_trainer, weights

EPOCHS = 2
SIZE, BATCH = 45, 4  # on 2 ranks: 5 global batches of 8 and a tail of 5


class Stream(IterableDataset[Any]):
    """Samples in order; workers take turns, as users write it."""

    def __init__(self, samples: int = SIZE, first: int = 0) -> None:
        self.data, self.first = indexed(first + samples), first

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.data[i] for i in range(self.first + start, len(self.data), step))


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.data) - self.first


class Endless(IterableDataset[Any]):
    """Each rank's own stream: rank r's samples have the indices r, r + world, ..., again and again."""

    def __init__(self, rank: int, world: int, samples: int = 400) -> None:
        self.data, self.rank, self.world = indexed(samples), rank, world

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from (self.data[i] for i in range(self.rank, len(self.data), self.world))


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return 12


def loader(dataset: IterableDataset, workers: int = 0, **kwargs: Any) -> DataLoader:
    kwargs |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    return DataLoader(dataset, **{"batch_size": BATCH, **kwargs})


# ---- one stream for all ranks ------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"stream": "shared"}


class Skipping(Noting):
    """Ends the first epoch at its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


def twice(rank: int, world: int) -> Fit:
    """The first fit stops in the middle of an epoch; the second begins with the next."""
    module = Noting()
    trainer = rank_trainer(rank, world, balanced(**SHARED), max_steps=4)
    trainer.fit(module, loader(Stream()))
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(module, loader(Stream()))
    return Fit(module.seen, weights(module), trainer.global_step)  # type: ignore[arg-type]


def shared(rank: int, world: int) -> dict[str, Fit]:
    def run(data: DataLoader, strategy: dict[str, Any] | None = None, **kwargs: Any) -> Fit:
        return fit(rank, world, data, strategy={**SHARED, **(strategy or {})}, max_epochs=EPOCHS,
                   extra=lambda trainer: (trainer.num_training_batches, len(active_children())), **kwargs)

    return {
        "sized": run(loader(Sized())),
        "unsized": run(loader(Stream())),
        "sized dropped": run(loader(Sized(), drop_last=True)),
        "unsized dropped": run(loader(Stream(), drop_last=True)),
        "workers": run(loader(Stream(), workers=2)),
        "workers persist": run(loader(Stream(), workers=2, persistent_workers=True, prefetch_factor=4)),
        "lazy": run(loader(Stream()), {"min_samples": 0}),
        "limited": run(loader(Stream()), limit_train_batches=3),
        "chosen": run(loader(Stream()), {"global_batch_size": 11}),
        "skip": run(loader(Stream()), module=Skipping()),
        "twice": twice(rank, world),
    }


@cache
def shared_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(2, shared))


def expected_of(name: str) -> list[list[int]]:
    """The stream's samples in order, and for two workers in chunks of `batch_size` from each in turn."""
    order = list(range(SIZE))
    if name.startswith("workers"):
        chunks = [cut(order[w::2], BATCH) for w in range(2)]
        order = [i for k in range(6) for w in range(2) for i in (chunks[w][k] if k < len(chunks[w]) else [])]
    batches = cut(order, 11 if name == "chosen" else 2 * BATCH, drop_last="dropped" in name)
    if name == "skip":
        return batches[:2] + (EPOCHS - 1) * batches
    if name == "twice":
        return batches[:4] + batches
    return EPOCHS * (batches[:3] if name == "limited" else batches)


@pytest.mark.parametrize(
    "name",
    ["sized", "unsized", "sized dropped", "unsized dropped", "workers", "workers persist", "lazy", "limited",
     "chosen", "skip", "twice"],
)  # fmt: skip
def test_a_shared_stream_is_trained_once_and_in_order(name: str) -> None:
    runs = shared_runs()[name]
    assert together(runs) == expected_of(name)
    shares = {tuple(map(len, step)) for step in zip(*(r.seen for r in runs), strict=True)}
    assert len({s for s in shares if sum(s) == max(map(sum, shares))}) > 1  # they did change
    if name == "twice":  # a second fit starts with a new optimizer
        return
    oracle = Noting()
    trainer = quiet_trainer(devices=1, max_epochs=1)
    trainer.fit(oracle, DataLoader(indexed(SIZE), batch_sampler=expected_of(name)))
    for run in runs:
        assert run.updates == trainer.global_step
        assert run.weights.distance(weights(oracle)) < EXACT


def test_lightning_knows_the_length_of_sized_streams() -> None:
    runs = shared_runs()
    assert [runs[name][0].extra[0] for name in ("sized", "sized dropped", "limited")] == [6, 5, 3]
    assert runs["unsized"][0].extra[0] == float("inf")


def test_persistent_workers_end_with_the_fit() -> None:
    assert [run.extra[1] for run in shared_runs()["workers persist"]] == [0, 0]


# ---- a stream of its own for every rank --------------------------------------------------------------------


def infinite(rank: int, world: int) -> dict[str, Any]:
    own: dict[str, Any] = {"strategy": {"stream": "infinite"}, "max_epochs": EPOCHS}
    runs: dict[str, Any] = {
        "steps": fit(rank, world, loader(Endless(rank, world)), **{**own, "max_epochs": -1}, max_steps=9),
        "limited": fit(rank, world, loader(Endless(rank, world)), **own, limit_train_batches=4),
        "workers": fit(rank, world, loader(Endless(rank, world), workers=1), **own, limit_train_batches=4),
        "length": fit(rank, world, loader(EndlessWithLength(rank, world)), **own),
    }
    return runs


@cache
def infinite_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(2, infinite))


@pytest.mark.parametrize(("name", "epochs", "steps"), [("steps", 1, 9), ("limited", EPOCHS, 4), ("workers", EPOCHS, 4),
                                                       ("length", EPOCHS, 3)])
def test_infinite_streams_follow_the_shares(name: str, epochs: int, steps: int) -> None:
    runs = infinite_runs()[name]
    shares = [tuple(map(len, step)) for step in zip(*(r.seen for r in runs), strict=True)]
    assert len(shares) == epochs * steps  # of 12 samples per rank in batches of 4, an epoch is 3 steps, as in DDP
    assert all(sum(s) == 2 * BATCH for s in shares)
    assert len(set(shares)) > 2
    for rank, run in enumerate(runs):
        for epoch in range(epochs):  # each pass reads the rank's stream from its start, leaving nothing out
            seen = [i for batch in run.seen[epoch * steps : (epoch + 1) * steps] for i in batch]
            assert seen == list(range(rank, rank + 2 * len(seen), 2))
    assert runs[0].weights.distance(runs[1].weights) < EXACT


def test_infinite_streams_train_on_the_mean_over_samples() -> None:
    runs = infinite_runs()["steps"]
    oracle = Noting()
    trainer = quiet_trainer(devices=1, max_epochs=1)
    trainer.fit(oracle, DataLoader(indexed(400), batch_sampler=together(runs)))
    assert runs[0].weights.distance(weights(oracle)) < EXACT


# ---- ends and refusals -------------------------------------------------------------------------------------


def refusals(rank: int, world: int) -> dict[str, str]:
    return {
        "workers": refusal(rank, world, loader(Stream(), workers=rank), strategy=SHARED),
        "batch_size": refusal(rank, world, DataLoader(Stream(), batch_size=4 + rank), strategy=SHARED),
        "small": refusal(rank, world, loader(Stream()), strategy={**SHARED, "max_samples": 2}),
    }


def test_refusals_say_what_and_why() -> None:
    zero, one = run_ranks(2, refusals)
    assert zero == one
    expected = {
        "workers": ("ValueError", "differ between ranks in workers: {0: 0, 1: 1}"),
        "batch_size": ("ValueError", "differ between ranks in batch_size: {0: 4, 1: 5}"),
        "small": ("ValueError", "max_samples=2 admits 4 samples on 2 ranks"),
    }
    assert zero.keys() == expected.keys()
    for name, parts in expected.items():
        for part in parts:
            assert part in zero[name], f"{name}: {zero[name]}"


def test_an_infinite_stream_that_ends_names_the_rank() -> None:
    """The rank that runs dry says so, and its error is the one the user gets to see."""
    with pytest.raises(RuntimeError, match=r"stream of rank [01] was declared infinite .* but ended at batch \d+"):
        run_ranks(2, dries_up)


def dries_up(rank: int, world: int) -> None:
    fit(rank, world, loader(Stream(20) if rank else Endless(rank, world)), strategy={"stream": "infinite"},
        max_epochs=1)
