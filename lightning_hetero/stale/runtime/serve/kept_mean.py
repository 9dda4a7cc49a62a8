"""The mean of an update, kept for what comes late to it (T); the rule: `lightning_hetero.stale.decide.completion`.

    mean m, weight W        of the contributions that were up to date
    late (g, w)             W += w;  c = w / W (g - m);  m += c;  the next update moves by c

A contribution without a gradient for a parameter counts as one of zeros there, as it does in a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hetero.stale.decide.completion import completed
from lightning_hetero.stale.runtime.memory.codecs import pool_dtype
from lightning_hetero.stale.runtime.memory.layout import FlatLayout

__all__ = ["Changes", "KeptMean"]

Changes = list[Tensor | None]
"""Per parameter, by how much late contributions change the means that they complete; None: not at all."""


@dataclass(slots=True)
class KeptMean:
    """See the module. Different parameters may be worked on from different threads.

    Attributes:
        layout: what gradients look like.
        weight: sum of the weights in it.
        values: per parameter; None: nobody had a gradient for it.
    """

    layout: FlatLayout
    weight: float
    values: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * len(self.layout.parameters)

    def keep(self, index: int, mean: Tensor) -> None:
        """Copies a parameter's mean."""
        self.values[index] = mean.clone()

    def count(self, weight: float) -> float:
        """Counts a late contribution; returns the part of the difference that the mean moves by."""
        self.weight, part = completed(self.weight, weight)
        return part

    def complete(self, index: int, slot: Tensor | None, part: float, changes: Changes) -> None:
        """Moves a parameter's mean towards a late gradient, and adds the move to ``changes``.

        Args:
            slot: where the gradient is; None: the contribution has none for this parameter.
            part: from `count`.
        """
        entry, mean = self.layout.parameters[index], self.values[index]
        if slot is None and mean is None:
            return
        change = entry.empty(pool_dtype(entry.dtype))
        if slot is None:
            change.zero_()
        else:
            self.layout.codec.put(change, self.layout.gradient_of(slot, index), entry, 1.0)
        if mean is None:
            mean = self.values[index] = torch.zeros_like(change)
        change.sub_(mean).mul_(part)
        mean.add_(change)
        total = changes[index]
        if total is None:
            changes[index] = change
        else:
            total.add_(change)
