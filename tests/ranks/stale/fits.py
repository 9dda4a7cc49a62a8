"""Fits of the stale engine that note which samples each rank trained on, and what the server counted per epoch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hetero.stale.decide.policy import Bsp
from tests.ranks.kit import Toy, Weights, rank_trainer, stale, weights


@dataclass
class Seen:
    """What one rank did: the indices of each batch that it trained, by (epoch, global step), and the server's counts.

    ``counts`` are totals: (accepted, discarded) samples of all ranks.
    """

    batches: list[tuple[int, int, list[int]]] = field(default_factory=list)
    dummies: int = 0
    counts: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0
    weights: Weights = field(default_factory=Weights)
    metrics: dict[str, float] = field(default_factory=dict)
    extra: Any = None


class Noting(Toy):
    """Notes the index of each sample; data is (index, x, y)."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = Seen()

    def note(self, indices: list[int], batch_idx: int) -> None:
        if self.trainer.strategy.current_samples() == 0:  # type: ignore[attr-defined]
            self.noted.dummies += 1
        else:
            self.noted.batches.append((self.current_epoch, batch_idx, indices))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        self.note(index.tolist(), batch_idx)
        return super().training_step((x, y), batch_idx)


class Counting(Callback):
    """Notes what the server has counted, at the end of each epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        told = trainer.strategy.server_metrics()
        pl_module.noted.counts.append((sum(told["samples"].values()), sum(told["discarded"].values())))


def fit(
    rank: int,
    world: int,
    loader: Any,
    *,
    strategy: dict[str, Any] | None = None,
    module: Any = None,
    callbacks: Sequence[Callback] = (),
    extra: Callable[[Trainer], Any] | None = None,
    valid: Any = None,
    **kwargs: Any,
) -> Seen:
    """Trains three epochs with a barrier, unless told otherwise."""
    module = module or Noting()
    trainer = rank_trainer(
        rank, world, stale(**{"policy": Bsp(), **(strategy or {})}), callbacks=[*callbacks, Counting()],
        **{"max_epochs": 3, **kwargs},
    )  # fmt: skip
    trainer.fit(module, loader, valid)
    seen = module.noted
    seen.steps, seen.weights = trainer.global_step, weights(module)
    seen.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    seen.extra = extra(trainer) if extra is not None else seen.extra
    return seen


def ticks(ranks: Sequence[Seen]) -> list[list[int]]:
    """The samples of each global step, sorted."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        for epoch, global_step, indices in rank.batches:
            found.setdefault((epoch, global_step), []).extend(indices)
    return [sorted(found[place]) for place in sorted(found)]


def check_once(ranks: Sequence[Seen], epochs: Sequence[Sequence[int]]) -> None:
    """Every sample of each epoch was applied exactly once, whoever computed it, and however often."""
    before = (0, 0)
    for epoch, expected in enumerate(epochs):
        trained = Counter(i for rank in ranks for e, _, indices in rank.batches if e == epoch for i in indices)
        (counts,) = {rank.counts[epoch] for rank in ranks}
        accepted, discarded = counts[0] - before[0], counts[1] - before[1]
        before = counts
        assert accepted == len(expected)
        assert not Counter(expected) - trained
        assert sum(trained.values()) - discarded == accepted


class Late(Callback):
    """A rank goes on only when ``versions`` more updates were made without it; in vain if all meet before.

    Args:
        rank: which one.
        at: ``"start"``: before its first claim of an epoch; ``"middle"``: in its first batch after the epoch's first.
        patience_s: how long it waits for them at most; longer where they certainly come.
    """

    def __init__(self, rank: int, at: str, versions: int, *, patience_s: float = 2.0) -> None:
        self.rank, self.at, self.versions, self.patience_s = rank, at, versions, patience_s
        self.epoch = -1
        self.passed = 0  # global steps without a batch

    def wait(self, trainer: Any) -> None:
        if trainer.global_rank == self.rank:
            link = trainer.strategy._run.worker.link
            goal, until_s = link.newest_version() + self.versions, time.monotonic() + self.patience_s
            while link.newest_version() < goal and time.monotonic() < until_s:
                time.sleep(0.001)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.at == "start":
            self.wait(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "middle" and batch_idx and self.epoch != trainer.current_epoch:
            self.epoch = trainer.current_epoch
            self.wait(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.passed += sum(event.kind == "passed" for event in trainer.strategy.step_events())
