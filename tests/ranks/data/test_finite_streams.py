"""Streams of unequal length, one of each rank's own: one process over the union, ends, workers, resume, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.base.setup import CHECKPOINT_KEY
from tests.ranks.balanced.sharded_kit import Deep, sharded
from tests.ranks.balanced.sharded_kit import weights as whole_weights
from tests.ranks.data.indexed import EXACT, Fit, Looking, Noting, Other, by_name, fit, indexed, refusal
from tests.ranks.data.own_streams import (
    APART,
    BATCH,
    LENGTHS,
    MORE,
    WORLD,
    Going,
    Iterating,
    Own,
    Streaming,
    WrongLength,
    alone,
    loader,
)  # fmt: skip
from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, rank_trainer, weights

EPOCHS = 2
Finite: dict[str, Any] = {"stream": "finite"}


class Recorded(Noting):
    """Notes the epochs of its batches, and the mean losses of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epochs.append(self.current_epoch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.trainer.callback_metrics["loss_epoch"]))


class Validated(Recorded):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[1:]), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(indexed(10), batch_size=2)


class Normed(Recorded):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.net = nn.Sequential(self.net[0], norm, self.net[1], self.net[2])


class Weighed(Recorded):
    """The loss is a mean over what ``batch_weight`` counts."""

    def batch_weight(self, batch: Any) -> float:
        return float((1 + batch[0] % 3).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epochs.append(self.current_epoch)
        index, x, y = batch
        self.note(index.tolist())
        count = 1 + index % 3
        return ((self.net(x) - y).squeeze(1) ** 2 * count).sum() / count.sum()

    def on_train_epoch_end(self) -> None:
        pass


def trained(
    rank: int, world: int, data: DataLoader, module: Any = Recorded, strategy: Any = None, **kwargs: Any
) -> Fit:
    made = module()
    run = fit(rank, world, data, module=made, strategy={**Finite, **(strategy or {})}, max_epochs=EPOCHS, **kwargs)
    run.extra = {"epochs": made.epochs, "means": made.means}
    return run


def twice(rank: int, world: int) -> Fit:
    """The first fit stops in the middle of an epoch; the second begins with the next."""
    module = Recorded()
    trainer = rank_trainer(rank, world, balanced(**Finite), max_steps=4)
    trainer.fit(module, loader(rank))
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(module, loader(rank))
    return Fit(module.seen, weights(module), trainer.global_step)  # type: ignore[arg-type]


def sharded_fit(rank: int, world: int) -> Fit:
    seen: list[list[int]] = []

    class Seen(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            index, x, y = batch
            strategy: Any = self.trainer.strategy
            seen.append([] if strategy.current_samples() == 0 else index.tolist())
            return super().training_step((x, y), batch_idx)

    module = Seen()
    trainer = rank_trainer(rank, world, sharded(shard="auto", **Finite), max_epochs=1)
    trainer.fit(module, loader(rank, MORE))
    return Fit(seen, whole_weights(module), trainer.global_step, {"epochs": [0] * len(seen), "means": []})


def runs(rank: int, world: int) -> dict[str, Fit]:
    def run(*args: Any, **kwargs: Any) -> Fit:
        return trained(rank, world, *args, **kwargs)

    return {
        "workers": run(loader(rank, workers=2, make=Iterating), Validated, val_check_interval=2),
        "workers persist": run(
            Streaming(WrongLength(rank, LENGTHS[rank]), shards="s3://", batch_size=BATCH, num_workers=1,
                      persistent_workers=True, multiprocessing_context="fork"),
        ),
        "accumulated": run(loader(rank), accumulate_grad_batches=3, gradient_clip_val=0.05),
        "weighed": run(loader(rank), Weighed),
        "empty": run(loader(rank, (17, 0, 9)), accumulate_grad_batches=2),
        "lazy": run(loader(rank, make=WrongLength), strategy={"min_samples": 0, "global_batch_size": 10}),
        "looked at": run(loader(rank), callbacks=[Looking(3)]),
        "limited": run(loader(rank, MORE, make=Going), limit_train_batches=3),
        "dropped": run(loader(rank, drop_last=True)),
        "normed": run(loader(rank, (14, 29, 7)), Normed),
        "twice": twice(rank, world),
        "sharded": sharded_fit(rank, world),
    }  # fmt: skip


@cache
def all_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(WORLD, runs))


def by_epoch(ranks: Sequence[Fit]) -> list[list[list[list[int]]]]:
    """The indices: by epoch, step and rank."""
    epochs = ranks[0].extra["epochs"]
    steps = [list(step) for step in zip(*(run.seen for run in ranks), strict=True)]
    return [[step for step, at in zip(steps, epochs, strict=True) if at == e] for e in sorted(set(epochs))]


class SeenAlone(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[1:], batch_idx)


ALONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulated": (Recorded, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "empty": (Recorded, {"accumulate_grad_batches": 2}),
    "weighed": (Weighed, {}),
    "sharded": (SeenAlone, {}),
}
WHOLE = ["workers", "workers persist", "accumulated", "weighed", "empty", "lazy", "looked at", "sharded"]


