"""Structures near a structure: borders, swaps, moving, shifting, resting, waking, merging, splitting (layer P).

Each is drafted, not solved: borders of a new pipeline stand where stages are as even as layers, speeds and memory
allow, links left out (`Drafts`). That is a hundredth of the price of a split, which only the best drafts are given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from typing import TypeAlias

from lightning_hetero.solvers.placement.pipes import Pipe, Problem

Pipes: TypeAlias = tuple[Pipe, ...]
Ranks: TypeAlias = tuple[int, ...]
Change: TypeAlias = tuple[set[int], Sequence["Pipe | Ranks"]]
"""The pipelines that go, and what comes: pipelines, or orders of ranks to draft some of."""

_TURNS = 12  # bisections of the period: to 3e-4


class Drafts:
    """Pipelines of given orders of ranks, with borders that make the stages even; remembers them."""

    def __init__(self, problem: Problem, micro_samples: int) -> None:
        self.problem, self._size = problem, micro_samples
        fixed, per_sample = problem.work_s
        self._work: list[float] = (fixed + per_sample * micro_samples).tolist()
        lead_fixed, lead_per_sample = problem.outside_s
        self._lead = float(lead_fixed + lead_per_sample * micro_samples)
        self._speeds: list[float] = problem.speeds.tolist()
        self._caps: list[float] = problem.caps.tolist()
        self._bytes: dict[int, list[float]] = {}  # up to each layer, by micro-batches in flight
        self._known: dict[Ranks, Pipe | None] = {}

    def pipe(self, ranks: Ranks) -> Pipe | None:
        """Returns the draft for this order; None without a draft."""
        if ranks not in self._known:
            cuts = self._cuts(ranks)
            self._known[ranks] = Pipe(ranks, cuts) if cuts else None
        return self._known[ranks]

    def _cuts(self, ranks: Ranks) -> tuple[int, ...] | None:
        layers = self.problem.n_layers
        if len(ranks) > layers:
            return None
        if len(ranks) == 1:
            return (0, layers)
        speed = sum(self._speeds[rank] for rank in ranks)
        high = (self._work[-1] + self._lead) / min(self._speeds[rank] for rank in ranks)
        best = self._walk(ranks, high)
        if best is None:
            return None
        low = min((self._work[-1] + self._lead) / speed * 0.5, high)
        for _ in range(_TURNS):
            middle = 0.5 * (low + high)
            found = self._walk(ranks, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _walk(self, ranks: Ranks, period_s: float) -> tuple[int, ...] | None:
        """Gives each stage as many layers as it has time and memory for."""
        work, layers, last = self._work, self.problem.n_layers, len(ranks) - 1
        cuts, at = [0], 0
        for stage, rank in enumerate(ranks):
            room_s = period_s * self._speeds[rank] - (0.0 if stage else self._lead)
            end = bisect_right(work, work[at] + room_s * (1.0 + 1e-12)) - 1
            if self._caps[rank] < math.inf:
                need = self._needed(last - stage + 2)
                room_bytes = self._caps[rank] - (0.0 if stage else self._leader_bytes(last + 2))
                end = min(end, bisect_right(need, need[at] + room_bytes) - 1)
            end = min(end, layers - (last - stage))
            if end <= at:
                return None
            cuts.append(end)
            at = end
        return tuple(cuts) if at == layers else None

    def _needed(self, in_flight: int) -> list[float]:
        """Returns what the layers in front of each one need, for so many micro-batches [bytes]."""
        need = self._bytes.get(in_flight)
        if need is None:
            problem, each = self.problem, in_flight * min(self._size, self.problem.samples)
            need = self._bytes[in_flight] = (problem.one.state_to + each * problem.one.activation_to).tolist()
        return need

    def _leader_bytes(self, in_flight: int) -> float:
        problem, each = self.problem, in_flight * min(self._size, self.problem.samples)
        return problem.outside.state_bytes + each * problem.outside.activation_bytes


def borders(pipes: Pipes, busiest: Sequence[int], layers: int) -> Iterator[Pipes]:
    """Moves one border, alone or wherever pipelines share it; the borders of the busiest stages, by pipeline, first.

    By 1, 2, 4, ... layers. Shared borders are synchronised in fewer rounds.
    """
    near: list[tuple[int, int, int]] = []
    for p, pipe in enumerate(pipes):
        near += [(min(abs(i - busiest[p]), abs(i - 1 - busiest[p])), p, i) for i in range(1, len(pipe.ranks))]
    for _, p, i in sorted(near):
        border = pipes[p].cuts[i]
        most = max(2, layers // (2 * len(pipes[p].ranks)))
        shared = [q for q, other in enumerate(pipes) if border in other.cuts]
        for step in (sign << k for k in range(most.bit_length()) for sign in (1, -1)):
            for some in ([p], shared) if len(shared) > 1 and p == shared[0] else ([p],):
                moved = [
                    Pipe(pipes[q].ranks, tuple(border + step if cut == border else cut for cut in pipes[q].cuts))
                    for q in some
                ]
                if all(a < b for pipe in moved for a, b in pairwise(pipe.cuts)):
                    yield _with(pipes, set(some), moved)


def neighbours(pipes: Pipes, drafts: Drafts, first: Sequence[int], most_groups: int) -> Iterator[Pipes]:
    """Structures that differ in one respect, kinds in turn, those that concern the ranks of ``first`` first."""
    near = _Neighbours(pipes, drafts.problem, first, most_groups)
    kinds = [near.redrawn(), near.rested(), near.woken(), near.moved(), near.shifted(), near.swapped(), near.split()]
    kinds.append(near.merged())
    while kinds:
        for kind in list(kinds):
            change = next(kind, None)
            if change is None:
                kinds.remove(kind)
                continue
            gone, new = change
            drawn = [one if isinstance(one, Pipe) else drafts.pipe(one) for one in new]
            found = _with(pipes, gone, [pipe for pipe in drawn if pipe is not None])
            if None not in drawn and 0 < len(found) <= max(most_groups, len(pipes)):
                yield found


def _with(pipes: Pipes, gone: set[int], new: Sequence[Pipe]) -> Pipes:
    kept = [pipe for p, pipe in enumerate(pipes) if p not in gone]
    return tuple(sorted([*kept, *new], key=lambda pipe: min(pipe.ranks)))


class _Neighbours:
    """The kinds of changes of one structure."""

    def __init__(self, pipes: Pipes, problem: Problem, first: Sequence[int], most_groups: int) -> None:
        self._pipes, self._rows, self._room = pipes, problem.per_byte_rows, most_groups - len(pipes)
        self._ranks = [*first, *(rank for rank in range(problem.n_devices) if rank not in set(first))]
        self._home = {rank: (p, i) for p, pipe in enumerate(pipes) for i, rank in enumerate(pipe.ranks)}

    def _left(self, rank: int) -> Ranks:
        """Returns the rest of a rank's pipeline."""
        p, i = self._home[rank]
        order = self._pipes[p].ranks
        return (*order[:i], *order[i + 1 :])

    def _working(self) -> Iterator[tuple[int, int, Ranks]]:
        for rank in self._ranks:
            if rank in self._home:
                yield rank, self._home[rank][0], self._left(rank)

    def redrawn(self) -> Iterator[Change]:
        yield set(range(len(self._pipes))), [pipe.ranks for pipe in self._pipes]
        for p, pipe in enumerate(self._pipes):
            if len(pipe.ranks) > 1:
                yield {p}, [pipe.ranks]
                yield {p}, [pipe.ranks[::-1]]

    def rested(self) -> Iterator[Change]:
        for _, p, left in self._working():
            yield {p}, [left] if left else []

    def woken(self) -> Iterator[Change]:
        resting = [rank for rank in self._ranks if rank not in self._home]
        for rank in resting:
            if self._room > 0:
                yield set(), [(rank,)]
            for p, pipe in enumerate(self._pipes):
                for order in self._inserted(pipe.ranks, rank):
                    yield {p}, [order]

    def _inserted(self, order: Ranks, rank: int) -> Iterator[Ranks]:
        """Puts a rank at the end, and behind the rank which has the best link to it."""
        yield (*order, rank)
        near = min(range(len(order)), key=lambda i: (self._rows[order[i]][rank], i))
        if near + 1 < len(order):
            yield (*order[: near + 1], rank, *order[near + 1 :])

    def moved(self) -> Iterator[Change]:
        for rank, p, left in self._working():
            if left and self._room > 0:
                yield {p}, [left, (rank,)]
            for q, pipe in enumerate(self._pipes):
                if q != p:
                    for longer in self._inserted(pipe.ranks, rank):
                        yield {p, q}, [left, longer] if left else [longer]

    def shifted(self) -> Iterator[Change]:
        """Puts a rank elsewhere in its own pipeline, first where all links together are fastest."""
        rows = self._rows

        def trip_s(a: int, b: int) -> float:
            return rows[a][b] + rows[b][a]

        for rank, p, left in self._working():
            if (n := len(left)) < 2:
                continue
            added_s = [  # places 0 and n are between the same two, around the loop
                trip_s(left[j - 1], rank) + trip_s(rank, left[j % n]) - trip_s(left[j - 1], left[j % n])
                for j in range(n + 1)
            ]
            for j in sorted(range(n + 1), key=lambda j: (added_s[j], -j)):
                if j != self._home[rank][1]:
                    yield {p}, [(*left[:j], rank, *left[j:])]

    def swapped(self) -> Iterator[Change]:
        for one, two in combinations(self._ranks, 2):
            places = {self._home[rank][0] for rank in (one, two) if rank in self._home}
            both = one in self._home and two in self._home
            if not places or (both and len(places) == 1 and len(self._left(one)) == 0):
                continue
            exchange = {one: two, two: one}
            pipes = [self._pipes[p] for p in sorted(places)]
            new = [tuple(exchange.get(rank, rank) for rank in pipe.ranks) for pipe in pipes]
            yield places, new
            yield places, [Pipe(order, pipe.cuts) for order, pipe in zip(new, pipes, strict=True)]

    def split(self) -> Iterator[Change]:
        for p, pipe in enumerate(self._pipes):
            order, half = pipe.ranks, len(pipe.ranks) // 2
            if half:
                yield {p}, [order[:half], order[half:]]
                yield {p}, [order[::2], order[1::2]]
            if len(order) > 2:
                yield {p}, [(rank,) for rank in order]

    def merged(self) -> Iterator[Change]:
        for p, q in combinations(range(len(self._pipes)), 2):
            yield {p, q}, [(*self._pipes[p].ranks, *self._pipes[q].ranks)]


