"""A set-up from what a run has recorded (layer P).

A pipeline's trace holds its cluster and what its layers cost. Of any other run each rank's own work per step is known,
see `lightning_hetero.record.costs`.
"""

from __future__ import annotations

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.plan.setup import Setup
from lightning_hetero.record.costs import costs_of
from lightning_hetero.record.ledger import RunLedger, ledger_of
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.types import Cluster, Device, Link


def setup_from_run(run: RecordedRun, *, global_batch: int | None = None, ledger: RunLedger | None = None) -> Setup:
    """Returns the set-up of a recorded run, with links that cost what its exchange of gradients did.

    Args:
        run: see `lightning_hetero.record.run.run_of`.
        global_batch: samples per update; None: those of a full batch, as recorded.
        ledger: the run's; None: it is made here.

    Raises:
        ValueError: the trace tells of no plan and of no step that all ranks have measured, or a rank has never worked.
    """
    ledger = ledger or ledger_of(run)
    batch = global_batch or ledger.batch
    if run.plan.get("profile") is not None and batch:
        model = model_from_plain(run.plan["profile"])
        return Setup(cluster=cluster_from_plain(run.plan["cluster"]), model=model, global_batch=batch)
    found = costs_of(ledger)
    each = max(1.0, batch / run.ranks)
    names = [run.devices.get(rank, "").partition(",")[0].replace(" ", "/") for rank in range(run.ranks)]
    if "" in names or len(set(names)) < run.ranks:  # they do not tell the devices apart
        names = [f"rank{rank}" for rank in range(run.ranks)]
    speeds = [found.lines[0].seconds(each) / cost.seconds(each) for cost in found.lines]
    devices = tuple(Device(name=name, speed=speed) for name, speed in zip(names, speeds, strict=True))
    return Setup(
        cluster=Cluster(devices=devices, links=((Link(),) * run.ranks,) * run.ranks),
        costs=found.lines,
        exchange_s=found.rest_s,
        global_batch=batch,
        slowness=found.slowness,
    )
