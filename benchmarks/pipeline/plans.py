"""The plans that are compared: ours, and the best even pipelines; with what the model says of each (no torch).

An *even* pipeline is what one gets without knowing the devices: 1, 2 or 4 groups of consecutive ranks, equal shares of
the batch, stages of as many layers or as many parameters. It may choose its borders (of the two), the size of its
micro-batches and its schedule (textbook 1F1B or ours), and takes the best by the model, which knows the links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.pipeline.scenarios import Case
from benchmarks.pipeline.schedules import one_f_one_b
from lightning_hetero.pipeline.decide.costs import times_of
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, makespan_s
from lightning_hetero.solvers.chain.chain import chain_of
from lightning_hetero.solvers.chain.model import stage_bytes
from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of, place
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.sync import sync_loads_s
from lightning_hetero.types import Cluster, GroupPlan, ModelCost

EVEN_GROUPS = (1, 2, 4)
TEXTBOOK, OURS = "1F1B", "per link"
CHAIN = "even, 1 group"
STOCK = f"{CHAIN}, torch"  # the same borders and micro-batches, run by `torch.distributed.pipelining`


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A plan to be run.

    Attributes:
        name: in the table.
        groups: the pipelines.
        policy: of their schedules: `TEXTBOOK` or `OURS`.
        modelled_s: of a global batch, by the generated schedules, synchronisation included [s].
        sync_s: by rank, how long it takes part in synchronising gradients [s].
        bound_s: no plan is faster [s]; 0: unknown.
        note: how it is made up.
    """

    name: str
    groups: tuple[GroupPlan, ...]
    policy: str
    modelled_s: float
    sync_s: tuple[float, ...]
    bound_s: float = 0.0
    note: str = ""


def policy_of(name: str, group: GroupPlan, times: Any) -> SchedulePolicy:
    """Returns the settings of a group's schedule."""
    return one_f_one_b(times) if name == TEXTBOOK else SchedulePolicy(depths=group.depths, priority="HFB")


def our_entry(case: Case, model: ModelCost) -> Entry:
    """Returns the planner's plan.

    Raises:
        ValueError: nothing fits.
    """
    plan = place(model, case.cluster, case.global_batch, depth=case.depth)
    if not plan.ok:
        raise ValueError(f"{case.title}: {plan.reason}")
    entry = _entry(case, model, plan.groups, OURS, name="ours")
    return replace(entry, bound_s=plan.lower_bound_s)


def even_entries(case: Case, model: ModelCost) -> dict[int, Entry | None]:
    """Returns the best even pipeline by number of groups; None where none fits the memory."""
    found: dict[int, Entry | None] = {}
    for count in EVEN_GROUPS:
        if case.world_size % count or case.global_batch % count:
            continue
        entries = list(_even(case, model, count))
        found[count] = min(entries, key=lambda entry: entry.modelled_s) if entries else None
    return found


def _even(case: Case, model: ModelCost, count: int) -> Iterator[Entry]:
    stages, layers = case.world_size // count, len(model.layers)
    samples = case.global_batch // count
    borders = {"uniform": balanced_cuts([1.0] * layers, stages)}
    borders["by parameters"] = balanced_cuts([layer.param_bytes for layer in model.layers], stages)
    for kind, cuts in borders.items():
        for size in (n for n in range(1, samples + 1) if samples % n == 0):  # whole micro-batches
            groups = [
                GroupPlan(
                    ranks=tuple(range(g * stages, (g + 1) * stages)),
                    cuts=cuts,
                    samples=samples,
                    micro_batches=micro_batches_of(samples, size),
                    depths=(),
                )
                for g in range(count)
            ]
            note = f"{kind}, {samples // size} x {size}"
            name = f"even, {count} group{'s' * (count > 1)}"
            planned = evaluate_plan(model, case.cluster, groups)
            if planned.ok:
                yield _entry(case, model, planned.groups, OURS, name=name, note=f"{note}, {OURS}")
            textbook = [replace(group, depths=_textbook(group)) for group in groups]
            if all(fits(model, case.cluster, group) for group in textbook):
                yield _entry(case, model, textbook, TEXTBOOK, name=name, note=f"{note}, {TEXTBOOK}")


def _textbook(group: GroupPlan) -> tuple[int, ...]:
    stages, micro = len(group.ranks), len(group.micro_batches)
    return tuple(min(micro, stages - i) for i in range(stages))


