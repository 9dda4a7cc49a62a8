"""Plans as the search sees them, pipes over layers of which tied ones are joined, and back (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.placement.neighbours import Pipes
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.place import group_of, sizes_to_try
from lightning_hetero.solvers.placement.search import Judged
from lightning_hetero.solvers.plans import evened
from lightning_hetero.solvers.tied_layers import Span, join_layers, split_again
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan


class Forms:
    """Translates for one run.

    Args:
        model, cluster: what the plan was made from.
        plan: the first one; its samples are the global batch.
        spans, micro_batch_size, max_groups, depth: as in `best_plan`.

    Attributes:
        model: costs, with tied layers joined.
        bounds: where joined layers begin in the model's own, plus the end.
        samples: global batch.
        most_groups: of a plan.
    """

    def __init__(
        self, model: ModelCost, cluster: Cluster, plan: PipelinePlan, *, spans: Sequence[Span],
        micro_batch_size: int | None, max_groups: int | None, depth: Literal["auto"] | DepthRule,
    ) -> None:  # fmt: skip
        self._layers = model
        self.model, self.bounds = join_layers(model, spans)
        self.samples = sum(group.samples for group in plan.groups)
        self.most_groups = min(len(cluster.devices) if max_groups is None else max_groups, self.samples)
        self._micro_sizes = sizes_to_try(None if micro_batch_size is None else [micro_batch_size], self.samples)
        capped = any(math.isfinite(device.mem_bytes) for device in cluster.devices)
        self._depth: DepthRule = ("low_memory" if capped else "per_link") if depth == "auto" else depth

    def problem(self, model: ModelCost, cluster: Cluster, plan: PipelinePlan) -> Problem:
        """Returns what is to be planned from costs by now; sizes of micro-batches are near those of ``plan``.

        All sizes would take four times as long.
        """
        used = [max(group.micro_batches) for group in plan.groups]
        near = tuple(n for n in self._micro_sizes if min(used) <= 2 * n and n <= 2 * max(used))
        sizes = near or self._micro_sizes
        return Problem(model, cluster, self.samples, sizes, depth=self._depth)

    def pipes_of(self, plan: PipelinePlan) -> Pipes:
        """Returns the plan's structure.

        Raises:
            ValueError: it divides layers that are tied.
        """
        places = {bound: i for i, bound in enumerate(self.bounds)}
        for group in plan.groups:
            if torn := [cut for cut in group.cuts if cut not in places]:
                raise ValueError(f"cuts={group.cuts} of the plan divide tied layers at {torn}")
        return tuple(Pipe(group.ranks, tuple(places[cut] for cut in group.cuts)) for group in plan.groups)

    def plan_of(self, judged: Judged, problem: Problem) -> PipelinePlan:
        """Returns a structure with its shares as a plan."""
        groups = [group_of(problem, pipe, n) for pipe, n in zip(judged.pipes, judged.shares, strict=True)]
        groups = [replace(group, micro_batches=evened(group.micro_batches)) for group in groups]
        plan = evaluate_plan(problem.model, problem.cluster, groups, depth=self._depth)
        assert plan.ok, plan.reason
        return split_again(plan, self.bounds)

    def reason_against(self, plan: PipelinePlan, cluster: Cluster) -> str:
        """Returns why a plan does not fit."""
        return evaluate_plan(self._layers, cluster, plan.groups, depth=self._depth).reason


def shares_of(plan: PipelinePlan) -> tuple[int, ...]:
    """Returns the samples by group."""
    return tuple(group.samples for group in plan.groups)