# ---- few devices: everything there is ---------------------------------------------------------------------------


def count_structures(layers: int, ranks: int, limit: int) -> int:
    """Returns how many structures there are, or a number above ``limit``.

    >>> count_structures(3, 2, 100)  # each alone, both alone, and two orders with two borders each
    7
    """
    # With the first k ranks: the group of the last one has j ranks in any order, with any borders.
    ways = [1] + [0] * ranks  # partitions of a set of k ranks into pipelines
    for k in range(1, ranks + 1):
        ways[k] = sum(
            math.comb(k - 1, j - 1) * math.factorial(j) * math.comb(layers - 1, j - 1) * ways[k - j]
            for j in range(1, min(k, layers) + 1)
        )
        if ways[k] > limit:
            return limit + 1
    return sum(math.comb(ranks, k) * ways[k] for k in range(1, ranks + 1))


def all_structures(layers: int, ranks: int, most_groups: int) -> Iterator[Pipes]:
    """All groupings of all subsets of the ranks, in all orders, with all borders."""

    def orders(left: Ranks, groups: int) -> Iterator[Pipes]:
        if not left:
            yield ()
            return
        head, rest = left[0], left[1:]
        yield from orders(rest, groups)  # head rests
        if not groups:
            return
        for n in range(min(len(rest), layers - 1) + 1):
            for others in combinations(rest, n):
                kept = tuple(rank for rank in rest if rank not in others)
                for tail in orders(kept, groups - 1):
                    for order in permutations((head, *others)):
                        for inner in combinations(range(1, layers), n):
                            yield (Pipe(order, (0, *inner, layers)), *tail)

    return (pipes for pipes in orders(tuple(range(ranks)), most_groups) if pipes)
