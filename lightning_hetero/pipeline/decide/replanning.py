"""What ranks tell one another of a batch, whether they wait for a decision on it, and from when on it holds (layer P).

All ranks tell as many numbers whatever happened, for one sum over them. To wait for a decision costs every batch what
rank 0 needs for it and a message; not to wait, that it holds two batches later. So they wait where something has just
changed a lot, which all of them see in what they told one another.

    drawn for the old plan:   | s | s+1 | ... | s+lag |     read ahead by the loader: the leaders' shares are fixed
    not drawn yet:                                    | s+lag+1 | ...

Layers can move at once if every rank that has drawn samples leads a group under the new plan, too; the shares follow.
Otherwise a rank would hold samples that no rank under the new plan computes: then both wait. Layers only move where a
window of accumulation begins: gradients of an open one would be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.types import GroupPlan

_WORK = 5  # numbers of a rank: samples, own work, waiting, the exchange of the batch before; `rest_s`
_WAYS, _WAY = 2, 4  # neighbours that a rank receives from, at most; numbers of each: source, messages, bytes, seconds
_EACH = _WORK + _WAYS * _WAY


def reporting_group(batch: int, groups: Sequence[GroupPlan]) -> int:
    """Returns which group's ranks tell of their layers in a batch: all have the same layers, and take turns."""
    return batch % len(groups)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One rank's numbers, or the sum of all ranks', which has those of each.

    Attributes:
        world: ranks.
        numbers: of each rank, in order, and behind them one for each layer of the backbone.
    """

    world: int
    numbers: Sequence[float]

    @classmethod
    def of_rank(
        cls, rank: int, world: int, layers: int, work: tuple[float, float, float, float], *, rest_s: float = 0.0,
        links: Sequence[LinkTime] = (), first_layer: int = 0, layer_s: Sequence[float] = (),
    ) -> BatchReport:  # fmt: skip
        """Returns what one rank has to tell.

        Args:
            rank, world, layers: which rank tells, of how many, and how many layers the backbone has.
            work: samples; own work [s]; waiting for others until this message was sent, which is when the sums of the
                gradients have begun [s]; what followed in the batch before, until these and the message were there [s].
            rest_s: of an idle rank: what a computation that is always the same took [s].
            links: on which it has received; of more than two neighbours the first two.
            first_layer, layer_s: of its layers, in order [s]; none if it is not its group's turn.
        """
        ways = [(float(x.source), float(x.messages), x.size_bytes, x.seconds) for x in links[:_WAYS]]
        numbers = [0.0] * (_EACH * world + layers)
        for at, told in ((_EACH * rank, [*work, rest_s, *chain(*ways)]), (_EACH * world + first_layer, layer_s)):
            numbers[at : at + len(told)] = told
        return cls(world, numbers)

    @property
    def _ranks(self) -> list[Sequence[float]]:
        """Each rank's numbers."""
        return [self.numbers[_EACH * rank : _EACH * (rank + 1)] for rank in range(self.world)]

    @property
    def work(self) -> list[tuple[int, float, float]]:
        """By rank: samples, own work [s], the rest of the batch [s].

        The batch ends for all together. When the last one has sent its message the exchange alone is left: what it took
        in the batch before, where it took the last rank the least time.
        """
        rows = self._ranks
        batch_s = max(row[1] + row[2] for row in rows) + min(row[3] for row in rows)
        return [(round(samples), compute_s, batch_s - compute_s) for samples, compute_s, *_ in rows]

    @property
    def rest_s(self) -> dict[int, float]:
        """By idle rank that has looked: what a computation that is always the same took [s]."""
        return {rank: row[_WORK - 1] for rank, row in enumerate(self._ranks) if row[_WORK - 1] > 0.0}

    @property
    def links(self) -> list[LinkTime]:
        """What was timed of messages between ranks."""
        return [
            LinkTime(
                source=round(source), target=target, messages=round(messages), size_bytes=size_bytes, seconds=seconds
            )
            for target, row in enumerate(self._ranks)
            for source, messages, size_bytes, seconds in (row[i : i + _WAY] for i in range(_WORK, _EACH, _WAY))
            if messages > 0
        ]

    def layer_s(self, group: GroupPlan) -> dict[int, list[float]]:
        """Returns by rank what its layers took [s], of a group that told of them; ranks that did not are left out."""
        layers = list(self.numbers[_EACH * self.world :])
        own = {rank: layers[a:b] for rank, (a, b) in zip(group.ranks, pairwise(group.cuts), strict=True)}
        return {rank: seconds for rank, seconds in own.items() if min(seconds) > 0.0}


