"""The best `PipelinePlan`, whether one fits, what it is in words (layer P)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain as chained
from itertools import pairwise, repeat
from typing import Literal

import numpy as np

from lightning_hetero.cluster.spec import equal_cluster, override_cluster
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.decide.costs import times_of
from lightning_hetero.pipeline.decide.schedule import Kind, route
from lightning_hetero.solvers.chain.chain import DepthRule, chain_of
from lightning_hetero.solvers.chain.model import stage_bytes
from lightning_hetero.solvers.placement import evaluate_plan, place
from lightning_hetero.solvers.plans import evened
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.solvers.tied_layers import Span, join_layers, split_again
from lightning_hetero.types import AffineCost, Cluster, GroupPlan, LayerCost, ModelCost, PipelinePlan


def best_plan(
    model: ModelCost, cluster: Cluster, global_batch: int, *, spans: Sequence[Span] = (),
    micro_batch_size: int | None = None, max_groups: int | None = None,
    depth: Literal["auto"] | DepthRule = "auto", budget: int | None = None,
    micro_samples: Sequence[int] | None = None,
) -> PipelinePlan:  # fmt: skip
    """Searches for the fastest plan; failure is its status.

    Args:
        model: costs by layer.
        cluster: devices and links.
        global_batch: samples per step.
        spans: layers that must stay on one device, see `Span`.
        micro_batch_size: samples; None: whichever is fastest.
        max_groups: most pipelines side by side; None: as many as devices.
        depth: rule for the micro-batches in flight; ``"auto"``: where memory is short, fewer of them may make the
            faster plan, so both rules are tried.
        budget: of the search, see `place`.
        micro_samples: sizes of micro-batches to choose from, where ``micro_batch_size`` names none; None: see `place`.
    """
    rules: tuple[DepthRule, ...] = ("per_link",) if depth == "auto" else (depth,)
    if depth == "auto" and any(math.isfinite(device.mem_bytes) for device in cluster.devices):
        rules = ("per_link", "low_memory")
    joined, bounds = join_layers(model, spans)
    sizes = micro_samples if micro_batch_size is None else [micro_batch_size]
    search = partial(place, joined, cluster, global_batch, micro_samples=sizes, max_groups=max_groups, budget=budget)
    plan = min((search(depth=rule) for rule in rules), key=lambda plan: plan.total_s)
    groups = tuple(replace(g, micro_batches=evened(g.micro_batches)) for g in split_again(plan, bounds).groups)
    return replace(plan, groups=groups)


def check_plan(plan: PipelinePlan, *, layers: int, ranks: int, global_batch: int | None = None) -> None:
    """Checks that a plan is one for this model, these ranks and this batch.

    Raises:
        ValueError: it is not; says what does not fit.
    """
    if not plan.ok or not plan.groups:
        raise ValueError(f"there is no plan: {plan.reason or 'it has no groups'}")
    everyone = [rank for group in plan.groups for rank in group.ranks]
    if len(set(everyone)) != len(everyone) or not set(everyone) <= set(range(ranks)):
        raise ValueError(f"the plan's ranks {everyone} must be different ones of 0..{ranks - 1}")
    for i, group in enumerate(plan.groups):
        cuts, sizes = group.cuts, group.micro_batches
        rising = all(a < b for a, b in pairwise(cuts))
        if len(cuts) != len(group.ranks) + 1 or not rising or (cuts[0], cuts[-1]) != (0, layers):
            raise ValueError(
                f"group {i}: cuts={cuts} must be {len(group.ranks) + 1} rising numbers from 0 to {layers}, the"
                " number of layers: one or more layers per rank"
            )
        if not sizes or min(sizes) < 1 or sum(sizes) != group.samples:
            raise ValueError(f"group {i}: micro_batches={sizes} must be numbers >= 1 that add up to {group.samples}")
        if len(group.depths) != len(group.ranks) or min(group.depths) < 1:
            raise ValueError(f"group {i}: depths={group.depths} must be {len(group.ranks)} numbers >= 1, one per rank")
    total = sum(group.samples for group in plan.groups)
    if global_batch is not None and total != global_batch:
        raise ValueError(f"the plan divides {total} samples, but the global batch has {global_batch}")


@lru_cache(maxsize=256)
def micro_sizes(planned: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """Returns the micro-batches of a part of a batch: as planned as far as there are samples, the rest as one.

    Where a part is larger than planned (as a user's batch sampler may make it), the rest is cut into micro-batches
    of at most the largest that was planned for, since that is known to fit; and no single sample is left, see `evened`.

    >>> micro_sizes((4, 4, 4, 3), 15), micro_sizes((4, 4, 4, 3), 9), micro_sizes((4, 4), 14)
    ((4, 4, 4, 3), (4, 3, 2), (4, 4, 4, 2))
    """
    sizes: list[int] = []
    for size in chained(planned, repeat(max(planned))):
        if samples <= 0:
            break
        sizes.append(min(size, samples))
        samples -= size
    return tuple(sizes) if len(sizes) == len(planned) and sum(sizes) == sum(planned) else evened(sizes)


def resized(plan: PipelinePlan, samples: int) -> PipelinePlan:
    """Returns a plan for a global batch of another size, with micro-batches no larger than planned.

    Raises:
        ValueError: there are fewer samples than groups.
    """
    groups, planned = plan.groups, [group.samples for group in plan.groups]
    shares = scale_shares(planned, samples, lower=1)
    if 0 in shares:
        raise ValueError(
            f"the plan divides {sum(planned)} samples among {len(groups)} groups, but the train loader's global batch"
            f" has {samples}: plan for that, or set global_batch_size"
        )
    scaled = [
        replace(group, samples=share, micro_batches=micro_sizes(group.micro_batches, share), total_s=math.nan)
        for group, share in zip(groups, shares, strict=True)
    ]
    return replace(plan, groups=tuple(scaled), total_s=math.nan, lower_bound_s=0.0)


def in_one_piece(plan: PipelinePlan, model: ModelCost, cluster: Cluster) -> PipelinePlan:
    """Returns the plan with a single micro-batch in each group of one device whose memory has room for it.

    Nothing is gained by several where no other device works meanwhile; and a batch need not be cut.
    """
    groups = list(plan.groups)
    for i, group in enumerate(groups):
        whole = replace(group, micro_batches=(group.samples,), depths=(1,))
        if len(group.ranks) == 1 and evaluate_plan(model, cluster, [whole]).ok:
            groups[i] = whole
    whole = evaluate_plan(model, cluster, groups)
    return replace(whole, lower_bound_s=plan.lower_bound_s, judged=plan.judged)


def resting(plan: PipelinePlan, ranks: int) -> tuple[int, ...]:
    """Returns the ranks that are in no group."""
    return tuple(sorted(set(range(ranks)) - {rank for group in plan.groups for rank in group.ranks}))


def describe_plan(plan: PipelinePlan, cluster: Cluster | None = None, names: Sequence[str] = ()) -> str:
    """Returns the plan as a few lines: each group's stages, samples and micro-batches, and what the model predicts.

    Args:
        plan: to describe.
        cluster: for the devices' names, and to say which are idle.
        names: of the layers; without them stages show numbers.
    """
    lines: list[str] = []
    for i, group in enumerate(plan.groups):
        stages: list[str] = []
        for stage, rank in enumerate(group.ranks):
            first, last = group.cuts[stage], group.cuts[stage + 1] - 1
            span = [names[k] if k < len(names) else str(k) for k in (first, last)]
            device = f" ({cluster.devices[rank].name})" if cluster is not None else ""
            stages.append(f"rank {rank}{device}: {span[0]}" + (f"..{span[1]}" if last > first else ""))
        sizes = sorted(set(group.micro_batches), reverse=True)
        batches = f"{len(group.micro_batches)} x {sizes[0]}" + ("" if len(sizes) == 1 else f" (last {sizes[-1]})")
        lines.append(f"group {i}: {group.samples} samples in {batches}; " + " -> ".join(stages))
    if cluster is not None and (idle := resting(plan, len(cluster.devices))):
        lines.append("idle: " + ", ".join(f"rank {rank} ({cluster.devices[rank].name})" for rank in idle))
    if math.isfinite(plan.total_s):
        more = f", {plan.sync_s * 1e3:.1f} ms of it to synchronise" if plan.sync_s else ""
        bound = f"; no plan below {plan.lower_bound_s * 1e3:.1f} ms" if plan.lower_bound_s else ""
        lines.append(f"modelled: {plan.total_s * 1e3:.1f} ms per global batch{more}{bound}")
    return "\n".join(lines)


def unit_costs(names: Sequence[str], sizes_bytes: Sequence[float] = ()) -> ModelCost:
    """Returns costs for a model of which nothing was measured: a backward pass takes two forward passes.

    Args:
        names: of the layers.
        sizes_bytes: of their parameters; a layer's work is in proportion to it. Left out: all equal.
    """
    second = AffineCost(fixed_s=0.0, per_sample_s=1.0)
    one = LayerCost(name="", forward=second, backward=second.times(2.0))
    layers = tuple(
        replace(one.times(max(size, 1.0)), name=name, param_bytes=size, state_bytes=size)
        for name, size in zip(names, sizes_bytes or (1.0,) * len(names), strict=True)
    )
    return ModelCost(layers=layers, before=one.times(0.0), head=one.times(0.0))


def emulated(model: ModelCost, scenario: Scenario) -> ModelCost:
    """Returns the costs with the emulated times in place of the measured ones, in the measured proportions.

    The whole model takes ``step_s + sample_s * samples`` on a device of speed 1, as a step does in the scenario. What a
    micro-batch costs whatever its size stays as measured: a real processor starts every computation.
    """
    total_s = sum(time.seconds(1e6) for cost in model.parts for time in (cost.forward, cost.backward)) or 1.0

    def part(measured: AffineCost) -> AffineCost:
        share = measured.seconds(1e6) / total_s
        fixed_s = scenario.step_s * share + measured.fixed_s
        return AffineCost(fixed_s=fixed_s, per_sample_s=(scenario.sample_s or 0.0) * share)

    first, *layers, last = [
        replace(cost, forward=part(cost.forward), backward=part(cost.backward)) for cost in model.parts
    ]
    return ModelCost(before=first, layers=tuple(layers), head=last)


def parts_of(model: ModelCost, group: GroupPlan, rank: int, calls: int = 1) -> dict[tuple[Kind, int], float]:
    """Returns which part of the whole model's time each computation of a rank is, by kind and stage of the schedule.

    Args:
        model: costs by layer.
        group: the rank's.
        rank: global rank.
        calls: of the backbone per step: with S stages, stage s of call k is number k * S + s, and the head the last.
    """
    one = replace(group, micro_batches=(max(group.micro_batches),))
    times = times_of(model, equal_cluster(max(group.ranks) + 1), one, calls)
    steps = [(s, row[0]) for s, row in zip(route(times.devices), times.seconds, strict=True) if not s.is_message]
    whole_s = sum(seconds for _, seconds in steps) or 1.0
    return {(s.kind, s.stage): seconds / whole_s for s, seconds in steps if group.ranks[s.device] == rank}


_ROUNDS = 8


def held_bytes(plan: PipelinePlan, model: ModelCost, ranks: int) -> list[float]:
    """Returns what the solvers count, by rank: state, and micro-batches in flight of the largest size; 0 if idle."""
    held, cluster = [0.0] * ranks, equal_cluster(ranks)
    for group in plan.groups:
        chain = chain_of(model, cluster, group.ranks, micro_samples=max(group.micro_batches))
        state, kept = stage_bytes(chain, np.array([group.cuts]))
        for rank, size in zip(group.ranks, (state + kept * group.depths)[0].tolist(), strict=True):
            held[rank] = size
    return held


def beside_bytes(plan: PipelinePlan, model: ModelCost, ranks: int) -> list[float]:
    """Returns what an accelerator's memory must have room for besides, by rank.

    That is a copy of the gradients while they are summed over the groups, and one message of the largest micro-batch
    to and from each neighbour, of activations and of gradients.
    """
    beside = [0.0] * ranks
    for group in plan.groups:
        for rank, (first, end) in zip(group.ranks, pairwise(group.cuts), strict=True):
            if len(plan.groups) > 1:
                parts = [*model.layers[first:end], *((model.before, model.head) if first == 0 else ())]
                beside[rank] += sum(part.param_bytes for part in parts)
            if len(group.ranks) > 1:
                came = model.layers[first - 1].output_bytes  # to the leader from the last stage
                beside[rank] += 2.0 * max(group.micro_batches) * (came + model.layers[end - 1].output_bytes)
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
