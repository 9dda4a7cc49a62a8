"""A set-up from what a run has recorded (layer P).

A pipeline's trace holds its cluster and what its layers cost. In any other run each rank's own work per step is known:
a line through its times where it had shares of different sizes, else in proportion to its samples, and how far each
step was from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, median_low

from lightning_hetero.cluster.score import exchange_alone
from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.plan.setup import Setup
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, Cluster, Device, Link, SpeedSample

_WARM_UP = 2  # first steps at least, and the first tenth of all, which are no measure of the others
_APART = 1.2  # largest over smallest share, from which on a line says more than a proportion
_MOST_STEPS = 160  # of the last ones


def setup_from_run(run: RecordedRun, *, global_batch: int | None = None, most_steps: int = _MOST_STEPS) -> Setup:
    """Returns the set-up of a recorded run, with links that cost what its exchange of gradients did.

    Args:
        run: see `lightning_hetero.record.run.run_of`.
        global_batch: samples per update; None: those of a full batch, as recorded.
        most_steps: so many of its last full batches count.

    Raises:
        ValueError: the trace tells of no plan and of no step that all ranks have measured, or a rank has never worked.
    """
    numbers = [n for n in run.full if not run.meets or len(run.steps[n].turns) == run.ranks]
    steps = [run.steps[n] for n in numbers]
    steps = steps[min(max(_WARM_UP, len(steps) // 10), max(0, len(steps) - 1)) :][-most_steps:]
    batch = global_batch or (round(median_low([step.samples for step in steps])) if steps else 0)
    if run.plan.get("profile") is not None and batch:
        model = model_from_plain(run.plan["profile"])
        return Setup(cluster=cluster_from_plain(run.plan["cluster"]), model=model, global_batch=batch)
    if not steps or not batch:
        raise ValueError(
            "the trace holds no step whose own work all ranks have measured: record it with an engine of this package,"
            " or under stock DDP with StragglerMonitor() and HeteroTrace() among the callbacks"
        )
    by_rank = list(zip(*map(run.records_of, steps), strict=True))
    costs = tuple(map(_cost, by_rank))
    if run.meets:  # what the rank that comes last sees of the exchange
        exchange_s = fmean(step.step_s - max(turn.compute_s for turn in step.turns.values()) for step in steps)
    else:
        exchange_s = min(exchange_alone([record.wait_s for record in own], run.ranks) for own in by_rank)
    each = max(1.0, batch / run.ranks)
    names = [run.devices.get(rank, "").partition(",")[0].replace(" ", "/") for rank in range(run.ranks)]
    if "" in names or len(set(names)) < run.ranks:  # they do not tell the devices apart
        names = [f"rank{rank}" for rank in range(run.ranks)]
    speeds = [costs[0].seconds(each) / cost.seconds(each) for cost in costs]
    devices = tuple(Device(name=name, speed=speed) for name, speed in zip(names, speeds, strict=True))
    return Setup(
        cluster=Cluster(devices=devices, links=((Link(),) * run.ranks,) * run.ranks),
        costs=costs,
        exchange_s=max(0.0, exchange_s),
        global_batch=batch,
        slowness=tuple(map(_slowness, by_rank, costs)),
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
