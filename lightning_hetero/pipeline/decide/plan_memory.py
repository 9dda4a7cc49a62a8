"""What a plan takes of each rank's memory (layer P)."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetero.cluster.spec import override_cluster
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan

__all__ = ["beside_bytes", "held_bytes", "with_room"]

_ROUNDS = 8


def held_bytes(plan: PipelinePlan, model: ModelCost, ranks: int) -> list[float]:
    """Returns what the solvers count, by rank: state, and micro-batches in flight of the largest size; 0 at rest."""
    held = [0.0] * ranks
    for group in plan.groups:
        most = max(group.micro_batches)
        for stage, rank in enumerate(group.ranks):
            first, end = group.cuts[stage : stage + 2]
            own = model.layers[first:end]
            state, kept = sum(layer.state_bytes for layer in own), sum(layer.activation_bytes for layer in own)
            if stage > 0:
                kept += model.layers[first - 1].output_bytes
            else:  # the head keeps what it does of one micro-batch at a time
                state += model.before.state_bytes + model.head.state_bytes + most * model.head.activation_bytes
                kept += model.before.activation_bytes
            held[rank] = state + group.depths[stage] * most * kept
    return held


def beside_bytes(plan: PipelinePlan, model: ModelCost, ranks: int) -> list[float]:
    """Returns what an accelerator's memory must have room for besides, by rank.

    That is a copy of the gradients while they are summed over the groups, and one message of the largest micro-batch
    to and from each neighbour, of activations and of gradients.
    """
    beside = [0.0] * ranks
    for group in plan.groups:
        most = max(group.micro_batches)
        for stage, rank in enumerate(group.ranks):
            first, end = group.cuts[stage : stage + 2]
            if len(plan.groups) > 1:
                parts = [*model.layers[first:end], *((model.before, model.head) if stage == 0 else ())]
                beside[rank] += sum(part.param_bytes for part in parts)
            if len(group.ranks) > 1:
                came = model.layers[first - 1].output_bytes  # to the leader from the last stage
                beside[rank] += 2.0 * most * (came + model.layers[end - 1].output_bytes)
    return beside


def with_room(
    plan_for: Callable[[Cluster], PipelinePlan], model: ModelCost, cluster: Cluster
) -> tuple[PipelinePlan, Cluster]:
    """Returns a plan that leaves room for what it needs besides, and the cluster that it was made for.

    Args:
        plan_for: makes a plan, or raises.
        model: costs by layer.
        cluster: the devices with all the memory that a rank may use.
    """
    budget = [device.mem_bytes for device in cluster.devices]
    plan = plan_for(cluster)
    for _ in range(_ROUNDS):
        beside = beside_bytes(plan, model, len(budget))
        left = [max(1.0, have - need) for have, need in zip(budget, beside, strict=True)]
        held = held_bytes(plan, model, len(budget))
        least = [min(device.mem_bytes, now) for device, now in zip(cluster.devices, left, strict=True)]
        cluster = override_cluster(cluster, mem_bytes=least)
        if all(now <= have for now, have in zip(held, left, strict=True)):
            break
        plan = plan_for(cluster)
    return plan, cluster
