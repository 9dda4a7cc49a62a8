"""What a model costs: as plain values, and as the times of a plan's stages and messages (layer P)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import Any

from lightning_hetero.checked import mapping
from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, makespan_s
from lightning_hetero.pipeline.decide.schedule import PipelineTimes, Row
from lightning_hetero.types import AffineCost, Cluster, Event, GroupPlan, LayerCost, ModelCost, PipelinePlan

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


def recorded(events: Iterable[Event]) -> tuple[Cluster, ModelCost | None] | None:
    """Returns the cluster and the costs of the last plan in a trace; None if it holds no plan."""
    plans = [event.data for event in events if event.kind == "plan"]
    if not plans:
        return None
    profile = plans[-1].get("profile")
    return cluster_from_plain(plans[-1]["cluster"]), None if profile is None else model_from_plain(profile)


def times_of(model: ModelCost, cluster: Cluster, group: GroupPlan) -> PipelineTimes:
    """Returns what each part of a pipeline takes by the costs it was planned from, micro-batch by micro-batch.

    Its bottleneck and its fill are those of `solvers.chain`: one model, spelled for splits there, for operations here.
    Where memory makes a plan keep fewer micro-batches in flight than links ask for, generate with the plan's depths:
    ``generate(times, SchedulePolicy(depths=group.depths))``.

    Args:
        model: costs by layer, on a device of speed 1.
        cluster: devices and links.
        group: the pipeline; its ranks, cuts and micro-batches count.

    >>> from lightning_hetero.types import Device, LayerCost, Link
    >>> one, free = AffineCost(fixed_s=0.0, per_sample_s=1.0), AffineCost(fixed_s=0.0, per_sample_s=0.0)
    >>> layer = LayerCost(name="layer", forward=one, backward=one, output_bytes=4.0)
    >>> ends = LayerCost(name="ends", forward=free, backward=free)
    >>> devices = (Device(name="a", speed=2.0), Device(name="b"))
    >>> cluster = Cluster(devices=devices, links=((Link(bandwidth_bytes_per_s=8.0),) * 2,) * 2)
    >>> group = GroupPlan(ranks=(0, 1), cuts=(0, 2, 3), samples=3, micro_batches=(2, 1), depths=(2, 2))
    >>> times = times_of(ModelCost(layers=(layer,) * 3, before=ends, head=ends), cluster, group)
    >>> times.forward_s, times.link_forward_s, times.loop_forward_s
    (((2.0, 1.0), (2.0, 1.0)), ((1.0, 0.5),), (1.0, 0.5))
    """
    ranks, cuts, sizes = group.ranks, group.cuts, group.micro_batches
    stages = [(rank, model.layers[a:b]) for rank, (a, b) in zip(ranks, pairwise(cuts), strict=True)]
    first, last = ranks[0], ranks[-1]

    def by_size(seconds: Callable[[int], float]) -> Row:
        known = {size: seconds(size) for size in set(sizes)}  # there are few
        return tuple(known[size] for size in sizes)

    def compute(rank: int, costs: Iterable[AffineCost]) -> Row:
        parts, speed = list(costs), cluster.devices[rank].speed
        return by_size(lambda size: sum(cost.seconds(size) for cost in parts) / speed)

    def message(source: int, target: int, cut: int) -> Row:
        per_sample_bytes, link = model.layers[cut - 1].output_bytes, cluster.links[source][target]
        return by_size(lambda size: link.seconds(size * per_sample_bytes))

    hops = [(a, b, cut) for (a, b), cut in zip(pairwise(ranks), cuts[1:-1], strict=True)]
    none = by_size(lambda _: 0.0)
    loop = (message(last, first, cuts[-1]), message(first, last, cuts[-1])) if len(ranks) > 1 else (none, none)
    return PipelineTimes(
        forward_s=tuple(compute(rank, [layer.forward for layer in layers]) for rank, layers in stages),
        backward_s=tuple(compute(rank, [layer.backward for layer in layers]) for rank, layers in stages),
        before_forward_s=compute(first, [model.before.forward]),
        before_backward_s=compute(first, [model.before.backward]),
        head_forward_s=compute(first, [model.head.forward]), head_backward_s=compute(first, [model.head.backward]),
        link_forward_s=tuple(message(a, b, cut) for a, b, cut in hops),
        link_backward_s=tuple(message(b, a, cut) for a, b, cut in hops), loop_forward_s=loop[0],
        loop_backward_s=loop[1], devices=tuple(range(len(ranks))),
    )  # fmt: skip


def called(times: PipelineTimes, calls: int) -> PipelineTimes:
    """Returns the times of steps that call the backbone several times, each call on the stages of all.

    Stage s of call k is stage k * S + s, on the same device; the way from one call to the next leads over the leader,
    as the way to the head does. What `times` says of the stages is taken as one call's.

    Args:
        times: of a step with one call.
        calls: at least 1.
    """
    if calls == 1:
        return times
    return replace(
        times, forward_s=times.forward_s * calls, backward_s=times.backward_s * calls,
        link_forward_s=((*times.link_forward_s, times.loop_forward_s) * calls)[:-1],
        link_backward_s=((*times.link_backward_s, times.loop_backward_s) * calls)[:-1],
        devices=times.devices * calls,
    )  # fmt: skip


def work_s(plan: PipelinePlan, model: ModelCost | None, cluster: Cluster, *, ranks: int) -> tuple[float, ...]:
    """Returns what each rank's own work for a full batch should take [s]; NaN where nothing was measured."""
    if model is None:
        return (math.nan,) * ranks
    seconds = [0.0] * ranks
    for group in plan.groups:
        times = times_of(model, cluster, group)
        for stage, rank in enumerate(group.ranks):
            seconds[rank] = sum(times.forward_s[stage]) + sum(times.backward_s[stage])
        ends = (times.before_forward_s, times.before_backward_s, times.head_forward_s, times.head_backward_s)
        seconds[group.ranks[0]] += sum(map(sum, ends))
    return tuple(seconds)


def batch_s(plan: PipelinePlan, model: ModelCost, cluster: Cluster) -> float:
    """Returns what a batch takes by the plan's schedules, operation by operation, and to synchronise [s]."""
    different = {(times_of(model, cluster, group), group.depths) for group in plan.groups}
    return max(makespan_s(times, SchedulePolicy(depths=depths)) for times, depths in different) + plan.sync_s
