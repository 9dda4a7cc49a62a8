"""Who computes what: groups of devices, their order, their layers, their samples, and who is idle.

The objective is the modelled time of a global batch,

    T = max over groups of T_g(n_g) + sync,      sum of n_g = global batch

with T_g from `pipes` (fill and periods of `chain`, by micro-batches) and sync from `sync`. "Joint dynamic data and
model parallelism" (TPDS 36(2), 2025), known to us by its abstract, names the decisions: uneven data,
communication-aware partitioning, groups. All formulas and the search are ours:

    structure      first ones (`starts`), then neighbours of the best so far (`search`, the controller's too)
    borders        drafted by even stages, the best drafts by `chain.split`
    samples        exact for the pipelines at hand (`pipes.share`)

Nothing is drawn at random and ties are broken by rank, so that all ranks find the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.solvers.chain.model import evaluate
from lightning_hetero.solvers.chain.split import why_infeasible
from lightning_hetero.solvers.placement.pipes import Pipe, Problem, share
from lightning_hetero.solvers.placement.search import best_found
from lightning_hetero.solvers.placement.sync import sync_s
from lightning_hetero.types import Cluster, GroupPlan, ModelCost, PipelinePlan, Status


def place(
    model: ModelCost, cluster: Cluster, global_batch: int, *, micro_samples: Sequence[int] | None = None,
    max_groups: int | None = None, depth: DepthRule = "per_link", budget: int | None = None,
) -> PipelinePlan:  # fmt: skip
    """Plans the training of a model on a cluster: groups, orders, borders, micro-batches, samples; devices may rest.

    Args:
        model: costs by layer, on a device of speed 1.
        cluster: devices and links.
        global_batch: samples of one update, on all devices together.
        micro_samples: sizes of full micro-batches to choose from, for each group; the last one of a group may be
            smaller. None: 1, 2, 3, 4, 6, 8, 12, ... up to the global batch.
        max_groups: most pipelines side by side; None: as many as devices. 1: one chain.
        depth: how many micro-batches are in flight: ``per_link``, or ``low_memory``.
        budget: most structures to compare, besides the first ones; None: so that it ends within seconds.

    Returns:
        A plan with ``lower_bound_s``; or infeasible, with which constraint cannot be met and what would help.

    >>> from lightning_hetero.types import AffineCost, Device, LayerCost, Link
    >>> free, work = AffineCost(fixed_s=0.0, per_sample_s=0.0), AffineCost(fixed_s=0.0, per_sample_s=1.0)
    >>> layers = tuple(LayerCost(name=f"{i}", forward=free, backward=work, state_bytes=1.0) for i in range(6))
    >>> ends = LayerCost(name="", forward=free, backward=free)
    >>> model = ModelCost(layers=layers, before=ends, head=ends)
    >>> links = tuple((Link(),) * 2 for _ in range(2))
    >>> plan = place(model, Cluster(devices=(Device(name="a", speed=2.0), Device(name="b")), links=links), 12)
    >>> [(group.ranks, group.samples) for group in plan.groups], plan.total_s
    ([((0,), 8), ((1,), 4)], 24.0)
    >>> small = (Device(name="a", speed=2.0, mem_bytes=4.0), Device(name="b", mem_bytes=4.0))
    >>> plan = place(model, Cluster(devices=small, links=links), 12)
    >>> [(group.ranks, group.cuts, group.micro_batches) for group in plan.groups], plan.total_s
    ([((0, 1), (0, 4, 6), (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1))], 26.0)
    """
    problem = Problem(model, cluster, global_batch, sizes_to_try(micro_samples, global_batch), depth=depth)
    bound_s = _work_bound_s(problem)
    pipes, judged = best_found(problem, len(cluster.devices) if max_groups is None else max_groups, budget=budget)
    if not pipes:
        return PipelinePlan(groups=(), status=Status.INFEASIBLE, lower_bound_s=bound_s, reason=_why(problem))
    shares, _ = share([problem.cost(pipe) for pipe in pipes], global_batch)
    groups = [group_of(problem, pipe, n) for pipe, n in sorted(zip(pipes, shares, strict=True))]
    plan = evaluate_plan(model, cluster, groups, depth=depth)
    return replace(plan, lower_bound_s=min(bound_s, plan.total_s), judged=judged)


def sizes_to_try(micro_samples: Sequence[int] | None, samples: int) -> tuple[int, ...]:
    """Returns the sizes of full micro-batches to choose from, see `place`.

    >>> sizes_to_try(None, 10), sizes_to_try([4, 16], 10)
    ((1, 2, 3, 4, 6, 8, 10), (4, 10))
    """
    if micro_samples is None:
        powers = [1 << k for k in range(samples.bit_length())]
        return tuple(sorted({n for n in (*powers, *(3 * p for p in powers)) if n <= samples} | {samples}))
    return tuple(sorted({min(n, samples) for n in micro_samples}))


def micro_batches_of(samples: int, size: int) -> tuple[int, ...]:
    """Returns full micro-batches of ``size`` samples and the rest.

    >>> micro_batches_of(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(samples, size)
    return (size,) * full + ((rest,) if rest else ())


def _work_bound_s(problem: Problem) -> float:
    """Returns the time of all layers' work for the batch on all devices together [s]: no plan is below it."""
    samples = problem.samples
    batches = -(-samples // min(problem.sizes[-1], samples))  # in all groups together, at least
    fixed_s, per_sample_s = problem.work_s[:, -1] + problem.outside_s
    return float((batches * fixed_s + samples * per_sample_s) / np.sum(problem.speeds)) * (1.0 - 1e-9)


def group_of(problem: Problem, pipe: Pipe, samples: int) -> GroupPlan:
    """Returns a pipeline with its samples, in the micro-batches that suit it; depths are still to be found."""
    sizes = micro_batches_of(samples, problem.cost(pipe).size(samples))
    return GroupPlan(ranks=pipe.ranks, cuts=pipe.cuts, samples=samples, micro_batches=sizes, depths=())


def _why(problem: Problem) -> str:
    """Names the constraint that not even the most patient pipeline over the devices with most memory meets."""
    caps = problem.caps
    roomiest = sorted(range(problem.n_devices), key=lambda r: (-caps[r], r))[: problem.n_layers]
    size = problem.sizes[0]
    return why_infeasible(problem.chain(tuple(roomiest), size, -(-problem.samples // size)))


def evaluate_plan(
    model: ModelCost, cluster: Cluster, groups: Sequence[GroupPlan], *, depth: DepthRule = "per_link"
) -> PipelinePlan:
    """Returns what the model says of a plan; ``lower_bound_s`` stays 0, as nothing is minimised.

    Of each group the ranks, cuts, samples and micro-batches count; depths and times are filled in. The time of a group
    is its fill for the largest micro-batch and a period for each of the others, by its size. Infeasible if a stage does
    not fit its device; the reason names the group.

    Args:
        model, cluster, depth: as in `place`.
        groups: one or more, of a plan: see `lightning_hetero.pipeline.decide.plans.check_plan`.
    """
    ranks = [rank for group in groups for rank in group.ranks]
    assert ranks and len(set(ranks)) == len(ranks), ranks
    assert all(min(group.micro_batches) > 0 and sum(group.micro_batches) == group.samples for group in groups), groups
    sizes = tuple(sorted({size for group in groups for size in group.micro_batches}))
    samples = sum(group.samples for group in groups)
    problem = Problem(model, cluster, samples, sizes, depth=depth)
    timed: list[GroupPlan] = []
    for i, group in enumerate(groups):
        found = _timed(problem, group)
        if isinstance(found, str):
            return PipelinePlan(groups=(), status=Status.INFEASIBLE, reason=f"group {i}: {found}")
        timed.append(found)
    wire_s = sync_s(problem, [Pipe(group.ranks, group.cuts) for group in groups])
    total_s = max(group.total_s for group in timed) + wire_s
    return PipelinePlan(groups=tuple(timed), total_s=total_s, sync_s=wire_s)


def _timed(problem: Problem, group: GroupPlan) -> GroupPlan | str:
    largest, count = max(group.micro_batches), len(group.micro_batches)
    full = evaluate(problem.chain(group.ranks, largest, count), group.cuts)
    if not full.ok:
        return full.reason
    total_s = full.fill_s - full.period_s
    for size in sorted(set(group.micro_batches)):
        period_s = full.period_s
        if size < largest and full.bottleneck_s > 0.0:
            part = evaluate(problem.chain(group.ranks, size, count), group.cuts)
            period_s = part.bottleneck_s * (full.period_s / full.bottleneck_s)
        total_s += group.micro_batches.count(size) * period_s
    return replace(group, depths=full.depths, total_s=total_s)
