"""The search for groups of many devices: seeds, then moves of devices between groups, then refinement.

A set of devices is planned once, for its part of the samples by speed. Moves are drawn from fixed sequences, not at
random: every rank that plans must come to the same end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.order import (
    Planned,
    first_size,
    improved,
    in_order,
    key,
    nearness,
    some_orders,
)
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.refine import Judge, Pipes, estimate_s, refine
from lightning_hetero.solvers.placement.sampled import FIRST, in_full, sampled_s
from lightning_hetero.solvers.placement.seeds import (
    Groups,
    as_groups,
    clusters,
    counts,
    dealt,
    fastest,
    islands,
    neighbours,
    subsets,
)
from lightning_hetero.solvers.placement.shares import share

__all__ = ["Found", "best_found"]

Ranks = tuple[int, ...]

_ORDERS, _FEW_ORDERS = 6, 2  # tried for each group of the final plan; and where seeds are sampled
_ROUGH = 1e-2  # of splits while seeds are sampled, relatively
_HOPELESS = 1.05  # seeds whose groups are slower at their very best are not planned
_TESTS, _SPLITS = 600, 12  # of neighbours of an order, for all groups of the final plan together
_CLOSE = 1.03  # a second seed is followed up if it is so near to the first
_EFFORT, _LEAST_MOVES, _MOST_MOVES = 2500, 12, 600  # stages to plan in all moves, and what follows from it
_HOPEFUL = -1e-3  # part of all samples that a move may cost at first sight
_GOLDEN = (2654435769, 3266489917, 747796405)  # odd: k * g mod 2**32 visits everything, evenly


class Found(NamedTuple):
    """The best grouping found: its modelled time [s] and pipelines, and of how many groupings."""

    time_s: float
    pipes: Pipes
    judged: int


def best_found(
    problem: Problem, most_groups: int, *, budget: int | None = None, sampled: bool = False
) -> Found:
    """Returns the best grouping found; ``inf`` and no pipelines if nothing fits.

    Args:
        problem: of any size.
        most_groups: more are not formed.
        budget: most moves, and most candidates of the refinement, to judge; None: by the size of the groups.
        sampled: plan a few groups of each seed and the rest of the best seeds only, see `sampled`.
    """
    return _Search(problem, most_groups, budget, sampled).run()


class _Places(NamedTuple):
    """A pipeline on whichever set of equal devices: its order as places in the sorted ranks."""

    time_s: float
    order: Ranks
    cuts: Ranks

    @classmethod
    def of(cls, ranks: Ranks, planned: Planned) -> _Places:
        place = {rank: i for i, rank in enumerate(ranks)}
        return cls(planned.time_s, tuple([place[rank] for rank in planned.pipe.ranks]), planned.pipe.cuts)

    def on(self, ranks: Ranks) -> Planned:
        return Planned(self.time_s, Pipe(tuple([ranks[i] for i in self.order]), self.cuts))


class _Search:
    def __init__(self, problem: Problem, most_groups: int, budget: int | None, sampled: bool) -> None:
        self._problem, self._most, self._budget = problem, min(most_groups, problem.samples), budget
        self._sampled, self._judged = sampled, 0
        self._tolerance = _ROUGH if sampled else 1e-3
        self._size = np.array(problem.sizes, dtype=np.float64)
        self._plans: dict[Ranks, Planned | None] = {}
        # By what makes sets of devices equal, and the size that was started from.
        self._equal: dict[tuple[bytes, int | None], _Places | None] = {}
        self._polish: dict[tuple[bytes, Ranks, Ranks, int, int], _Places] = {}
        self._sizes: dict[int, int] = {}  # of micro-batches, by number of stages: where to start from
        self._far_s = nearness(problem, first_size(problem, 4, problem.samples))
        self._orders = 1 if not problem.capped else 2 if len(set(problem.caps.tolist())) == 1 else 3
        self._replica_bytes = float(problem.state_bytes[-1] + problem.activation_bytes[-1])
        self._replica_bytes += problem.leader_state_bytes + problem.leader_activation_bytes

    def run(self) -> Found:
        ranked = self._seeds()
        if self._sampled:
            ranked = in_full(
                [groups for _, groups in ranked], self._problem.n_devices, self._sampled_s, self._whole_s
            )
        if not ranked:
            return Found(math.inf, (), self._judged)
        best_s, best = math.inf, ()
        followed = 1 if self._sampled else 2
        starts = [groups for time_s, groups in ranked[:followed] if time_s <= _CLOSE * ranked[0][0]]
        for groups in starts:
            budget = self._budget
            if budget is None:  # a move changes about two groups; a split takes time by the number of its stages
                moves = _EFFORT * len(groups) // (2 * self._problem.n_devices)
                budget = min(_MOST_MOVES, max(_LEAST_MOVES, moves))
            pipes = self._polished(self._moved(groups, budget // len(starts)))
            time_s, pipes = refine(self._problem, pipes, budget=budget // len(starts), exact=False)
            if key(time_s) < key(best_s):
                best_s, best = time_s, pipes
        return Found(best_s, self._finished(best), self._judged)

    # ---- seeds ----

    def _seeds(self) -> list[tuple[float, Groups]]:
        """Returns groupings that fit, the best first."""
        problem = self._problem
        everyone = list(range(problem.n_devices))
        parts = islands(problem, self._far_s)
        found: dict[Groups, float] = {}
        numbers = counts(min(problem.n_devices, self._most))[::-1]
        memory = np.minimum(problem.caps, self._replica_bytes)
        chain = neighbours(problem, everyone, self._far_s)
        for n in numbers:
            self._try(found, clusters(problem, chain, n))
            if problem.capped:
                self._try(found, clusters(problem, chain, n, by=memory))
        promising = sorted(numbers, key=lambda n: (self._best_of(found, n), n))[:4]
        for n in promising:
            self._try(found, dealt(problem, [everyone], n))
            if 1 < len(parts) <= n:
                self._try(found, dealt(problem, parts, n))
        for some in subsets(problem, parts):
            chain = neighbours(problem, some, self._far_s)
            fewer = sorted(
                {1, *(max(1, round(n * len(some) / len(everyone))) for n in promising[:2]), len(some)}
            )
            for n in fewer:
                if n <= self._most:
                    self._try(found, clusters(problem, chain, n))
        if not any(time_s < math.inf for time_s in found.values()):
            roomiest = sorted(everyone, key=lambda r: (-problem.caps[r], r))
            for n in counts(min(problem.n_devices, problem.n_layers))[::-1]:
                self._try(found, as_groups([roomiest[:n]]))
        return sorted((time_s, groups) for groups, time_s in found.items() if time_s < math.inf)

    def _best_of(self, found: dict[Groups, float], n: int) -> float:
        return min([time_s for groups, time_s in found.items() if len(groups) == n], default=math.inf)

    def _try(self, found: dict[Groups, float], groups: Groups) -> None:
        # A pipeline needs a layer per device: those too many rest, and so do groups too many.
        groups = as_groups([fastest(self._problem, group, self._problem.n_layers) for group in groups])
        if groups in found or not groups or len(groups) > self._most:
            return
        best_s = min(found.values(), default=math.inf)
        found[groups] = math.inf
        if best_s < math.inf and self._ideal_s(groups) > _HOPELESS * best_s:
            return
        self._judged += 1
        found[groups] = self._sampled_s(groups, FIRST) if self._sampled else self._whole_s(groups)

    def _whole_s(self, groups: Groups) -> float:
        pipes = self._pipes(groups)
        return key(estimate_s(self._problem, pipes)) if pipes else math.inf

    def _sampled_s(self, groups: Groups, count: int) -> float:
        return key(sampled_s(self._problem, groups, self._plan, count))

    def _ideal_s(self, groups: Groups) -> float:
        """Returns the groups' mean time by speed, with layers of any size and free links: hardly ever too long."""
        total_s = 0.0
        for group in groups:
            samples = self._problem.part(group)
            work, speed, fastest_speed = self._ideal(group)
            size = np.minimum(self._size, samples)
            times = work / fastest_speed + (np.ceil(samples / size) - 1.0) * work / speed
            total_s += float(times.min()) * speed
        return total_s / sum([float(self._problem.speeds[list(group)].sum()) for group in groups])

    def _ideal_done(self, group: Ranks, deadline_s: float) -> float:
        """Returns how many samples a group does by the deadline, with layers of any size and free links."""
        work, speed, _ = self._ideal(group)
        full = self._size * ((deadline_s * speed / work) - (len(group) - 1.0))
        return max(float(full.max()), 0.0)

    def _ideal(self, group: Ranks) -> tuple[Floats, float, float]:
        """Returns the work of a micro-batch for all sizes, the speed of all devices, and of the fastest."""
        speeds = self._problem.speeds[list(group)]
        fixed_s, per_sample_s = self._problem.work_s[:, -1] + self._problem.leader_s
        return fixed_s + per_sample_s * self._size, float(speeds.sum()), float(speeds.max())

    # ---- groups to pipelines ----

    def _pipes(self, groups: Groups) -> Pipes | None:
        pipes: list[Pipe] = []
        for group in groups:
            planned = self._plan(group)
            if planned is None:
                return None
            pipes.append(planned.pipe)
        return tuple(pipes)

    def _plan(self, ranks: Ranks) -> Planned | None:
        if ranks not in self._plans:
            self._plans[ranks] = self._planned(ranks)
        return self._plans[ranks]

    def _planned(self, ranks: Ranks) -> Planned | None:
        problem, size = self._problem, self._sizes.get(len(ranks))
        if float(problem.caps[list(ranks)].sum()) * (1.0 + 1e-9) < self._replica_bytes:
            return None
        alike = (problem.equal.among(ranks), size)
        samples = problem.part(ranks)
        if alike not in self._equal:
            best: Planned | None = None
            for order in some_orders(problem, ranks, self._far_s, most=self._orders):
                found = in_order(problem, order, samples, size=size, tolerance=self._tolerance)
                if found is not None and (best is None or key(found.time_s) < key(best.time_s)):
                    best = found
            self._equal[alike] = best and _Places.of(ranks, best)
        places = self._equal[alike]
        if places is None:
            return None
        planned = places.on(ranks)
        self._sizes[len(ranks)] = problem.cost(planned.pipe).size(samples)
        return planned

    # ---- moves ----

    def _moved(self, groups: Groups, budget: int) -> Pipes:
        """Returns the pipelines after all moves that were better, of up to ``budget`` judged."""
        pipes = self._pipes(groups)
        assert pipes is not None
        judge = Judge(self._problem, pipes, exact=False)
        step, idle = 0, 0
        while budget > 0 and idle < 4 * len(_KINDS) * self._problem.n_devices:
            step, idle = step + 1, idle + 1
            moved = self._move(groups, step)
            if (
                moved is None
                or len(moved) > self._most
                or max(len(g) for g in moved) > self._problem.n_layers
            ):
                continue
            gone, new = set(groups) - set(moved), set(moved) - set(groups)
            gain = sum(self._ideal_done(group, judge.time_s) for group in new)
            gain -= sum(self._ideal_done(group, judge.time_s) for group in gone)
            if gain < _HOPEFUL * self._problem.samples:
                continue
            budget -= 1
            added = self._pipes(tuple(sorted(new)))
            removed = self._pipes(tuple(sorted(gone)))
            if added is None or removed is None:
                continue
            self._judged += 1
            if judge.better(removed, added, lambda moved=moved: self._pipes(moved) or ()):
                groups, idle = moved, 0
        return judge.pipes

    def _move(self, groups: Groups, step: int) -> Groups | None:
        """Returns the groups after one move; None if this one leads nowhere."""
        kind, turn = _KINDS[step % len(_KINDS)], step // len(_KINDS)
        n = self._problem.n_devices
        one, two = _draw(turn, 0, n), _draw(turn, 1, n)
        home = {rank: i for i, group in enumerate(groups) for rank in group}
        a, b = home.get(one), home.get(two)
        lists = [list(group) for group in groups]
        if kind == "wake" or a is None:
            if a is not None:
                resting = [rank for rank in range(n) if rank not in home]
                if not resting:
                    return None
                one = resting[_draw(turn, 2, len(resting))]
            if b is None:
                lists.append([one])
            else:
                lists[b].append(one)
        elif kind == "rest":
            if len(home) == 1:
                return None
            lists[a].remove(one)
        elif kind == "leave":
            if len(lists[a]) == 1:
                return None
            lists[a].remove(one)
            lists.append([one])
        elif kind == "split":
            halves = self._halves(groups[a], turn)
            if halves is None:
                return None
            lists[a : a + 1] = halves
        elif a == b or b is None:
            return None
        elif kind == "move":
            lists[a].remove(one)
            lists[b].append(one)
        elif kind == "swap":
            lists[a].remove(one)
            lists[b].remove(two)
            lists[a].append(two)
            lists[b].append(one)
        else:
            lists[a] += lists.pop(b) if b > a else lists[b]
            if b < a:
                lists.pop(b)
        moved = as_groups(lists)
        return moved if moved != groups else None

    def _halves(self, group: Ranks, turn: int) -> list[list[int]] | None:
        planned = self._plan(group)
        if len(group) < 2 or planned is None:
            return None
        order = planned.pipe.ranks
        if turn % 2:
            return [list(order[::2]), list(order[1::2])]
        return [list(order[: len(order) // 2]), list(order[len(order) // 2 :])]

    # ---- the final touch ----

    def _polished(self, pipes: Pipes) -> Pipes:
        """Returns the pipelines in better orders, for the samples that they really get."""
        problem = self._problem
        judge = Judge(problem, pipes, exact=False)
        shares, _ = share([problem.cost(pipe) for pipe in pipes], problem.samples)
        for pipe, samples in zip(pipes, shares, strict=True):
            if len(pipe.ranks) == 1:
                continue
            best = self._reordered(pipe, samples, len(pipes))
            if best.pipe != pipe:
                self._offer(judge, pipe, best.pipe)
        return judge.pipes

    def _reordered(self, pipe: Pipe, samples: int, pipes: int) -> Planned:
        """Returns the pipeline or a better order of its devices, for so many samples."""
        problem, ranks = self._problem, tuple(sorted(pipe.ranks))
        time_s = problem.cost(pipe).seconds(samples)
        given = _Places.of(ranks, Planned(time_s, pipe))
        alike = (problem.equal.among(ranks), given.order, given.cuts, samples, pipes)
        if alike not in self._polish:
            best, size = Planned(time_s, pipe), problem.cost(pipe).size(samples)
            most = _FEW_ORDERS if self._sampled else _ORDERS
            for order in [pipe.ranks, *some_orders(problem, pipe.ranks, self._far_s, most=most)]:
                found = in_order(problem, order, samples, size=size)
                if found is not None and key(found.time_s) < key(best.time_s):
                    best = found
            if not self._sampled:
                best = improved(problem, best, samples, tests=_TESTS // pipes, splits=-(-_SPLITS // pipes))
            self._polish[alike] = _Places.of(ranks, best)
        return self._polish[alike].on(ranks)

    def _finished(self, pipes: Pipes) -> Pipes:
        """Returns the pipelines split once more, more finely, where that is better."""
        problem = self._problem
        judge = Judge(problem, pipes, exact=False)
        shares, _ = share([problem.cost(pipe) for pipe in pipes], problem.samples)
        for pipe, samples in zip(pipes, shares, strict=True):
            size = problem.cost(pipe).size(samples)
            found = in_order(problem, pipe.ranks, samples, size=size, tolerance=1e-4)
            if found is not None and found.pipe != pipe:
                self._offer(judge, pipe, found.pipe)
        return judge.pipes

    def _offer(self, judge: Judge, old: Pipe, new: Pipe) -> None:
        judge.better((old,), (new,), lambda: tuple(new if pipe == old else pipe for pipe in judge.pipes))


_KINDS = ("move", "swap", "rest", "split", "swap", "wake", "merge", "move", "leave", "swap")


def _draw(turn: int, which: int, n: int) -> int:
    """Returns a number below n, evenly spread over the turns."""
    return ((turn + 1) * _GOLDEN[which] & 0xFFFFFFFF) * n >> 32
