"""A pipeline run made by hand: two stages with a layer each."""

from __future__ import annotations

from lightning_hetero.cluster.spec import cluster_to_plain
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.record.run import RecordedRun
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
from tests.pure.report.kit import run_with

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
