"""The mean of an update, kept for what comes late to it (T); the rule: `lightning_hetero.stale.decide.completion`.

    mean m, weight W        of the contributions that were up to date
    late (g, w)             W += w;  c = w / W (g - m);  m += c;  the next update moves by c

A contribution without a gradient for a parameter counts as one of zeros there, as it does in a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero.stale.decide.completion import completed
from lightning_hetero.stale.runtime.layout import pool_dtype


@dataclass(slots=True)
class KeptMean:
    """See the module. Different parameters may be worked on from different threads.

    Attributes:
        weight: sum of the weights in it.
        values: per parameter; None: nobody had a gradient for it.
    """

    weight: float
    values: list[Tensor | None]

    def count(self, weight: float) -> float:
        """Counts a late contribution; returns the part of the difference that the mean moves by."""
        self.weight, part = completed(self.weight, weight)
        return part

    def complete(self, index: int, gradient: Tensor | None, part: float) -> Tensor | None:
        """Moves a parameter's mean towards a late gradient; returns the move, None if there is nothing to move.

        Args:
            gradient: None: the contribution has none for this parameter.
            part: from `count`.
        """
        mean = self.values[index]
        if gradient is None and mean is None:
            return None
        if gradient is None:
            assert mean is not None
            move = mean * -part
        else:
            move = torch.empty_like(gradient, dtype=pool_dtype(gradient.dtype)).copy_(gradient)
            if mean is not None:
                move.sub_(mean)
            move.mul_(part)
        self.values[index] = move.clone() if mean is None else mean.add_(move)
        return move
