"""A set-up from what a run has recorded (layer P).

A pipeline's trace holds its cluster and what its layers cost. Of any other run each rank's own work per step is known:
a line through its times where it had shares of different sizes, else in proportion to its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from lightning_hetero.cluster.what_if import exchange_alone
from lightning_hetero.pipeline.decide.costs import recorded
from lightning_hetero.plan.setup import Setup
from lightning_hetero.record import replay
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, Cluster, Device, Event, Link, SpeedSample

__all__ = ["setup_from_events"]

_WARM_UP = 2  # first steps of all, which are no measure of the others
_APART = 1.2  # largest over smallest share, from which on a line says more than a proportion


def setup_from_events(events: Sequence[Event], *, global_batch: int | None = None) -> Setup:
    """Returns the set-up of a recorded run, with links that cost what its exchange of gradients did.

    Args:
        events: of all ranks, see `lightning_hetero.record.read_events`.
        global_batch: samples per update; None: as recorded.

    Raises:
        ValueError: the trace tells of no plan and of no step that all ranks have measured.
    """
    steps = list(replay(events))
    found = recorded(events)
    batch = global_batch or _batch_of(steps)
    if found is not None and found[1] is not None and batch:
        return Setup(cluster=found[0], model=found[1], global_batch=batch)
    steady = steps[_WARM_UP:] or steps
    if not steady or not batch:
        raise ValueError(
            "the trace holds no step whose own work all ranks have measured: record it with an engine of this package,"
            " or under stock DDP with StragglerMonitor() and HeteroTrace() among the callbacks"
        )
    ranks = len(steady[0])
    costs = tuple(_cost([step[rank] for step in steady]) for rank in range(ranks))
    waits = [[step[rank].wait_s for step in steady] for rank in range(ranks)]
    exchange_s = min(exchange_alone(rank_waits, ranks) for rank_waits in waits)
    each = max(1.0, batch / ranks)
    first_s = costs[0].seconds(each)
    names = _names(events)
    devices = tuple(
        Device(name=names.get(rank, f"rank{rank}"), speed=first_s / costs[rank].seconds(each))
        for rank in range(ranks)
    )
    cluster = Cluster(devices=devices, links=((Link(),) * ranks,) * ranks)
    return Setup(cluster=cluster, costs=costs, exchange_s=exchange_s, global_batch=batch)


def _batch_of(steps: Sequence[Sequence[SpeedSample]]) -> int:
    """Returns the usual number of samples per step; 0 if none was recorded. The last of an epoch may have fewer."""
    return int(median([sum(record.samples for record in step) for step in steps])) if steps else 0


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


def _names(events: Sequence[Event]) -> dict[int, str]:
    """Returns the devices' names by rank, as far as the trace tells them apart."""
    found: dict[int, str] = {}
    for event in events:
        names = event.data.get("names") if event.kind == "run" else None
        if names:
            found[event.rank] = str(names[0]).replace(" ", "/")
    return found if len(set(found.values())) == len(found) else {}
