"""The stale engine: its own coordinator and default policy on simulated time (layer P).

A chunk of n samples takes its rank the work and the transfers to and from the server, which is on rank 0's node; so
does the engine itself measure it. All messages pass the server's port, which bounds a step from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_hetero.plan.estimate import Estimate, impossible
from lightning_hetero.plan.setup import Setup
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Granted
from lightning_hetero.stale.decide.policy import by_name
from lightning_hetero.stale.decide.simulator import Hooks, simulate
from lightning_hetero.types import Cost

__all__ = ["SIMULATED", "least_s", "stale"]

SIMULATED = 32
_WARM_UP, _MEASURED = 12, 48  # ticks
_MOST_CLAIMS = 1_200  # of many workers fewer ticks tell as much


class _Largest(Hooks):
    """Notes the largest chunk of each rank."""

    def __init__(self, ranks: int) -> None:
        self.samples = [0] * ranks

    def granted(self, granted: Granted, now_s: float) -> None:
        del now_s
        self.samples[granted.rank] = max(self.samples[granted.rank], granted.samples)


def stale(setup: Setup, *, simulated: int = SIMULATED) -> Estimate:
    """Returns what `BoundedStalenessStrategy` would take with its default policy, when it has learned the speeds.

    Args:
        setup: what is asked.
        simulated: most workers that are simulated one by one.
    """
    costs, ranks, batch = setup.step_costs(), setup.ranks, setup.global_batch
    transfers_s = _transfers(setup)
    each = batch / ranks
    by_speed = sorted(range(ranks), key=lambda rank: (costs[rank].seconds(each) + transfers_s[rank], rank))
    count = min(ranks, simulated)
    chosen = sorted(by_speed[(2 * i + 1) * ranks // (2 * count)] for i in range(count))
    part = max(1, round(batch * count / ranks))
    whole_s = max(cost.seconds(each) for cost in costs)  # of a step, such as slowness was seen in

    def slowness_at(worker: int, now_s: float) -> float:
        return setup.slowness_at(chosen[worker], int(now_s / whole_s) if whole_s > 0.0 else 0)

    run = _simulated([(costs[rank], transfers_s[rank]) for rank in chosen], slowness_at, part)
    place = {rank: i for i, rank in enumerate(chosen)}
    like = {rank: place[by_speed[(2 * (at * count // ranks) + 1) * ranks // (2 * count)]]
            for at, rank in enumerate(by_speed)}  # fmt: skip
    most = setup.most_samples()
    for rank in range(ranks):
        n, m = run.largest[like[rank]], most[rank]
        if m is not None and n > m:
            return impossible(
                "stale",
                f"{setup.name(rank)} gets up to {n} samples at once and holds {m} beside the model; this engine knows"
                " no limits of memory",
            )
    port_s = _port(setup)
    step_s = max(run.step_s, port_s)
    scale = batch / math.fsum(run.shares[like[rank]] for rank in range(ranks))
    reasons = [
        f"nobody waits for stragglers: {100.0 * run.stale:.0f} % of the samples are computed on parameters up to"
        f" {run.max_staleness} updates old, {100.0 * run.recomputed:.0f} % are wasted"
    ]
    if port_s > run.step_s:
        reasons.append(
            f"the server's port is the limit: the messages of all ranks take {port_s * 1e3:.1f} ms per update"
        )
    if count < ranks:
        reasons.append(f"simulated on {count} of the {ranks} devices, evenly chosen by speed")
    return Estimate(
        engine="stale",
        step_s=step_s,
        bound_s=min(step_s, max(least_s(costs, batch), port_s)),
        work_s=tuple(min(run.work_s[like[rank]], step_s) for rank in range(ranks)),
        shares=tuple(run.shares[like[rank]] * scale for rank in range(ranks)),
        memory_bytes=tuple(setup.memory_bytes(run.largest[like[rank]]) for rank in range(ranks)),
        exchange_s=max(transfers_s),
        reasons=tuple(reasons),
        overrides=("strategy=hetero_stale", f"trainer.devices={ranks}", f"strategy.global_batch_size={batch}"),
    )


class _Run(NamedTuple):
    """What came of a simulation; lists by worker, per update."""

    step_s: float
    shares: list[float]
    work_s: list[float]
    largest: list[int]
    stale: float
    recomputed: float
    max_staleness: int


def _simulated(
    workers: Sequence[tuple[Cost, float]], slowness_at: Callable[[int, float], float], batch: int
) -> _Run:
    """Runs the coordinator on workers with these costs and transfers [s] until it knows them, and then for a while."""
    count = len(workers)
    ticks = _WARM_UP + max(4, min(_MEASURED, _MOST_CLAIMS // count - _WARM_UP))
    largest = _Largest(count)

    def chunk_s(rank: int, step: int, now_s: float, samples: int) -> float:
        del step
        cost, transfer_s = workers[rank]
        return cost.seconds(samples) * slowness_at(rank, now_s) + transfer_s

    trace = simulate(
        Coordinator(by_name("flexible"), workers=range(count)),
        chunk_s,
        workers=range(count),
        epochs=[[batch * (tick + 1) for tick in range(ticks)]],
        hooks=largest,
    )
    ends_s, totals = trace.updates_s, [trace.workers[rank] for rank in range(count)]
    applied = max(1, sum(trace.staleness.values()))
    return _Run(
        step_s=(ends_s[-1] - ends_s[_WARM_UP - 1]) / (len(ends_s) - _WARM_UP),
        shares=[one.samples / ticks for one in totals],
        work_s=[(one.busy_s - one.chunks * s) / ticks for one, (_, s) in zip(totals, workers, strict=True)],
        largest=largest.samples,
        stale=1.0 - trace.staleness.get(0, 0) / applied,
        recomputed=trace.recomputed / applied,
        max_staleness=trace.max_staleness,
    )


def least_s(costs: Sequence[Cost], total: float) -> float:
    """Returns the least time in which workers that never rest compute so many samples, fractions allowed [s].

    A worker that is given nothing pays nothing.

    >>> from lightning_hetero.types import AffineCost
    >>> fast, slow = AffineCost(fixed_s=0.0, per_sample_s=1.0), AffineCost(fixed_s=9.0, per_sample_s=1.0)
    >>> round(least_s([fast, slow], 8.0), 9), round(least_s([fast, fast], 8.0), 9)
    (8.0, 4.0)
    """

    def done(deadline_s: float) -> float:
        return math.fsum(max(0.0, cost.most_samples(deadline_s)) for cost in costs)

    early_s, late_s = 0.0, min(cost.seconds(total) for cost in costs)
    while True:
        middle_s = 0.5 * (early_s + late_s)
        if not early_s < middle_s < late_s or late_s - early_s <= 1e-12 * late_s:
            return late_s
        if done(middle_s) >= total:
            late_s = middle_s
        else:
            early_s = middle_s


def _transfers(setup: Setup) -> list[float]:
    """Returns what parameters from the server and gradients to it take, by rank [s]."""
    if setup.exchange_s is not None:
        return [setup.exchange()] * setup.ranks
    size, links = setup.param_bytes(), setup.cluster.links
    return [0.0] + [links[0][r].seconds(size) + links[r][0].seconds(size) for r in range(1, setup.ranks)]


def _port(setup: Setup) -> float:
    """Returns how long all messages of an update are on the server's links, in the busier direction [s]."""
    if setup.exchange_s is not None:
        return 0.0
    size, links = setup.param_bytes(), setup.cluster.links
    out = math.fsum(size / links[0][r].bandwidth_bytes_per_s for r in range(1, setup.ranks))
    back = math.fsum(size / links[r][0].bandwidth_bytes_per_s for r in range(1, setup.ranks))
    return max(out, back)