_BATCHES = 4  # compared with one another: a change is believed when it has been measured twice
_SETTLING = 5  # batches under a plan that answers a jump: how fast devices are is known from few batches yet
_BAND = 0.15  # relative; more than steps of an unchanged device usually differ


class Jumps:
    """Compares a few batches; the same on all ranks, if what they are given is.

    >>> jumps, steady, slow = Jumps(), [(8, 0.1), (8, 0.1)], [(8, 0.1), (8, 0.2)]
    >>> sum(jumps.add(0, steady, {}) for _ in range(20))
    5
    >>> [jumps.add(0, slow, {}) for _ in range(5)]
    [True, True, True, False, False]
    >>> any(jumps.add(1, slow, {}) for _ in range(5))  # a small correction of shares
    False
    """

    def __init__(self) -> None:
        self._seconds: deque[dict[tuple[str, int], float]] = deque(maxlen=_BATCHES)
        self._generation, self._settling, self._waits = -1, 0, True

    def add(self, generation: int, work: Sequence[tuple[int, float]], rest_s: Mapping[int, float]) -> bool:
        """Takes in a batch; returns whether to wait.

        Args:
            generation: of the plan that it ran under.
            work: by rank: samples, own work [s].
            rest_s: by idle rank: what a computation that is always the same took [s].
        """
        if generation != self._generation:
            self._generation, self._settling = generation, _SETTLING if self._waits else 0
        now = {("work", rank): work_s / n for rank, (n, work_s) in enumerate(work) if n and work_s > 0.0}
        now |= {("rest", rank): seconds for rank, seconds in rest_s.items()}
        self._seconds.append(now)
        self._waits = self._settling > 0 or self._has_jumped(now)
        self._settling = max(0, self._settling - 1)
        return self._waits

    def _has_jumped(self, now: Mapping[tuple[str, int], float]) -> bool:
        each = ([seconds.get(key, value) for seconds in self._seconds] for key, value in now.items())
        return any(max(values) > (1.0 + _BAND) * min(values) for values in each)


Position = tuple[int, int]
"""Epoch, and batch in it. A position behind an epoch's end stands for the first batch of the next."""


def changeover(
    now: Position, *, lag: int, window: int, drawn_for: Set[int], leaders: Set[int], moves: bool = True
) -> tuple[Position, Position]:
    """Returns from when on a plan that is decided now can hold; the same on all ranks.

    The first position is that of layers, micro-batches and depths, the second of which rank reads how many samples.

    Args:
        now: the batch that is trained next; drawn already.
        lag: batches drawn behind it at most, on any rank.
        window: batches per step of the optimizer.
        drawn_for: the leaders for whom samples of these batches may have been drawn.
        leaders: under the new plan.
        moves: whether layers move; otherwise the middle of a window is as good as its begin.

    >>> changeover((0, 5), lag=0, window=1, drawn_for={0}, leaders={0, 1})
    ((0, 5), (0, 6))
    >>> changeover((0, 5), lag=2, window=4, drawn_for={0}, leaders={1})
    ((0, 8), (0, 8))
    """
    epoch, step = now
    if not moves:
        window = 1
    free = step + lag + 1
    layers = -(-(step if drawn_for <= leaders else free) // window) * window
    return (epoch, layers), (epoch, max(free, layers))
