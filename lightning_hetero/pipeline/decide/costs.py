"""What a model costs: as plain values, and as the times of a plan's stages and messages (layer P)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from lightning_hetero.checked import mapping
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, makespan_s
from lightning_hetero.pipeline.decide.schedule import Kind, PipelineTimes, Row, Step, route
from lightning_hetero.types import AffineCost, Cluster, GroupPlan, LayerCost, ModelCost, PipelinePlan

_TIMES, _PARTS = ("forward", "backward"), ("layers", "before", "head")


def layer_to_plain(layer: LayerCost) -> dict[str, Any]:
    """Returns strict JSON values: ``{"name": "0", "forward": [fixed_s, per_sample_s], ..., "param_bytes": 8.0}``."""
    plain = asdict(layer)
    return {**plain, **{name: list(plain[name].values()) for name in _TIMES}}


def layer_from_plain(plain: Mapping[str, Any]) -> LayerCost:
    """Returns what `layer_to_plain` was given.

    Raises:
        TypeError: not a mapping.
        ValueError: a key is missing or unknown, or a value out of its range.
    """
    wanted = [f.name for f in fields(LayerCost)]
    read = mapping("a layer of the profile", plain, wanted, needed=wanted)
    for name in _TIMES:
        fixed_s, per_sample_s = read[name]
        read[name] = AffineCost(fixed_s=fixed_s, per_sample_s=per_sample_s)
    return LayerCost(**read)


def model_to_plain(model: ModelCost) -> dict[str, Any]:
    """Returns strict JSON values which `model_from_plain` reads back as an equal cost."""
    return {
        "layers": [layer_to_plain(layer) for layer in model.layers],
        "before": layer_to_plain(model.before),
        "head": layer_to_plain(model.head),
    }


def model_from_plain(plain: Mapping[str, Any] | ModelCost) -> ModelCost:
    """Returns what `model_to_plain` was given; a `ModelCost` unchanged.

    Raises:
        TypeError: not a mapping.
        ValueError: a key is missing, or a value out of its range.
    """
    if isinstance(plain, ModelCost):
        return plain
    given = mapping("profile", plain, _PARTS, needed=_PARTS)
    layers, before, head = (given[name] for name in _PARTS)
    return ModelCost(
        layers=tuple(map(layer_from_plain, layers)), before=layer_from_plain(before), head=layer_from_plain(head)
    )


def times_of(model: ModelCost, cluster: Cluster, group: GroupPlan, calls: int = 1) -> PipelineTimes:
    """Returns what each step of a pipeline takes by the costs it was planned from, micro-batch by micro-batch.

    Its bottleneck and its fill are those of `solvers.chain`: one model, spelled for splits there, for operations here.
    Where memory makes a plan keep fewer micro-batches in flight than links ask for, generate with the plan's depths:
    ``generate(times, SchedulePolicy(depths=group.depths))``.

    Args:
        model: costs by layer, on a device of speed 1.
        cluster: devices and links.
        group: the pipeline; its ranks, cuts and micro-batches count.
        calls: of the backbone per training step, each on the stages of all: with S stages, stage s of call k is number
            k * S + s, on the same device; the way from one call to the next leads over the leader, as the way to the
            head does.

    >>> from lightning_hetero.types import Device, LayerCost, Link
    >>> one, free = AffineCost(fixed_s=0.0, per_sample_s=1.0), AffineCost(fixed_s=0.0, per_sample_s=0.0)
    >>> layer = LayerCost(name="layer", forward=one, backward=one, output_bytes=4.0)
    >>> ends = LayerCost(name="ends", forward=free, backward=free)
    >>> devices = (Device(name="a", speed=2.0), Device(name="b"))
    >>> cluster = Cluster(devices=devices, links=((Link(bandwidth_bytes_per_s=8.0),) * 2,) * 2)
    >>> group = GroupPlan(ranks=(0, 1), cuts=(0, 2, 3), samples=3, micro_batches=(2, 1), depths=(2, 2))
    >>> times_of(ModelCost(layers=(layer,) * 3, before=ends, head=ends), cluster, group).seconds[:4]
    ((2.0, 1.0), (1.0, 0.5), (2.0, 1.0), (1.0, 0.5))
    """
    ranks, cuts, sizes = group.ranks, group.cuts, group.micro_batches
    devices = tuple(range(len(ranks))) * calls

    def row(step: Step) -> Row:
        rank, layer = ranks[step.device], cuts[step.cut % len(ranks) + 1]
        if step.is_message:
            per_sample_bytes, link = model.layers[layer - 1].output_bytes, cluster.links[rank][ranks[step.to_device]]
            known = {size: link.seconds(size * per_sample_bytes) for size in set(sizes)}  # there are few
        else:
            costs, speed = list(_costs(step)), cluster.devices[rank].speed
            known = {size: sum(cost.seconds(size) for cost in costs) / speed for size in set(sizes)}
        return tuple(known[size] for size in sizes)

    def _costs(step: Step) -> Iterable[AffineCost]:
        if step.kind is Kind.HEAD:
            return model.head.forward, model.head.backward
        stage = step.stage % len(ranks)
        own = (*((model.before,) if step.stage == 0 else ()), *model.layers[cuts[stage] : cuts[stage + 1]])
        return (cost.forward if step.kind is Kind.FORWARD else cost.backward for cost in own)

    return PipelineTimes(devices=devices, seconds=tuple(map(row, route(devices))))


def work_s(plan: PipelinePlan, model: ModelCost | None, cluster: Cluster, *, ranks: int) -> tuple[float, ...]:
    """Returns what each rank's own work for a full batch should take [s]; NaN where nothing was measured."""
    if model is None:
        return (math.nan,) * ranks
    seconds = [0.0] * ranks
    for group in plan.groups:
        times = times_of(model, cluster, group)
        for step, row in zip(route(times.devices), times.seconds, strict=True):
            if not step.is_message:
                seconds[group.ranks[step.device]] += sum(row)
    return tuple(seconds)


def batch_s(plan: PipelinePlan, model: ModelCost, cluster: Cluster) -> float:
    """Returns what a batch takes by the plan's schedules, operation by operation, and to synchronise [s]."""
    different = {(times_of(model, cluster, group), group.depths) for group in plan.groups}
    return max(makespan_s(times, SchedulePolicy(depths=depths)) for times, depths in different) + plan.sync_s
