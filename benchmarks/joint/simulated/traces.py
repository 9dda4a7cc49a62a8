"""How a cluster changes: speeds, links and prices over batches or over seconds, generated or written by hand.

Generators draw from a NumPy generator that is passed in; the same one gives the same trace. `merged` lays traces over
one another: factors multiply, prices too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Draws = np.random.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What holds from ``start`` on.

    Attributes:
        start: batch, or second.
        slowness: of the ranks: how many times as long they take as the cluster's description says.
        links: the same of directions between ranks, (source, target); those left out are as described.
        prices: of the ranks, relative to what they are given as.
    """

    start: float
    slowness: tuple[float, ...]
    links: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    prices: tuple[float, ...] = ()


class Trace:
    """Phases in order of time.

    Args:
        phases: the first starts at 0.
        by_batch: they start at batches; False: at seconds.

    Raises:
        ValueError: no phase, the first not at 0, or not in order.
    """

    def __init__(self, phases: Sequence[Phase], *, by_batch: bool = True) -> None:
        self.phases, self.by_batch = tuple(phases), by_batch
        self._starts = [phase.start for phase in phases]
        if not phases or phases[0].start != 0.0 or sorted(self._starts) != self._starts:
            raise ValueError(f"phases start at {self._starts}: give one or more, in order, the first at 0")

    def at(self, batch: int, now_s: float) -> Phase:
        """Returns what holds as ``batch`` starts at ``now_s``."""
        return self.phases[bisect_right(self._starts, batch if self.by_batch else now_s) - 1]


def _chain(
    rng: Draws, length: float, dwell: float, states: Sequence[float], odds: Sequence[float]
) -> list[tuple[float, float]]:
    """Returns (start, state) of a chain that stays exponentially long and then draws another state."""
    weights = np.array(odds) / sum(odds)
    at, state = 0.0, int(rng.choice(len(states), p=weights))
    found = [(0.0, states[state])]
    while math.ceil(at := at + float(rng.exponential(dwell))) < length:
        others = np.where(np.arange(len(states)) == state, 0.0, weights)
        state = int(rng.choice(len(states), p=others / others.sum()))
        found.append((float(math.ceil(at)), states[state]))
    return found


def _phases(ranks: int, chains: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, tuple[float, ...]]]:
    """Returns (start, states of all ranks) at each change of any rank."""
    changes = sorted((start, rank, state) for rank, chain in enumerate(chains) for start, state in chain)
    now, found = [1.0] * ranks, dict[float, tuple[float, ...]]()
    for start, rank, state in changes:
        now[rank] = state
        found[start] = tuple(now)
    return list(found.items())


def markov_speeds(
    ranks: int,
    length: float,
    rng: Draws,
    *,
    dwell: float,
    factors: Sequence[float] = (1.0, 2.0, 4.0),
    odds: Sequence[float] = (0.6, 0.25, 0.15),
    by_batch: bool = True,
) -> Trace:
    """Each rank on its own changes its speed, as neighbours on shared machines make it do.

    Args:
        ranks: number of them.
        length: of the trace, batches or seconds.
        rng: to draw from.
        dwell: mean time between two changes of a rank.
        factors: slowness of the states.
        odds: of the states when one is drawn.
        by_batch: as in `Trace`.
    """
    chains = [_chain(rng, length, dwell, factors, odds) for _ in range(ranks)]
    return Trace([Phase(start=s, slowness=f) for s, f in _phases(ranks, chains)], by_batch=by_batch)


def diurnal_load(
    ranks: int, length: float, *, period: float, most: float = 2.0, steps: int = 24, by_batch: bool = True
) -> Trace:
    """Load that rises and falls once per ``period``, half a period later on the second half of the ranks.

    Args:
        most: slowness at the height of the load.
        steps: per period; load changes in steps.
    """

    def slowness(rank: int, step: int) -> float:
        turn = step / steps + (0.5 if rank >= ranks // 2 else 0.0)
        return 1.0 + (most - 1.0) * 0.5 * (1.0 - math.cos(2.0 * math.pi * turn))

    count = math.ceil(length / period * steps)
    return Trace(
        [
            Phase(start=math.ceil(k * period / steps), slowness=tuple(slowness(rank, k) for rank in range(ranks)))
            for k in range(count)
        ],
        by_batch=by_batch,
    )


def degraded_links(
    ranks: int,
    length: float,
    rng: Draws,
    *,
    dwell: float,
    factor: float = 8.0,
    part: float = 0.2,
    by_batch: bool = True,
) -> Trace:
    """All links of a rank are slow for a while, ``part`` of the time."""
    chains = [_chain(rng, length, dwell, (1.0, factor), (1.0 - part, part)) for _ in range(ranks)]
    phases: list[Phase] = []
    for start, slow in _phases(ranks, chains):
        links = {
            (a, b): max(slow[a], slow[b])
            for a in range(ranks)
            for b in range(ranks)
            if a != b and max(slow[a], slow[b]) > 1.0
        }
        phases.append(Phase(start=start, slowness=(1.0,) * ranks, links=links))
    return Trace(phases, by_batch=by_batch)


def price_spikes(
    ranks: int,
    length: float,
    rng: Draws,
    *,
    dwell: float,
    factors: Sequence[float] = (0.5, 1.0, 3.0),
    odds: Sequence[float] = (0.3, 0.5, 0.2),
    by_batch: bool = True,
) -> Trace:
    """Each rank's price changes on its own, as spot prices do."""
    chains = [_chain(rng, length, dwell, factors, odds) for _ in range(ranks)]
    phases = [Phase(start=s, slowness=(1.0,) * ranks, prices=f) for s, f in _phases(ranks, chains)]
    return Trace(phases, by_batch=by_batch)


def merged(*traces: Trace) -> Trace:
    """Returns all changes of all traces: factors and prices multiply.

    Raises:
        ValueError: some are by batch, others by second.
    """
    if len({trace.by_batch for trace in traces}) != 1:
        raise ValueError("traces by batch and traces by second cannot be merged")
    phases: list[Phase] = []
    for start in sorted({phase.start for trace in traces for phase in trace.phases}):
        parts = [trace.at(int(start) if trace.by_batch else 0, start) for trace in traces]
        links: dict[tuple[int, int], float] = {}
        for part in parts:
            for pair, factor in part.links.items():
                links[pair] = links.get(pair, 1.0) * factor
        priced = [part.prices for part in parts if part.prices]
        phases.append(
            Phase(
                start=start,
                slowness=tuple(math.prod(f) for f in zip(*(part.slowness for part in parts), strict=True)),
                links=links,
                prices=tuple(math.prod(f) for f in zip(*priced, strict=True)),
            )
        )
    return Trace(phases, by_batch=traces[0].by_batch)
