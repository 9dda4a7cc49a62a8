"""The order of devices inside one pipeline.

Few devices: all orders, each *bounded* first and split only if it may be better. Many: chains of nearest neighbours, by
the time that a typical message takes, and other seeds; then swaps, reversals and insertions, each of which is merely
tested (is a slightly better period possible at all?) before it is split. The size of micro-batches and the borders
depend on each other: they are improved in turn, which is cheap as one split gives the times for all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain.bounds import Walk, relaxed_bound, walk_on
from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.pipes import Pipe, Problem

__all__ = ["Planned", "all_orders", "improved", "in_order", "key", "nearest_chain", "nearness", "some_orders"]

Ranks = tuple[int, ...]

_TURNS = 4
_PATIENCE = 24  # orders in a row that are no better: all of up to four devices are tried
_KEPT = 4  # orders of a set of devices
_GAIN = 1e-3  # an order must promise more than this, relatively, to be split
_ALIKE = 20.0  # links within 1/20, relatively, count as equally near: faster devices first, not noise


class Planned(NamedTuple):
    """A pipeline, and its time for the samples it was planned for [s]."""

    time_s: float
    pipe: Pipe


def key(value: float) -> float:
    """Returns ``value`` to nine digits: for comparing, so that the last bits of a machine decide nothing."""
    return float(f"{value:.8e}")


def in_order(
    problem: Problem, ranks: Ranks, samples: int, *, size: int | None = None, tolerance: float = 1e-3
) -> Planned | None:
    """Returns the best pipeline of ``ranks`` in this order for ``samples`` samples; None if it does not fit.

    Borders and the size of micro-batches in turn, starting from ``size``, or with a few micro-batches per stage.
    """
    if len(ranks) > problem.n_layers:
        return None
    if len(ranks) == 1:
        pipe = Pipe(ranks, (0, problem.n_layers))
        time_s = problem.cost(pipe).seconds(samples)
        return Planned(time_s, pipe) if time_s < math.inf else None
    best: Planned | None = None
    tried = set[int]()
    for first in (size or first_size(problem, len(ranks), samples), problem.sizes[0]):
        now = first
        for _ in range(_TURNS):
            if now in tried:
                break
            tried.add(now)
            pipe = problem.split(ranks, now, samples, tolerance)
            if pipe is None:
                break
            time_s = problem.cost(pipe).seconds(samples)
            if time_s < math.inf and (best is None or key(time_s) < key(best.time_s)):
                best = Planned(time_s, pipe)
            now = problem.cost(pipe).size(samples)
        if best is not None:  # else the smallest micro-batch may fit
            break
    return best


def first_size(problem: Problem, stages: int, samples: int) -> int:
    """Returns the size of micro-batches to start from: four per stage, or one where there is a single stage."""
    aim = samples / (4.0 * stages) if stages > 1 else samples
    return min(problem.sizes, key=lambda size: abs(math.log(size / aim)))


# ---- few devices ------------------------------------------------------------------------------------------------


def all_orders(problem: Problem, ranks: Sequence[int], samples: int) -> list[Planned]:
    """Returns the four best of all orders of ``ranks``, best first; empty if none fits.

    Orders that differ by equal devices only are tried once.
    """
    if len(ranks) > problem.n_layers:
        return []
    orders = _distinct(problem, permutations(ranks))
    first = in_order(problem, orders[0], samples)
    if len(ranks) == 1:
        return [first] if first else []
    size = problem.cost(first.pipe).size(samples) if first else problem.sizes[0]
    bounded = sorted([(key(_floor_s(problem, order, size, samples)), i) for i, order in enumerate(orders)])
    best: list[Planned] = []
    idle = 0
    for bound_s, i in bounded:
        # The bound is for one size of micro-batch; another may be a little better.
        if len(best) >= _KEPT and (bound_s > 1.02 * best[-1].time_s or idle >= _PATIENCE):
            break
        found = in_order(problem, orders[i], samples, size=size)
        idle += 1
        if found is not None:
            better = not best or found.time_s < best[0].time_s * (1.0 - _GAIN)
            idle = 0 if better else idle
            best = sorted([*best, found], key=lambda planned: key(planned.time_s))[:_KEPT]
    return best


def _floor_s(problem: Problem, ranks: Ranks, size: int, samples: int) -> float:
    """Returns a time that no split of this order in micro-batches of ``size`` is below [s]."""
    walk, micro_batches = _walk(problem, ranks, size, samples)
    period_s = relaxed_bound(walk.chain, tolerance=1e-4, walk=walk)
    return _least_fill_s(walk) + (micro_batches - 1) * period_s


def _walk(problem: Problem, ranks: Ranks, size: int, samples: int) -> tuple[Walk, int]:
    size = min(size, samples)
    micro_batches = -(-samples // size)
    return Walk(problem.chain(ranks, size, micro_batches)), micro_batches


def _least_fill_s(walk: Walk) -> float:
    return walk.work[-1] / max(walk.speeds) + walk.lead_s + float(walk.least_trips.sum())


def _distinct(problem: Problem, orders: Iterator[Ranks]) -> list[Ranks]:
    kept: dict[bytes, Ranks] = {}
    for order in orders:
        r = np.array(order)
        after = np.roll(r, -1)
        rows = [problem.speeds[r], problem.caps[r]]
        rows += [
            x[a, b] for x in (problem.latency_s, problem.per_byte_s) for a, b in ((r, after), (after, r))
        ]
        kept.setdefault(np.array(rows).tobytes(), order)
    return list(kept.values())


# ---- many -------------------------------------------------------------------------------------------------------


def nearness(problem: Problem, size: int) -> Floats:
    """Returns the round trip of a typical message of ``size`` samples between any two devices [D, D] [s]."""
    message = size * float(problem.cut_bytes.mean())
    one_way: Floats = problem.latency_s + message * problem.per_byte_s
    return one_way + np.transpose(one_way)


def nearest_chain(problem: Problem, ranks: Sequence[int], start: int, far_s: Floats) -> Ranks:
    """Returns ``ranks`` from ``start`` on, each followed by the nearest that is left; of equal ones the fastest."""
    speeds = problem.speeds
    left = sorted(ranks, key=lambda r: (-speeds[r], r))
    with np.errstate(divide="ignore"):
        alike = np.round(np.log(far_s[np.ix_(left, left)]) * _ALIKE)
    at = left.index(start)
    order, open_ = [start], np.delete(np.arange(len(left)), at)
    while open_.size:
        i = int(alike[at, open_].argmin())
        at = int(open_[i])
        order.append(left[at])
        open_ = np.delete(open_, i)
    return tuple(order)


def some_orders(problem: Problem, ranks: Sequence[int], far_s: Floats, *, most: int) -> list[Ranks]:
    """Returns up to ``most`` promising orders: near neighbours from several starts, then by memory and by speed."""
    speeds, caps = problem.speeds, problem.caps
    fastest = min(ranks, key=lambda r: (-speeds[r], r))
    roomiest = min(ranks, key=lambda r: (-caps[r], -speeds[r], r))
    orders = [nearest_chain(problem, ranks, fastest, far_s)]
    # The first stages keep most micro-batches in flight: memory in front, where it differs.
    if len(orders) < most and len({float(caps[r]) for r in ranks}) > 1:
        orders.append(tuple(sorted(ranks, key=lambda r: (-caps[r], -speeds[r], r))))
        orders.append(nearest_chain(problem, ranks, roomiest, far_s))
    if len(orders) < most:
        slowest = min(ranks, key=lambda r: (speeds[r], r))
        orders.append(nearest_chain(problem, ranks, slowest, far_s))
        orders.append(tuple(sorted(ranks, key=lambda r: (-speeds[r], r))))
        orders.append(orders[0][::-1])
        orders.append(tuple(sorted(ranks)))
    return list(dict.fromkeys(orders))[:most]


def improved(problem: Problem, planned: Planned, samples: int, *, tests: int, splits: int) -> Planned:
    """Returns ``planned`` or a better order of its devices.

    Args:
        problem: what is planned.
        planned: where to start.
        samples: what the pipeline is to do.
        tests: most neighbours to look at.
        splits: most neighbours that pass the test to be split, which takes some fifty times as long.
    """
    improving = True
    while improving:
        improving = False
        size = problem.cost(planned.pipe).size(samples)
        for order in _neighbours(planned.pipe.ranks):
            tests -= 1
            if tests < 0 or splits <= 0:
                return planned
            if not _promises(problem, order, size, samples, planned.time_s * (1.0 - _GAIN)):
                continue
            splits -= 1
            found = in_order(problem, order, samples, size=size)
            if found is not None and found.time_s < planned.time_s * (1.0 - _GAIN):
                planned, improving = found, True
                break
    return planned


def _promises(problem: Problem, order: Ranks, size: int, samples: int, time_s: float) -> bool:
    """Returns False if no split of this order, in micro-batches of ``size``, takes ``time_s`` or less."""
    walk, micro_batches = _walk(problem, order, size, samples)
    left_s = time_s - _least_fill_s(walk)
    if micro_batches == 1:
        return left_s >= 0.0
    period_s = left_s / (micro_batches - 1)
    return period_s >= max(walk.loop_s, walk.lead_s) and walk_on(walk, period_s)[-1] == problem.n_layers


def _neighbours(order: Ranks) -> Iterator[Ranks]:
    """Swaps, reversals and insertions over 1, 2, 4, ... places."""
    n, step = len(order), 1
    while step < n:
        for i in range(n - step):
            j = i + step
            yield (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
            if step > 1:
                yield (*order[:i], *order[i + 1 : j + 1], order[i], *order[j + 1 :])
                yield (*order[:i], order[j], *order[i:j], *order[j + 1 :])
            if step > 2:
                yield (*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :])
        step *= 2
    yield order[::-1]