def chain_entry(case: Case, model: ModelCost, micro_batches: int, policy: str) -> Entry:
    """Returns one uniform chain over all ranks, with so many micro-batches."""
    size, stages, layers = case.global_batch // micro_batches, case.world_size, len(model.layers)
    group = GroupPlan(
        ranks=tuple(range(stages)),
        cuts=balanced_cuts([1.0] * layers, stages),
        samples=case.global_batch,
        micro_batches=micro_batches_of(case.global_batch, size),
        depths=(),
    )
    groups = evaluate_plan(model, case.cluster, [group]).groups
    return _entry(case, model, groups, policy, name="chain", note=f"{micro_batches} x {size}, {policy}")


def balanced_cuts(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Returns the borders of contiguous, non-empty parts with the least largest sum; of equal ones, the earliest.

    Raises:
        ValueError: fewer weights than parts, or no part.

    >>> balanced_cuts([1.0, 1.0, 1.0, 5.0, 1.0], 2)
    (0, 3, 5)
    """
    n = len(weights)
    if not 1 <= parts <= n:
        raise ValueError(f"parts={parts} must be in 1..{n}, the number of weights")
    to = np.concatenate([[0.0], np.cumsum(weights)])
    best, cut = [[math.inf] * (n + 1) for _ in range(parts + 1)], [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, n + 1):
            for start in range(part - 1, end):
                value = max(best[part - 1][start], float(to[end] - to[start]))
                if value < best[part][end]:
                    best[part][end], cut[part][end] = value, start
    ends = [n]
    for part in range(parts, 0, -1):
        ends.append(cut[part][ends[-1]])
    return tuple(reversed(ends))


def fits(model: ModelCost, cluster: Cluster, group: GroupPlan) -> bool:
    """Returns whether every stage holds its state and ``depths`` micro-batches in flight."""
    chain = chain_of(model, cluster, group.ranks, micro_samples=max(group.micro_batches))
    state, activations = stage_bytes(chain, np.array([group.cuts]))
    held = state[0] + np.array(group.depths) * activations[0]
    return bool((held <= chain.mem_bytes).all())


def fits_whole(case: Case, model: ModelCost) -> bool:
    """Returns whether stock DDP fits: the whole model and an equal share of the batch on every device."""
    share = case.global_batch // case.world_size
    layers = len(model.layers)
    return all(
        fits(
            model,
            case.cluster,
            GroupPlan(ranks=(r,), cuts=(0, layers), samples=share, micro_batches=(share,), depths=(1,)),
        )
        for r in range(case.world_size)
    )


def replica_sync_s(case: Case, model: ModelCost) -> float:
    """Returns the ring all-reduce of all gradients among all devices [s]: what stock DDP has to wait for."""
    layers = len(model.layers)
    pipes = [Pipe((rank,), (0, layers)) for rank in range(case.world_size)]
    return float(max(_loads(case, model, pipes)))


def _entry(
    case: Case, model: ModelCost, groups: Sequence[GroupPlan], policy: str, *, name: str, note: str = ""
) -> Entry:
    spans = [_makespan_s(case, model, group, policy) for group in groups]
    loads = _loads(case, model, [Pipe(group.ranks, group.cuts) for group in groups])
    return Entry(
        name=name,
        groups=tuple(groups),
        policy=policy,
        modelled_s=max(spans) + max(loads),
        sync_s=loads,
        note=note or described(groups),
    )


def _makespan_s(case: Case, model: ModelCost, group: GroupPlan, policy: str) -> float:
    times = times_of(model, case.cluster, group)
    return makespan_s(times, policy_of(policy, group, times))


def _loads(case: Case, model: ModelCost, pipes: Sequence[Pipe]) -> tuple[float, ...]:
    if len(pipes) < 2:
        return (0.0,) * case.world_size
    problem = Problem(model, case.cluster, case.global_batch, (1,))
    return tuple(sync_loads_s(problem, pipes).tolist())


def described(groups: Sequence[GroupPlan]) -> str:
    """Returns a plan in a few words: each group's stages as rank:layers, and its micro-batches."""
    words: list[str] = []
    for group in groups:
        stages = [f"{r}:{b - a}" for r, (a, b) in zip(group.ranks, pairwise(group.cuts), strict=True)]
        count, size = len(group.micro_batches), max(group.micro_batches)
        words.append(f"{' '.join(stages)} ({count} x {size})")
    return "; ".join(words)
