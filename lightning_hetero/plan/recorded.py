"""A set-up from what a run has recorded (layer P).

A pipeline's trace holds its cluster and what its layers cost. Of any other run each rank's own work per step is known:
a line through its times where it had shares of different sizes, else in proportion to its samples, and how far each
step was from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from lightning_hetero.cluster.score import exchange_alone
from lightning_hetero.pipeline.decide.costs import recorded
from lightning_hetero.plan.setup import Setup
from lightning_hetero.record import replay
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, Cluster, Device, Event, Link, SpeedSample

_WARM_UP = 2  # first steps of all, which are no measure of the others
_APART = 1.2  # largest over smallest share, from which on a line says more than a proportion
_MOST_STEPS = 160  # of the last ones


def setup_from_events(events: Sequence[Event], *, global_batch: int | None = None) -> Setup:
    """Returns the set-up of a recorded run, with links that cost what its exchange of gradients did.

    Args:
        events: of all ranks, see `lightning_hetero.record.read_events`.
        global_batch: samples per update; None: as recorded.

    Raises:
        ValueError: the trace tells of no plan and of no step that all ranks have measured.
    """
    steps, found = list(replay(events)), recorded(events)
    batch = global_batch or (int(median([sum(r.samples for r in step) for step in steps])) if steps else 0)
    if found is not None and found[1] is not None and batch:
        return Setup(cluster=found[0], model=found[1], global_batch=batch)
    if not steps or not batch:
        raise ValueError(
            "the trace holds no step whose own work all ranks have measured: record it with an engine of this package,"
            " or under stock DDP with StragglerMonitor() and HeteroTrace() among the callbacks"
        )
    names: dict[int, str] = {}
    meets = True
    for event in events:
        if event.kind == "run":
            meets = meets and event.data.get("engine") != "stale"
            names |= {event.rank: str(event.data["names"][0]).replace(" ", "/")} if event.data.get("names") else {}
    return setup_from_steps(steps[_WARM_UP:] or steps, batch, meets=meets, names=names)


def setup_from_steps(
    steps: Sequence[Sequence[SpeedSample]], global_batch: int, *, meets: bool, names: Mapping[int, str] | None = None
) -> Setup:
    """Returns the set-up of ranks that took these times; the last steps count.

    Args:
        steps: of each, what every rank measured, by rank.
        global_batch: samples per update.
        meets: whether all ranks end a step together; else each asks a server by itself.
        names: of the devices, as far as known.

    Raises:
        ValueError: a rank has never worked.
    """
    steps = steps[-_MOST_STEPS:]
    ranks = len(steps[0])
    costs = tuple(_cost([step[rank] for step in steps]) for rank in range(ranks))
    if meets:  # what the rank that comes last sees of the exchange
        exchange_s = fmean(max(r.compute_s + r.wait_s for r in step) - max(r.compute_s for r in step) for step in steps)
    else:
        exchange_s = min(exchange_alone([step[rank].wait_s for step in steps], ranks) for rank in range(ranks))
    each = max(1.0, global_batch / ranks)
    first_s = costs[0].seconds(each)
    known = dict(names or {})
    if len(set(known.values())) < len(known):
        known = {}  # they do not tell the devices apart
    devices = tuple(
        Device(name=known.get(rank, f"rank{rank}"), speed=first_s / cost.seconds(each))
        for rank, cost in enumerate(costs)
    )
    cluster = Cluster(devices=devices, links=((Link(),) * ranks,) * ranks)
    slowness = tuple(_slowness([step[rank] for step in steps], cost) for rank, cost in enumerate(costs))
    return Setup(
        cluster=cluster, costs=costs, exchange_s=max(0.0, exchange_s), global_batch=global_batch, slowness=slowness
    )


def _cost(records: Sequence[SpeedSample]) -> AffineCost:
    """Returns what a rank's step costs; medians by size, so that a hiccup of the machine is no cost."""
    by_size: dict[int, list[float]] = {}
    for record in records:
        if record.samples > 0 and record.compute_s > 0.0:
            by_size.setdefault(record.samples, []).append(record.compute_s)
    if not by_size:
        raise ValueError(f"rank {records[0].rank} has recorded no work: it cannot be planned with")
    sizes = sorted(by_size)
    if sizes[-1] >= _APART * sizes[0]:
        return fit_affine(sizes, [median(by_size[n]) for n in sizes])
    per_sample_s = fmean(median(times) / n for n, times in by_size.items())
    return AffineCost(fixed_s=0.0, per_sample_s=per_sample_s)


def _slowness(records: Sequence[SpeedSample], cost: AffineCost) -> tuple[float, ...]:
    """Returns a rank's times over what its cost says; in a step without work those of the step before."""
    found, last = list[float](), 1.0
    for record in records:
        if record.samples > 0 and record.compute_s > 0.0:
            last = record.compute_s / cost.seconds(record.samples)
        found.append(last)
    return tuple(found)
