"""What is to be planned, and what is remembered of it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from lightning_hetero.solvers.chain.split import split
from lightning_hetero.solvers.placement.arrays import Pipe, ProblemArrays
from lightning_hetero.solvers.placement.pipe_cost import PipeCost

__all__ = ["Pipe", "Problem"]


class Problem(ProblemArrays):
    """What is to be planned, and the splits and costs that were asked for; arguments as in `ProblemArrays`.

    Pipelines whose devices and links are equal position by position share both.
    """

    @cached_property
    def _alike(self) -> dict[tuple[int, ...], bytes]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[bytes, tuple[int, ...]], PipeCost]:
        return {}

    @cached_property
    def _splits(self) -> dict[tuple[bytes, int, int], tuple[int, ...]]:
        return {}

    def _key(self, ranks: tuple[int, ...]) -> bytes:
        if ranks not in self._alike:
            r, after = np.array(ranks), np.array([*ranks[1:], ranks[0]])
            rows = [self.speeds[r], self.caps[r]]
            if len(ranks) > 1:
                rows += [x[a, b] for x in (self.latency_s, self.per_byte_s) for a, b in ((r, after), (after, r))]
            self._alike[ranks] = np.array(rows).tobytes()
        return self._alike[ranks]

    def split(self, ranks: tuple[int, ...], size: int, samples: int) -> Pipe | None:
        """Returns the best pipeline of ``ranks`` in this order for ``samples`` in micro-batches of ``size``."""
        size = min(size, samples)
        micro_batches = -(-samples // size)
        key = (self._key(ranks), size, micro_batches)
        if key not in self._splits:
            self._splits[key] = split(self.chain(ranks, size, micro_batches)).cuts
        return Pipe(ranks, self._splits[key]) if self._splits[key] else None

    def cost(self, pipe: Pipe) -> PipeCost:
        """Returns the time of ``pipe`` by its samples; equal pipelines share it."""
        key = (self._key(pipe.ranks), pipe.cuts)
        if key not in self._known:
            self._known[key] = PipeCost(self, pipe)
        return self._known[key]
