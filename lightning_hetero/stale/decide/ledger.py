"""Which samples of an epoch are free, assigned, or arrived: books over the epoch's order (layer P).

A *position* is a place in the epoch's order of samples, 0 to N - 1; a *span* is ``[start, end)``. Every position is
free, then assigned, then arrived; an assignment that fails makes its positions free again. Ours; a shared cursor cannot
say that update t consists of batch t.

Cost: every operation is linear in the number of spans, about the number of assignments, however large N is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from lightning_hetero.solvers import apportion
from lightning_hetero.stale.decide.effects import Span
from lightning_hetero.stale.decide.intervals import IntervalSet, head, outside, size


class Ledger:
    """Positions of one epoch, cut into the batches of its global steps and, per batch, into a slice per rank.

    `take` prefers positions in this order, ascending within each group:

    1. the rank's own slices of the batches up to ``global_step``;
    2. what else is free in these batches, except this batch's slices of ``pending`` ranks, which are still to come;
    3. the rank's own slices of later batches;
    4. what lies behind and is nobody's slice yet;
    5. the rest: slices of others.

    Hence: if in each global step every rank takes exactly its slice, update t consists of exactly the positions of
    batch t, whichever rank comes first; and what one rank leaves (because it died, or got less) goes to the next one
    that takes more.

    Args:
        ends: positions behind each batch, cumulative; N = ``ends[-1]``.
        applied: positions that count as arrived from the start (resume).

    Raises:
        ValueError: ``ends`` does not increase from above 0, or ``applied`` overlaps itself or leaves ``[0, N)``.
    """

    def __init__(self, ends: Sequence[int], *, applied: Iterable[Span] = ()) -> None:
        self.ends = list(ends)
        if wrong := [span for span in pairwise((0, *self.ends)) if span[0] >= span[1]]:
            raise ValueError(f"ends must increase strictly from above 0, but {wrong[0][1]} follows {wrong[0][0]}")
        self.total = self.ends[-1] if self.ends else 0
        self._free = IntervalSet([(0, self.total)])
        self._arrived = IntervalSet(applied)
        for start, end in self._arrived:
            self._free.remove(start, end)
        self._slices: dict[int, dict[int, Span]] = {}  # batch -> rank -> slice; finished batches are forgotten
        self._planned: dict[int, Mapping[int, int]] = {}  # batch -> rank -> its share
        self._stepped: dict[int, IntervalSet] = {}  # sub-step -> positions for which it counts already

    def extend(self, ends: Sequence[int]) -> None:
        """Adds batches behind the last one; what they hold is free."""
        self.ends += ends
        if ends:
            self._free.add(self.total, self.ends[-1])
            self.total = self.ends[-1]

    @property
    def free(self) -> int:
        """Positions nobody has [samples]."""
        return self._free.count

    @property
    def arrived(self) -> int:
        """Positions pooled or applied [samples]."""
        return self._arrived.count

    def arrived_spans(self) -> list[Span]:
        """Returns the positions that arrived, ascending."""
        return list(self._arrived)

    def bounds(self, batch: int) -> Span:
        """Returns first position and end of a batch."""
        return (self.ends[batch - 1] if batch else 0), self.ends[batch]

    def laid_out(self, batch: int) -> bool:
        """Whether the slices of ``batch`` are fixed."""
        return batch in self._slices

    def lay_out(self, batch: int, shares: Mapping[int, int]) -> None:
        """Fixes the slices of a batch, once: what is free of it, in proportion to ``shares``, in order of rank.

        Args:
            batch: index of the batch; not laid out yet, as ranks may have fetched its slices.
            shares: samples per rank, usually summing to the batch's size.
        """
        spans = self._free.within(*self.bounds(batch))
        ranks = sorted(rank for rank, share in shares.items() if share > 0)
        parts: Sequence[int] = [shares[rank] for rank in ranks]
        if ranks and sum(parts) != (free := size(spans)):
            parts = apportion(list(map(float, parts)), free)
        self._slices[batch], self._planned[batch] = {}, shares
        for rank, part in zip(ranks, parts, strict=True):
            mine, spans = head(spans, part)
            if mine:
                self._slices[batch][rank] = mine[0][0], mine[-1][1]

    def owners(self, batch: int) -> int:
        """Returns how many ranks have a slice of the batch."""
        return len(self._slices.get(batch, {}))

    def slice(self, rank: int, batch: int) -> Span:
        """Returns the rank's slice of a batch; ``(0, 0)`` without a slice, or the batch is not laid out or finished."""
        return self._slices.get(batch, {}).get(rank, (0, 0))

    def planned(self, rank: int, batch: int) -> int:
        """Returns the rank's share of the batch when that was laid out [samples]; its slice may have less."""
        return self._planned.get(batch, {}).get(rank, 0)

    def free_in_slice(self, rank: int, batch: int) -> int:
        """Returns how much of the rank's slice is free [samples]."""
        return size(self._free.within(*self.slice(rank, batch)))

    def take(self, rank: int, count: int, global_step: int, *, pending: Collection[int] = ()) -> tuple[Span, ...]:
        """Assigns ``min(count, free)`` positions, preferred as the class says.

        Args:
            rank: who takes them.
            count: how many [samples].
            global_step: the present batch.
            pending: ranks that are still expected to take their slice of this batch.
        """
        taken: list[Span] = []
        for start, stop in self._preferred(rank, global_step, pending):
            if count <= 0:
                break
            mine, _ = head(self._free.within(start, stop), count)
            for a, b in mine:
                self._free.remove(a, b)
                count -= b - a
            taken += mine
        for batch in [b for b in self._slices if b < global_step and not self._free.within(*self.bounds(b))]:
            del self._slices[batch], self._planned[batch]
        return tuple(taken)

    def _preferred(self, rank: int, global_step: int, pending: Collection[int]) -> Iterator[Span]:
        here = self.ends[min(global_step, len(self.ends) - 1)]
        batches = sorted(self._slices)
        yield from (self.slice(rank, b) for b in batches if b <= global_step)
        kept = [s for r, s in self._slices.get(global_step, {}).items() if r in pending]
        yield from outside(0, here, kept)
        yield from (self.slice(rank, b) for b in batches if b > global_step)
        yield from outside(here, self.total, [self.bounds(b) for b in batches if b > global_step])
        yield 0, self.total

    # ---- sub-steps --------------------------------------------------------------------------------------------

    def first(self, substep: int, spans: Sequence[Span]) -> bool:
        """Notes that an optimizer step inside a batch counts for these positions.

        Returns:
            False, and nothing is noted, if it counts for one of them already.
        """
        counted = self._stepped.setdefault(substep, IntervalSet())
        if any(counted.within(*span) for span in spans):
            return False
        for span in spans:
            counted.add(*span)
        return True

    def alike(self, spans: Sequence[Span]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Cuts ``spans`` where the sub-steps that count already become others.

        A push is one mean over all its samples, so they must have the same sub-steps behind them.
        """
        same = 0
        behind: list[bool] | None = None
        for start, end in spans:
            here: list[bool] = []
            stop = end
            for counted in self._stepped.values():
                inside = counted.within(start, end)
                here.append(bool(inside) and inside[0][0] == start)
                if inside:
                    stop = min(stop, inside[0][1] if here[-1] else inside[0][0])
            if behind is not None and here != behind:
                break
            behind, same = here, same + stop - start
            if stop < end:
                break
        return head(spans, same)

    def substeps(self) -> dict[int, list[list[int]]]:
        """Returns, per sub-step, the positions for which it counts, as ``[start, end]``."""
        return {k: [list(span) for span in counted] for k, counted in self._stepped.items()}

    def resume_substeps(self, counted: Mapping[int, Iterable[Sequence[int]]]) -> None:
        """Takes over what `substeps` has returned."""
        self._stepped = {int(k): IntervalSet((start, end) for start, end in spans) for k, spans in counted.items()}

    # ---- arrivals ---------------------------------------------------------------------------------------------

    def arrive(self, spans: Iterable[Span]) -> None:
        """Marks assigned positions as arrived; ValueError if one has arrived before."""
        for span in spans:
            self._arrived.add(*span)

    def release(self, spans: Iterable[Span]) -> None:
        """Makes assigned positions free again; ValueError if one is free."""
        for span in spans:
            self._free.add(*span)
