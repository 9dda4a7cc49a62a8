"""What a group's leader is given for one training step, who trains it, and the pace it goes at (layer T)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.step.random_streams import stream_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One part of a global batch, on the leader.

    Attributes:
        body: runs the training step on it and returns what that returns; called without arguments.
        samples: in it.
        weight: of its loss: its part of the global batch.
        number: of the micro-batch in the global batch, over all groups: of its random streams.
    """

    body: Callable[[], Any]
    samples: int
    weight: float
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderWork:
    """One training step, as a group's leader is given it.

    Attributes:
        micro_batches: in order; at least one.
        step: global step, of the random streams.
        seed: of the run.
        scale: applied to each weighted loss, e.g. a gradient scaler's.
        before_last_backward: called before the last backward through this rank's layers.
    """

    micro_batches: Sequence[MicroBatch]
    step: int
    seed: int
    scale: Callable[[Tensor], Tensor] | None
    before_last_backward: Callable[[], None] | None

    def body_seed(self, number: int) -> int:
        """Returns the seed of the random streams of a micro-batch's body."""
        return stream_seed(self.seed, self.step, number)


class _Execution(Protocol):
    results: list[Any]

    def run(self) -> None: ...


class LeaderRunner(ABC):
    """Trains a group's part of global batches, on the leader.

    Args:
        seed: of the run's random streams.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        before_last_backward: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Runs forward and backward of this group's part of a global batch; on the leader.

        To the parameters' ``.grad`` is added the sum over micro-batches of weight * gradient.

        Args:
            step: number of the training step, of the random streams.
            micro_batches: in order; none: the group has no part in this batch.
            scale: applied to each weighted loss before its backward, e.g. ``GradScaler.scale``.
            before_last_backward: called immediately before the last backward through this rank's layers, when the
                gradients of all else that this rank computes are complete but for what lies before the backbone.

        Returns:
            What the bodies returned, detached.

        Raises:
            RuntimeError: another rank has failed; a body called the backbone another number of times than expected.
            BaseException: what a body raises.
        """
        with self._leading():
            if not micro_batches:
                if before_last_backward is not None:
                    before_last_backward()
                return []
            work = LeaderWork(
                micro_batches=micro_batches,
                step=step,
                seed=self._seed,
                scale=scale,
                before_last_backward=before_last_backward,
            )
            execution = self._execution(work)
            execution.run()
            return execution.results

    @abstractmethod
    def _leading(self) -> AbstractContextManager[None]:
        """Keeps the caller's random streams; a failure inside is told to all ranks."""

    @abstractmethod
    def _execution(self, work: LeaderWork) -> _Execution:
        """Returns what runs a training step."""


class Pace(Protocol):
    """Lets this rank take an emulated device's time."""

    def began(self) -> None:
        """Called before each computation."""
        ...

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        """Called after each computation; sleeps what is missing.

        Args:
            kind: forward, head or backward.
            stage: of the schedule.
            samples: in the micro-batch.
            elapsed_s: what it really took.
        """
        ...


def began(pace: Pace | None) -> float:
    """Tells the pace that a computation begins; returns when [s, time.perf_counter]."""
    if pace is not None:
        pace.began()
    return time.perf_counter()


def paced(pace: Pace | None, kind: Kind, stage: int, samples: int, start_s: float) -> None:
    """Tells the pace of a computation that began at ``start_s`` [s, time.perf_counter]."""
    if pace is not None:
        pace.computed(kind, stage, samples, time.perf_counter() - start_s)


def wrong_count(number: int, found: str, *, expected: int) -> str:
    """Says that the body of a micro-batch called the backbone ``found`` times."""
    return (
        f"the training step of micro-batch {number} called the backbone {found} times, expected {expected}:"
        " every training step must call it equally often, and at least once. Where the number changes with the epochs,"
        " let a property backbone_calls of the LightningModule say it, which is read when an epoch begins; or use"
        " strategy='hetero_balanced'"
    )
