"""What is to be planned, and what is remembered of it."""

from __future__ import annotations

from functools import cached_property

from lightning_hetero.solvers.chain.split import split
from lightning_hetero.solvers.placement.arrays import Pipe, ProblemArrays
from lightning_hetero.solvers.placement.pipe_cost import PipeCost

__all__ = ["Pipe", "Problem"]


class Problem(ProblemArrays):
    """What is to be planned, and the splits and costs that were asked for; arguments as in `ProblemArrays`."""

    @cached_property
    def _costs(self) -> dict[tuple[bytes, tuple[int, ...]], PipeCost]:
        return {}

    @cached_property
    def _splits(self) -> dict[tuple[bytes, int, int], tuple[int, ...]]:
        return {}

    def split(self, ranks: tuple[int, ...], size: int, samples: int) -> Pipe | None:
        """Returns the best pipeline of ``ranks`` in this order for ``samples`` in micro-batches of ``size``."""
        size = min(size, samples)
        micro_batches = -(-samples // size)
        key = (self.alike(ranks), size, micro_batches)
        cuts = self._splits.get(key)
        if cuts is None:
            plan = split(self.chain(ranks, size, micro_batches))
            cuts = self._splits[key] = plan.cuts if plan.ok else ()
        return Pipe(ranks, cuts) if cuts else None

    def cost(self, pipe: Pipe) -> PipeCost:
        """Returns the time of ``pipe`` by its samples; equal pipelines share it."""
        key = (self.alike(pipe.ranks), pipe.cuts)
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = PipeCost(self, pipe)
        return cost
