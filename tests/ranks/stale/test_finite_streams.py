"""Streams of unequal length, one of each rank's own: every sample once, one process over the union."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.base.setup import CHECKPOINT_KEY
from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Saps
from tests.ranks.data.indexed import EXACT, Looking, by_name, indexed
from tests.ranks.data.own_streams import APART, BATCH, LENGTHS, MORE, WORLD, Iterating, Own, Streaming, alone, loader
from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer, stale, weights
from tests.ranks.stale.fits import Late, Noting, Seen, check_once, fit, ticks

FULL, EPOCHS = WORLD * BATCH, 2


def samples(lengths: Sequence[int] = LENGTHS) -> list[int]:
    return [APART * rank + i for rank, length in enumerate(lengths) for i in range(length)]


class Validated(Noting):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[1:]), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(indexed(10), batch_size=2)


class Weighed(Noting):
    """The loss is a mean over what ``batch_weight`` counts."""

    def batch_weight(self, batch: Any) -> float:
        return float((1 + batch[0] % 3).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        self.note(index.tolist(), batch_idx)
        count = 1 + index % 3
        return ((self.net(x) - y).squeeze(1) ** 2 * count).sum() / count.sum()


class Alone:
    """Makes a module one that a single process trains."""

    def note(self, indices: list[int], batch_idx: int) -> None:
        pass


def runs(rank: int, world: int, part: str) -> dict[str, Seen]:
    def run(data: DataLoader, module: Any = Noting, policy: Any = None, **kwargs: Any) -> Seen:
        strategy = {"stream": "finite", "policy": policy or Bsp()}
        return fit(rank, world, data, strategy=strategy, module=module(), **{"max_epochs": EPOCHS, **kwargs})

    def late(policy: Any, at: str) -> Seen:
        return run(loader(rank), policy=policy, callbacks=[Late(1, at, 2)])

    if part == "late":
        return {
            "flexible": run(loader(rank), policy=Flexible()),
            "flexible, late": late(Flexible(bound=2), "middle"),
            "in vain": late(Flexible(bound=0), "middle"),
            "late start": late(Flexible(bound=0), "start"),
            "asynchronous": late(Asp(), "middle"),
            "returns early": late(Saps(threshold=1, bound=2, micro=1), "middle"),
        }
    if part == "ends":
        return {
            "empty": run(loader(rank, (17, 0, 9)), accumulate_grad_batches=2),
            "limited": run(loader(rank), limit_train_batches=3),
            "dropped": run(loader(rank, drop_last=True)),
            "whole": run(loader(rank, (20, 16, 12), drop_last=True)),
            "stopped": run(loader(rank), max_steps=4),
        }
    return {
        "plain": run(loader(rank), Validated, val_check_interval=3),
        "workers": run(loader(rank, workers=2, make=Iterating)),
        "workers persist": run(
            Streaming(Own(rank, LENGTHS[rank]), shards="s3://", batch_size=BATCH, num_workers=1,
                      persistent_workers=True, multiprocessing_context="fork"),
        ),
        "accumulated": run(loader(rank), accumulate_grad_batches=3, gradient_clip_val=0.05),
        "weighed": run(loader(rank), Weighed),
        "looked at": run(loader(rank), callbacks=[Looking(3)]),
    }  # fmt: skip


@cache
def all_of(part: str) -> dict[str, list[Seen]]:
    return by_name(run_ranks(WORLD, runs, part))


def ran(name: str) -> list[Seen]:
    ends = ("empty", "limited", "dropped", "whole", "stopped")
    return all_of("late" if name in LATE else "ends" if name in ends else "barrier")[name]


def by_epoch(ranks: Sequence[Seen]) -> list[list[list[list[int]]]]:
    """The indices by epoch and global step, as one part."""
    epochs = sorted({epoch for rank in ranks for epoch, _, _ in rank.batches})
    found = []
    for e in epochs:
        of_epoch = [Seen(batches=[b for b in rank.batches if b[0] == e]) for rank in ranks]
        found.append([[step] for step in ticks(of_epoch)])
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "empty": {"accumulate_grad_batches": 2},
}
LATE = ["flexible", "flexible, late", "in vain", "late start", "asynchronous", "returns early"]
WHOLE = ["plain", "workers", "workers persist", "accumulated", "weighed", "empty", "looked at", "whole"]


@pytest.mark.parametrize("name", [*WHOLE, "limited", "dropped", "stopped"])
def test_behind_a_barrier_weights_are_those_of_one_process_over_the_union(name: str) -> None:
    ranks = ran(name)

    class Oracle(Alone, Weighed if name == "weighed" else Noting):  # type: ignore[misc]
        pass

    oracle = Oracle()
    trainer = alone(oracle, by_epoch(ranks), **OPTIONS.get(name, {}))
    for run in ranks:
        assert run.steps == trainer.global_step
        assert run.weights.distance(weights(oracle)) < EXACT


@pytest.mark.parametrize("name", [*WHOLE, *LATE])
def test_each_sample_is_trained_once_per_epoch(name: str) -> None:
    ranks = ran(name)
    lengths = {"empty": (17, 0, 9), "whole": (20, 16, 12)}.get(name, LENGTHS)
    check_once(ranks, [samples(lengths)] * EPOCHS)
    accumulate = OPTIONS.get(name, {}).get("accumulate_grad_batches", 1)
    batches = -(-sum(lengths) // FULL)
    assert {run.steps for run in ranks} == {EPOCHS * -(-batches // accumulate)}
    for rank, run in enumerate(ranks):
        assert all(i // APART == rank for _, _, indices in run.batches for i in indices)  # nobody else's
        assert (run.dummies > 0) == (name == "empty" and rank == 1)


def test_behind_a_barrier_global_batches_are_whole_but_for_the_last() -> None:
    for epoch in by_epoch(ran("plain")):
        assert [len(step) for (step,) in epoch] == [FULL] * 5
    for epoch in by_epoch(ran("empty")):
        assert [len(step) for (step,) in epoch] == [FULL, FULL, 2]


def test_what_was_pushed_in_vain_is_trained_again() -> None:
    ranks = ran("in vain")
    assert ranks[0].counts[-1][1] > 0  # discarded


@pytest.mark.parametrize(("name", "steps"), [("limited", 3), ("dropped", 5), ("stopped", 4)])
def test_what_is_left_out_is_the_end(name: str, steps: int) -> None:
    for epoch in by_epoch(ran(name)):
        assert [len(step) for (step,) in epoch] == [FULL] * steps
        found = [i for (step,) in epoch for i in step]
        for rank in range(WORLD):
            own = sorted(i for i in found if i // APART == rank)
            assert own == list(range(APART * rank, APART * rank + len(own)))


# ---- resume ------------------------------------------------------------------------------------------------


class Saves(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) in ((1, 2), (1, 3)):
            trainer.save_checkpoint(f"behind-{batch_idx}.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("epoch.ckpt")


SAVED = {"behind-2": 3, "behind-3": 4, "epoch": 0}


def resumed(rank: int, world: int) -> tuple[dict[str, Seen], str]:
    def run(saved: str | None) -> Seen:
        module = Noting()
        strategy = stale(policy=Bsp(), stream="finite")
        callbacks = [] if saved else [Saves()]
        trainer = rank_trainer(rank, world, strategy, max_epochs=3, callbacks=callbacks)
        trainer.fit(module, loader(rank), ckpt_path=f"{saved}.ckpt" if saved else None)
        module.noted.steps, module.noted.weights = trainer.global_step, weights(module)
        return module.noted

    found = {"whole": run(None), **{name: run(name) for name in SAVED}}
    if rank == 0:
        stripped = torch.load("behind-2.ckpt", weights_only=True)
        assert sum(stripped[CHECKPOINT_KEY].pop("used")) == 3 * FULL
        torch.save(stripped, "stripped.ckpt")
    torch.distributed.barrier()
    try:
        run("stripped")
    except ValueError as error:
        return found, str(error)
    return found, ""


@cache
def resumed_runs() -> tuple[dict[str, list[Seen]], str]:
    ranks = run_ranks(WORLD, resumed)
    return by_name([found for found, _ in ranks]), ranks[0][1]


@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_goes_on_in_each_stream(name: str) -> None:
    whole, rest = (by_epoch(resumed_runs()[0][n]) for n in ("whole", name))
    epochs = [whole[0], whole[1][: SAVED[name]] + rest[0], *rest[1:]]
    assert len(epochs) == 3
    for epoch in epochs:
        assert sorted(i for (step,) in epoch for i in step) == samples()

    class Oracle(Alone, Noting):  # type: ignore[misc]
        pass

    oracle = Oracle()
    alone(oracle, epochs)
    for run in resumed_runs()[0][name]:
        assert run.weights.distance(weights(oracle)) < EXACT


def test_a_checkpoint_that_does_not_say_what_was_used_is_refused() -> None:
    said = resumed_runs()[1]
    assert "after 3 batches in the middle of an epoch" in said and "as many ranks" in said


# ---- ends and refusals -------------------------------------------------------------------------------------


class ByHand(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Leaving(Callback):
    """The connection of rank 1 to the server ends in the middle of an epoch, as if it was killed."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            trainer.strategy._run.worker.link.close()