@pytest.mark.parametrize("name", [*WHOLE, "limited", "dropped"])
def test_weights_are_those_of_one_process_over_the_union(name: str) -> None:
    ranks = all_runs()[name]
    epochs = by_epoch(ranks)
    make, arguments = ALONE.get(name, (Recorded, {}))
    oracle = make()
    trainer = alone(oracle, epochs, **arguments)
    for run in ranks:
        assert run.updates == trainer.global_step
        assert run.weights.distance(whole_weights(oracle) if name == "sharded" else weights(oracle)) < EXACT
        assert run.extra["means"] == pytest.approx(getattr(oracle, "means", []), rel=1e-5)  # sums of float32


@pytest.mark.parametrize("name", [*WHOLE, "normed"])
def test_each_sample_is_trained_once_per_epoch_in_its_streams_order(name: str) -> None:
    ranks = all_runs()[name]
    lengths = {"empty": (17, 0, 9), "normed": (14, 29, 7), "sharded": MORE}.get(name, LENGTHS)
    full = 10 if name == "lazy" else WORLD * BATCH
    assert len(by_epoch(ranks)) == (1 if name == "sharded" else EPOCHS)
    for epoch in by_epoch(ranks):
        for rank, length in enumerate(lengths):
            own = [step[rank] for step in epoch]
            found = [i for part in own for i in part]
            assert sorted(found) == list(range(APART * rank, APART * rank + length))
            assert found == sorted(found) or name == "workers"
            last = max((n for n, part in enumerate(own) if part), default=-1)
            assert all(own[: last + 1])  # through, it stays through
        totals = [sum(map(len, step)) for step in epoch]
        assert all(totals)
        # A rank whose share is less than what it needs takes that, and one that would have one left over takes it.
        assert max(totals) <= full + {"lazy": 2, "normed": 3}.get(name, 0)
        assert max(totals) >= full or name == "empty"
    whole = {tuple(map(len, step)) for epoch in by_epoch(ranks) for step in epoch if sum(map(len, step)) >= full}
    assert len(whole) > 1 or name == "empty"  # the shares did change


def test_nothing_is_drawn_ahead_of_a_limit_of_batches() -> None:
    """A stream that goes on in the next epoch loses less than the loader's own batch, of which a rank took a part."""
    epochs = by_epoch(all_runs()["limited"])
    assert [len(epoch) for epoch in epochs] == [3] * EPOCHS
    for rank in range(WORLD):
        one, two = ([i for step in epoch for i in step[rank]] for epoch in epochs)
        assert one == list(range(APART * rank, APART * rank + len(one)))
        assert two == list(range(two[0], two[0] + len(two))) and 0 < two[0] - one[-1] <= BATCH


def test_drop_last_leaves_out_what_is_less_than_a_share() -> None:
    for epoch in by_epoch(all_runs()["dropped"]):
        for rank, length in enumerate(LENGTHS):
            found = [i for step in epoch for i in step[rank]]
            assert found == list(range(APART * rank, APART * rank + len(found)))
            assert length - WORLD * BATCH < len(found) <= length


def test_no_rank_gets_one_sample_where_the_module_needs_two() -> None:
    assert all(len(part) != 1 for epoch in by_epoch(all_runs()["normed"]) for step in epoch for part in step)
    first, *others = (run.weights for run in all_runs()["normed"])
    trained_ones = [name for name in first if "running" not in name and "batches" not in name]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in trained_ones)


def test_a_fit_that_stopped_in_an_epoch_is_followed_by_one_from_the_beginning() -> None:
    for rank, run in enumerate(all_runs()["twice"]):
        assert run.updates == 7 and len(run.seen) == 7
        assert run.seen[0][0] == run.seen[4][0] == APART * rank


# ---- resume ------------------------------------------------------------------------------------------------


