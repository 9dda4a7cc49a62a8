"""Structures near a structure: borders, swaps, moving, shifting, resting, waking, merging, splitting (layer P).

Each is drafted, not solved: borders of a new pipeline stand where stages are as even as layers, speeds and memory
allow, links left out (`drafted`). That is a hundredth of the price of an exact split, which only the best drafts are
given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations

from lightning_hetero.solvers.placement.pipes import Pipe, Problem

__all__ = ["Drafts", "all_structures", "borders", "count_structures", "neighbours"]

Pipes = tuple[Pipe, ...]
Ranks = tuple[int, ...]

_TURNS = 12  # bisections of the period: to 3e-4
_STEPS = (1, -1, 2, -2)


class Drafts:
    """Pipelines of given orders of ranks, with borders that make the stages even; remembers them."""

    def __init__(self, problem: Problem, micro_samples: int) -> None:
        self.problem, self._size = problem, micro_samples
        fixed, per_sample = problem.work_s
        self._work: list[float] = (fixed + per_sample * micro_samples).tolist()
        lead_fixed, lead_per_sample = problem.leader_s
        self._lead = float(lead_fixed + lead_per_sample * micro_samples)
        self._speeds: list[float] = problem.speeds.tolist()
        self._caps: list[float] = problem.caps.tolist()
        self._bytes: dict[int, list[float]] = {}  # up to each layer, by micro-batches in flight
        self._known: dict[Ranks, Pipe | None] = {}

    def pipe(self, ranks: Ranks) -> Pipe | None:
        """Returns the draft for this order; None if there is none."""
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
            need = self._bytes[in_flight] = (problem.state_bytes + each * problem.activation_bytes).tolist()
        return need

    def _leader_bytes(self, in_flight: int) -> float:
        problem, each = self.problem, in_flight * min(self._size, self.problem.samples)
        return problem.leader_state_bytes + each * problem.leader_activation_bytes


def borders(pipes: Pipes, busiest: Sequence[int]) -> Iterator[Pipes]:
    """Moves one border by a layer or two; the borders of the busiest stages, by pipeline, first."""
    near: list[tuple[int, int, int]] = []
    for p, pipe in enumerate(pipes):
        near += [(min(abs(i - busiest[p]), abs(i - 1 - busiest[p])), p, i) for i in range(1, len(pipe.ranks))]
    for _, p, i in sorted(near):
        ranks, cuts = pipes[p]
        for step in _STEPS:
            cut = cuts[i] + step
            if cuts[i - 1] < cut < cuts[i + 1]:
                yield _with(pipes, {p}, [Pipe(ranks, (*cuts[:i], cut, *cuts[i + 1 :]))])


def neighbours(pipes: Pipes, drafts: Drafts, first: Sequence[int], most_groups: int) -> Iterator[Pipes]:
    """Structures that differ in one respect, kinds in turn, those that concern the ranks of ``first`` first."""
    problem = drafts.problem
    everyone = [*first, *(rank for rank in range(problem.n_devices) if rank not in first)]
    home = {rank: (p, i) for p, pipe in enumerate(pipes) for i, rank in enumerate(pipe.ranks)}
    kinds = [
        _redrawn(pipes, drafts),
        _rested(pipes, drafts, everyone, home),
        _woken(pipes, drafts, [rank for rank in everyone if rank not in home], most_groups),
        _moved(pipes, drafts, everyone, home, most_groups),
        _shifted(pipes, drafts, everyone, home),
        _swapped(pipes, drafts, everyone, home),
        _split(pipes, drafts, most_groups),
        _merged(pipes, drafts),
    ]
    while kinds:
        for kind in list(kinds):
            found = next(kind, None)
            if found is None:
                kinds.remove(kind)
            else:
                yield found


def _with(pipes: Pipes, gone: Iterable[int], new: Iterable[Pipe]) -> Pipes:
    kept = [pipe for p, pipe in enumerate(pipes) if p not in gone]
    return tuple(sorted([*kept, *new], key=lambda pipe: min(pipe.ranks)))


def _drawn(pipes: Pipes, drafts: Drafts, gone: Iterable[int], orders: Iterable[Ranks]) -> Pipes | None:
    new = [drafts.pipe(order) for order in orders]
    return None if None in new else _with(pipes, gone, [pipe for pipe in new if pipe is not None])


def _some(found: Iterable[Pipes | None]) -> Iterator[Pipes]:
    return (pipes for pipes in found if pipes)


def _redrawn(pipes: Pipes, drafts: Drafts) -> Iterator[Pipes]:
    yield from _some([_drawn(pipes, drafts, range(len(pipes)), [pipe.ranks for pipe in pipes])])
    for p, pipe in enumerate(pipes):
        if len(pipe.ranks) > 1:
            yield from _some([_drawn(pipes, drafts, {p}, [pipe.ranks])])


def _rested(
    pipes: Pipes, drafts: Drafts, ranks: Sequence[int], home: dict[int, tuple[int, int]]
) -> Iterator[Pipes]:
    for rank in ranks:
        if rank in home:
            p, i = home[rank]
            order = pipes[p].ranks
            left = (*order[:i], *order[i + 1 :])
            if left or len(pipes) > 1:
                yield from _some([_drawn(pipes, drafts, {p}, [left] if left else [])])
    for p in range(len(pipes) if len(pipes) > 2 else 0):  # a whole pipeline
        if len(pipes[p].ranks) > 1:
            yield _with(pipes, {p}, [])


def _woken(pipes: Pipes, drafts: Drafts, resting: Sequence[int], most_groups: int) -> Iterator[Pipes]:
    for rank in resting:
        if len(pipes) < most_groups:
            yield from _some([_drawn(pipes, drafts, (), [(rank,)])])
        for p, pipe in enumerate(pipes):
            for order in _inserted(drafts.problem, pipe.ranks, rank):
                yield from _some([_drawn(pipes, drafts, {p}, [order])])
    if len(resting) > 1 and len(pipes) < most_groups:
        yield from _some([_drawn(pipes, drafts, (), [tuple(resting)])])


def _inserted(problem: Problem, order: Ranks, rank: int) -> Iterator[Ranks]:
    """Puts a rank at the end, and behind whoever it has the best link to."""
    yield (*order, rank)
    rows = problem.per_byte_rows
    near = min(range(len(order)), key=lambda i: (rows[order[i]][rank], i))
    if near + 1 < len(order):
        yield (*order[: near + 1], rank, *order[near + 1 :])


def _moved(
    pipes: Pipes, drafts: Drafts, ranks: Sequence[int], home: dict[int, tuple[int, int]], most_groups: int
) -> Iterator[Pipes]:
    for rank in ranks:
        if rank not in home:
            continue
        p, i = home[rank]
        order = pipes[p].ranks
        left = (*order[:i], *order[i + 1 :])
        if left and len(pipes) < most_groups:
            yield from _some([_drawn(pipes, drafts, {p}, [left, (rank,)])])
        for q, pipe in enumerate(pipes):
            if q != p:
                for longer in _inserted(drafts.problem, pipe.ranks, rank):
                    yield from _some([_drawn(pipes, drafts, {p, q}, [left, longer] if left else [longer])])


def _shifted(
    pipes: Pipes, drafts: Drafts, ranks: Sequence[int], home: dict[int, tuple[int, int]]
) -> Iterator[Pipes]:
    """Puts a rank elsewhere in its own pipeline, first where all links together are fastest: slow ones side by side."""
    rows = drafts.problem.per_byte_rows

    def trip_s(a: int, b: int) -> float:
        return rows[a][b] + rows[b][a]

    for rank in ranks:
        if rank not in home or len(pipes[home[rank][0]].ranks) < 3:
            continue
        p, i = home[rank]
        order = pipes[p].ranks
        left = (*order[:i], *order[i + 1 :])
        n = len(left)  # places 0 and n are between the same two, around the loop
        added_s = [
            trip_s(left[j - 1], rank) + trip_s(rank, left[j % n]) - trip_s(left[j - 1], left[j % n])
            for j in range(n + 1)
        ]
        for j in sorted(range(n + 1), key=lambda j: (added_s[j], -j)):
            if j != i:
                yield from _some([_drawn(pipes, drafts, {p}, [(*left[:j], rank, *left[j:])])])


def _swapped(
    pipes: Pipes, drafts: Drafts, ranks: Sequence[int], home: dict[int, tuple[int, int]]
) -> Iterator[Pipes]:
    for n, one in enumerate(ranks):
        for two in ranks[n + 1 :]:
            if one not in home and two not in home:
                continue
            orders = {p: pipes[p].ranks for rank in (one, two) if rank in home for p in (home[rank][0],)}
            if len(orders) == 1 and len(next(iter(orders.values()))) == 1 and one in home and two in home:
                continue
            exchange = {one: two, two: one}
            new = [tuple(exchange.get(rank, rank) for rank in order) for order in orders.values()]
            yield from _some([_drawn(pipes, drafts, orders, new)])
            kept = [Pipe(order, pipes[p].cuts) for p, order in zip(orders, new, strict=True)]
            yield _with(pipes, orders, kept)


def _split(pipes: Pipes, drafts: Drafts, most_groups: int) -> Iterator[Pipes]:
    for p, pipe in enumerate(pipes):
        order, half = pipe.ranks, len(pipe.ranks) // 2
        if half and len(pipes) < most_groups:
            yield from _some([_drawn(pipes, drafts, {p}, [order[:half], order[half:]])])
            yield from _some([_drawn(pipes, drafts, {p}, [order[::2], order[1::2]])])
        if len(order) > 2 and len(pipes) + len(order) - 1 <= most_groups:
            yield from _some([_drawn(pipes, drafts, {p}, [(rank,) for rank in order])])


def _merged(pipes: Pipes, drafts: Drafts) -> Iterator[Pipes]:
    for p, q in combinations(range(len(pipes)), 2):
        yield from _some([_drawn(pipes, drafts, {p, q}, [(*pipes[p].ranks, *pipes[q].ranks)])])
    if len(pipes) > 2:
        yield from _some(
            [_drawn(pipes, drafts, range(len(pipes)), [tuple(r for pipe in pipes for r in pipe.ranks)])]
        )


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