def ends(rank: int, world: int) -> dict[str, str]:
    def said(data: Any, stream: Any = "finite", module: Any = Noting, **kwargs: Any) -> str:
        try:
            fit(rank, world, data, strategy={"stream": stream}, module=module(), max_epochs=2, **kwargs)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def failing(samples: int) -> Any:
        return DataLoader(Own(rank, MORE[rank], fails=samples if rank == 1 else None), batch_size=BATCH)

    return {
        "unsaid": said(loader(rank), None),
        "shared": said(loader(rank), "shared"),
        "by hand": said(loader(rank), module=ByHand),
        "sizes": said(loader(rank, batch_size=4 + rank)),
        "batches": said(DataLoader(Own(rank, 8), batch_size=None)),
        "several": said({"a": loader(rank), "b": loader(rank)}),
        "all empty": said(loader(rank, (0, 0, 0))),
        "fails at once": said(failing(2)),
        "fails": said(failing(18)),
        "leaves": said(loader(rank), callbacks=[Leaving()]),
    }


@cache
def all_ends() -> dict[str, list[str]]:
    return by_name(run_ranks(WORLD, ends))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unsaid", "BoundedStalenessStrategy(stream='finite') if every rank has its own stream that"),
        ("shared", "stream='shared' must be one of (None, 'finite')"),
        ("by hand", "cannot be combined with manual optimization here"),
        ("sizes", "the train loaders differ between ranks in batch_size"),
        ("batches", "makes its own batches"),
        ("several", "several train loaders"),
        ("all empty", "accepted"),
    ],
)
def test_all_ranks_are_told_the_same(name: str, words: str) -> None:
    assert all(words in said for said in all_ends()[name]), all_ends()[name]


def test_a_stream_that_fails_ends_the_run_on_all_ranks_with_its_reason() -> None:
    first, failing, last = all_ends()["fails at once"]
    assert failing == "OSError: the shard is gone"
    assert first == last == "RuntimeError: the stream of rank 1 fails at its begin, see its error"
    assert all("the shard is gone" in said for said in all_ends()["fails"])


def test_a_rank_that_is_gone_ends_the_run() -> None:
    for said in all_ends()["leaves"][::2]:
        assert "rank 1 is gone" in said and "(stream='finite') are no other rank's" in said
