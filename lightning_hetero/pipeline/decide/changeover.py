"""From which batch on another plan can hold, though batches have been drawn for the plan before (layer P).

    drawn for the old plan:   | s | s+1 | ... | s+lag |     read ahead by the loader: the leaders' shares are fixed
    not drawn yet:                                    | s+lag+1 | ...

Layers can move at once if everyone who has drawn samples leads a group under the new plan, too; the shares follow.
Otherwise a rank would hold samples that nobody under the new plan computes: then both wait. Layers only move where a
window of accumulation begins: gradients of an open one would be lost.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

__all__ = ["Changeover", "Position", "changeover"]

Position = tuple[int, int]
"""Epoch, and batch in it. A position behind an epoch's end stands for the first batch of the next."""


@dataclass(frozen=True, slots=True)
class Changeover:
    """From which batches on a plan holds.

    Attributes:
        layers_at: who holds which layers, micro-batches and depths.
        shares_at: who reads how many samples.
    """

    layers_at: Position
    shares_at: Position


def changeover(
    now: Position, *, lag: int, window: int, drawn_for: Set[int], leaders: Set[int], moves: bool = True
) -> Changeover:
    """Returns from when on a plan that is decided now can hold; the same on all ranks.

    Args:
        now: the batch that is trained next; drawn already.
        lag: batches drawn behind it at most, on any rank.
        window: batches per step of the optimizer.
        drawn_for: the leaders for whom samples of these batches may have been drawn.
        leaders: under the new plan.
        moves: whether layers move; otherwise the middle of a window is as good as its begin.

    >>> changeover((0, 5), lag=0, window=1, drawn_for={0}, leaders={0, 1})
    Changeover(layers_at=(0, 5), shares_at=(0, 6))
    >>> changeover((0, 5), lag=2, window=4, drawn_for={0}, leaders={1})
    Changeover(layers_at=(0, 8), shares_at=(0, 8))
    """
    epoch, step = now
    if not moves:
        window = 1
    free = step + lag + 1
    if drawn_for <= leaders:
        layers = -(-step // window) * window
        return Changeover((epoch, layers), (epoch, max(free, layers)))
    both = -(-free // window) * window
    return Changeover((epoch, both), (epoch, both))
