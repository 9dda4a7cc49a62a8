"""Traces made by hand: of every engine, odd ones, and which views each has data for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hetero.cluster.spec import cluster_to_plain
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.record import EventWriter, trace_path
from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.types import (
    AffineCost,
    Cluster,
    Device,
    Event,
    GroupPlan,
    LayerCost,
    Link,
    ModelCost,
    PipelinePlan,
)

Told = tuple[float, float, float]
"""Samples, own work [s], waiting [s] of a rank in a step."""


def opened(rank: int, ranks: int, **about: Any) -> Event:
    data = {"version": 1, "world_size": ranks, "names": [f"host cpu:{rank}"], "strategy": "DDPStrategy", **about}
    return Event(kind="run", rank=rank, epoch=0, step=0, t_s=0.0, data=data)


def events_of(steps: Sequence[Sequence[Told]], *, ahead_s: Sequence[float] = (), **about: Any) -> list[Event]:
    """The steps of one epoch, one behind the other; ``ahead_s``: of each rank's clock."""
    ranks = len(steps[0])
    found = [opened(rank, ranks, **about) for rank in range(ranks)]
    now_s = 0.0
    for number, step in enumerate(steps):
        now_s += max(compute_s + wait_s for _, compute_s, wait_s in step)
        for rank, (samples, compute_s, wait_s) in enumerate(step):
            data = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
            t_s = now_s + (ahead_s[rank] if ahead_s else 0.0)
            found.append(Event(kind="step", rank=rank, epoch=0, step=number, t_s=t_s, data=data))
    return found


def written(folder: Path, steps: Sequence[Sequence[Told]], *, run: str = "") -> None:
    """Writes the trace of a run as `HeteroTrace` does."""
    events, ranks = events_of(steps), len(steps[0])
    for rank in range(ranks):
        about, path = {"strategy": "DDPStrategy"}, trace_path(folder, rank)
        with EventWriter(path, rank=rank, world_size=ranks, names=["cpu"], about=about, run=run) as writer:
            for event in events:
                if event.rank == rank and event.kind != "run":
                    writer.write(event)


def run_with(steps: Sequence[Sequence[Told]], more: Sequence[Event] = (), **about: Any) -> RecordedRun:
    return run_of([*events_of(steps, **about), *more], name="made")


def decision(step: int, shares: Sequence[int], *, rank: int = 0, **data: Any) -> Event:
    told = {"shares": list(shares), "reason": "rebalanced", **data}
    return Event(kind="decision", rank=rank, epoch=0, step=step, t_s=0.0, data=told)


def logged(values: Sequence[dict[str, float | None]]) -> list[Event]:
    """What was logged in the first steps, one behind the other; None: no finite number."""
    return [Event(kind="metrics", rank=0, epoch=0, step=n, t_s=0.0, data=one) for n, one in enumerate(values)]


ONE, FREE = AffineCost(fixed_s=0.0, per_sample_s=1.0), AffineCost(fixed_s=0.0, per_sample_s=0.0)
LAYER = LayerCost(name="layer", forward=ONE, backward=ONE)
ENDS = LayerCost(name="ends", forward=FREE, backward=FREE)
MODEL = ModelCost(layers=(LAYER,) * 2, before=ENDS, head=ENDS)


def pipeline_run(
    speeds: tuple[float, float], steps: list[list[tuple[float, float, float]]], samples: int = 2
) -> RecordedRun:
    """A pipeline of two stages with a layer each, and one micro-batch."""
    devices = tuple(Device(name=f"d{i}", speed=speed) for i, speed in enumerate(speeds))
    cluster = Cluster(devices=devices, links=((Link(),) * 2,) * 2)
    group = GroupPlan(ranks=(0, 1), cuts=(0, 1, 2), samples=samples, micro_batches=(samples,), depths=(1, 1))
    data = {
        "plan": plan_to_plain(PipelinePlan(groups=(group,), total_s=4.0 * samples)),
        "cluster": cluster_to_plain(cluster),
        "profile": model_to_plain(MODEL),
    }
    return run_with(steps, [Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=data)], engine="pipeline")


def stale_run() -> RecordedRun:
    counts = {
        "updates": 40, "staleness": {"0": 300, "1": 15, "2": 5}, "discarded": {"late": 8}, "reissued": {"died": 4},
        "queue": 1, "longest_queue": 3, "apply_s": 0.4, "longest_apply_s": 0.05,
    }  # fmt: skip
    server = Event(kind="server", rank=0, epoch=0, step=39, t_s=0.0, data=counts)
    steps = [[(6, 1.0, 0.2), (2, 0.9, 0.3)]] * 40
    return run_with(steps, [server], engine="stale", policy="flexible", bound=2)


def balanced_run() -> RecordedRun:
    before, after = [(8, 1.0, 2.0), (8, 3.0, 0.0)], [(11, 1.4, 0.5), (5, 1.9, 0.0)]
    queues = [
        Event(kind="queue", rank=0, epoch=0, step=n, t_s=0.0, data={"queues": {"money": 0.1 * n}}) for n in range(40)
    ]
    told = decision(4, (11, 5), predicted_gain=0.3, reason='rebalanced <script>"')
    return run_with([before] * 6 + [after] * 34, [told, *queues], engine="balanced")


RUNS = {
    "ddp": run_with(
        [[(15, 1.5, 1.55), (15, 3.0, 0.05)]] * 80,
        logged([{"val_loss": 2.0 / (n + 1), "acc": 0.5} for n in range(80)]),
        unix_s=1.79e9, versions={"torch": "2.13"}, commit="0123456789ab-dirty", trainer={"max_epochs": 1},
    ),
    "balanced": balanced_run(),
    "stale": stale_run(),
    "pipeline": pipeline_run((1.0, 0.5), [[(2, 4.0, 20.0), (0, 8.0, 16.0)]] * 5),
    "many ranks": run_with([[(4, 1.0 + 0.1 * (r % 7), 0.7 - 0.1 * (r % 7)) for r in range(24)]] * 12),
    "one rank": run_with([[(8, 1.0, 0.0)]] * 3),
    "one step": run_with([[(8, 1.0, 0.5), (8, 1.5, 0.0)]]),
    "no work measured": run_of([opened(0, 2), opened(1, 2)]),
    "files missing": run_of(events_of([[(8, 1.0, 1.0), (8, 2.0, 0.0)]] * 20)[::2]),
}
SHOWN = {
    "ddp": {"course", "timeline", "spent", "scores"},
    "balanced": {"course", "timeline", "spent", "shares", "scores", "budget"},
    "stale": {"course", "timeline", "spent", "scores", "staleness"},
    "pipeline": {"course", "timeline", "spent", "pipeline"},
    "many ranks": {"course", "timeline", "spent", "scores"},
    "one rank": {"course", "spent"},
    "one step": {"timeline", "spent", "scores"},
    "no work measured": set[str](),
    "files missing": set[str](),
}