class Saves(Callback):
    """Writes checkpoints of the middle of an epoch, before a batch, behind one and when a rank is through."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            trainer.save_checkpoint("before.ckpt")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) in ((1, 2), (1, 4)):
            trainer.save_checkpoint(f"behind-{batch_idx}.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("epoch.ckpt")


SAVED = {"behind-2": 3, "behind-4": 5, "before": 3, "epoch": None}


def resumed(rank: int, world: int) -> tuple[dict[str, Fit], str]:
    def run(saved: str | None, **strategy: Any) -> Fit:
        module = Recorded()
        callbacks = [] if saved else [Saves()]
        policy = {"policy": Other()} if saved else {}
        trainer = rank_trainer(rank, world, balanced(**Finite, **policy), max_epochs=3, callbacks=callbacks)
        trainer.fit(module, loader(rank), ckpt_path=f"{saved}.ckpt" if saved else None)
        extra = {"epochs": module.epochs, "means": module.means}
        return Fit(module.seen, weights(module), trainer.global_step, extra)  # type: ignore[arg-type]

    found = {"whole": run(None), **{name: run(name) for name in SAVED}}
    if rank == 0:
        stripped = torch.load("behind-2.ckpt", weights_only=True)
        assert sum(stripped[CHECKPOINT_KEY].pop("used")) == 3 * WORLD * BATCH
        torch.save(stripped, "stripped.ckpt")
    torch.distributed.barrier()
    said = ""
    try:
        run("stripped")
    except ValueError as error:
        said = str(error)
    return found, said


@cache
def resumed_runs() -> tuple[dict[str, list[Fit]], str]:
    ranks = run_ranks(WORLD, resumed)
    return by_name([found for found, _ in ranks]), ranks[0][1]


@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_goes_on_in_each_stream(name: str) -> None:
    whole, rest = (by_epoch(resumed_runs()[0][n]) for n in ("whole", name))
    done = SAVED[name]
    before = [whole[0]] if done is None else [whole[0], whole[1][:done]]
    epochs = [*before, *rest] if done is None else [whole[0], whole[1][:done] + rest[0], *rest[1:]]
    assert len(epochs) == 3
    for epoch in epochs:
        found = sorted(i for step in epoch for part in step for i in part)
        assert found == [APART * rank + i for rank, length in enumerate(LENGTHS) for i in range(length)]
    oracle = Recorded()
    alone(oracle, epochs)
    for run in resumed_runs()[0][name]:
        assert run.weights.distance(weights(oracle)) < EXACT


def test_a_checkpoint_that_does_not_say_what_was_used_is_refused() -> None:
    said = resumed_runs()[1]
    assert "after 3 batches in the middle of an epoch" in said and "as many ranks" in said


# ---- ends and refusals -------------------------------------------------------------------------------------


def ends(rank: int, world: int) -> dict[str, str]:
    def said(data: Any, **kwargs: Any) -> str:
        return refusal(rank, world, data, **{"strategy": Finite, **kwargs})

    def failing(workers: int) -> str:
        dataset = Own(rank, LENGTHS[rank], fails=9 if rank == 1 else None)
        context = "fork" if workers else None
        data = DataLoader(dataset, batch_size=BATCH, num_workers=workers, multiprocessing_context=context)
        try:
            trained(rank, world, data)
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def unsaid() -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(rank, world, loader(rank, (8, 8, 8)), max_epochs=1)
        return " ".join(str(w.message) for w in caught)

    class Synchronised(Recorded):
        def on_fit_start(self) -> None:  # on a CPU DDP takes none
            self.norm = nn.SyncBatchNorm(3)

    return {
        "fails": failing(0),
        "fails in a worker": failing(1),
        "batches": said(DataLoader(Own(rank, 8), batch_size=None)),
        "several": said({"a": loader(rank), "b": loader(rank)}),
        "sizes": said(loader(rank, batch_size=4 + rank)),
        "synchronised": said(loader(rank), module=Synchronised()),
        "all empty": said(loader(rank, (0, 0, 0))),
        "unsaid": unsaid(),
    }


def test_a_stream_that_fails_and_what_is_refused() -> None:
    ranks = run_ranks(WORLD, ends)
    for name in ("fails", "fails in a worker"):
        assert "OSError" in ranks[1][name] and "the shard is gone" in ranks[1][name]
        for other in (ranks[0], ranks[2]):
            assert "RuntimeError: the stream of rank 1 failed at batch" in other[name]
    expected = {
        "batches": ("ValueError", "stream='finite'", "makes its own batches", "set batch_size"),
        "several": ("ValueError", "stream='finite'", "several"),
        "sizes": ("ValueError", "differ between ranks in batch_size"),
        "synchronised": ("ValueError", "SyncBatchNorm", "GroupNorm"),
        "all empty": ("accepted",),
        "unsaid": ("stream='finite'", "wait without end"),
    }
    for rank in ranks:
        for name, parts in expected.items():
            for part in parts:
                assert part in rank[name] or (name == "unsaid" and rank is not ranks[0]), f"{name}: {rank[name]}"
