"""Arithmetic of spans: positions ``[start, end)`` of an epoch's order, taken many at a time (layer P).

Cost: every operation is linear in the number of spans, however many positions they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_hetero.stale.decide.effects import Span


def pairs(numbers: Sequence[int]) -> tuple[Span, ...]:
    """Returns the spans that a message carries flat.

    >>> pairs([0, 3, 8, 10])
    ((0, 3), (8, 10))
    """
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def size(spans: Iterable[Span]) -> int:
    """Returns how many positions ``spans`` hold.

    >>> size([(0, 3), (8, 10)])
    5
    """
    return sum(end - start for start, end in spans)


def head(spans: Iterable[Span], count: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Cuts ``spans`` after ``count`` positions, in the order given.

    >>> head([(8, 10), (0, 3)], 3)
    (((8, 10), (0, 1)), ((1, 3),))
    """
    first: list[Span] = []
    rest: list[Span] = []
    for start, end in spans:
        cut = min(start + max(count, 0), end)
        count -= cut - start
        if cut > start:
            first.append((start, cut))
        if end > cut:
            rest.append((cut, end))
    return tuple(first), tuple(rest)


def pieces(spans: Iterable[Span], samples: int) -> list[tuple[Span, ...]]:
    """Cuts ``spans`` into pieces of ``samples`` positions, the last of which may have fewer; 0: one piece.

    >>> pieces([(0, 3), (8, 10)], 2)
    [((0, 2),), ((2, 3), (8, 9)), ((9, 10),)]
    """
    rest = tuple(spans)
    if samples <= 0 or size(rest) <= samples:
        return [rest]
    cut: list[tuple[Span, ...]] = []
    while rest:
        piece, rest = head(rest, samples)
        cut.append(piece)
    return cut


def leaving(global_steps: int, spans: Iterable[Sequence[int]], total: int) -> tuple[Span, ...]:
    """Returns as much of ``spans`` as leaves a position of ``[0, total)`` for each of the global steps to come.

    Only a checkpoint made while a rank failed can have more: the other ranks had gone on, and what they did last is
    trained again.

    >>> leaving(4, [(0, 17), (18, 20)], 20)
    ((0, 16),)
    """
    inside = [(start, min(end, total)) for start, end in spans if start < total]
    return head(inside, total - global_steps)[0]


def outside(start: int, stop: int, kept: Iterable[Span]) -> Iterator[Span]:
    """Yields what of ``[start, stop)`` lies in none of the disjoint spans ``kept``."""
    for a, b in sorted(kept):
        if a > start:
            yield start, min(a, stop)
        start = max(start, b)
    if start < stop:
        yield start, stop


class IntervalSet:
    """A set of positions as sorted, disjoint, non-touching spans."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans: list[Span] = []
        self.count = 0
        for start, end in spans:
            self.add(start, end)

    def __iter__(self) -> Iterator[Span]:
        return iter(list(self._spans))

    def within(self, start: int, end: int) -> list[Span]:
        """Returns the spans of the set inside ``[start, end)``, cut at both ends."""
        return [(max(a, start), min(b, end)) for a, b in self._spans if max(a, start) < min(b, end)]

    def add(self, start: int, end: int) -> None:
        """Puts ``[start, end)`` in; ValueError if a part of it is in already."""
        if start >= end:
            return
        if there := self.within(start, end):
            raise ValueError(f"positions of [{start}, {end}) are there already: {there}")
        self.count += end - start
        apart: list[Span] = []
        for a, b in self._spans:
            if b == start:
                start = a
            elif a == end:
                end = b
            else:
                apart.append((a, b))
        self._spans = sorted([*apart, (start, end)])

    def remove(self, start: int, end: int) -> None:
        """Takes ``[start, end)`` out; ValueError if a part of it is not in."""
        if start >= end:
            return
        if (there := self.within(start, end)) != [(start, end)]:
            raise ValueError(f"not all positions of [{start}, {end}) are there: only {there}")
        self.count -= end - start
        parts = [part for a, b in self._spans for part in ((a, min(b, start)), (max(a, end), b))]
        self._spans = [(a, b) for a, b in parts if a < b]
