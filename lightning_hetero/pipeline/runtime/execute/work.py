"""What a group's leader is given for one training step (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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


def wrong_count(number: int, found: str, *, expected: int) -> str:
    """Says that the body of a micro-batch called the backbone ``found`` times."""
    return (
        f"the training step of micro-batch {number} called the backbone {found} times, expected {expected}:"
        " every training step must call it equally often, and at least once. Where the number changes with the epochs,"
        " let a property backbone_calls of the LightningModule say it, which is read when an epoch begins; or use"
        " strategy='hetero_balanced'"
    )
