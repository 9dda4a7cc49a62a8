"""What has arrived for one update, and the gradients it is added to (layer T).

    contribution c: gradients g_c (means over its samples), weight w_c, damping s_c

    pool      sum_c s_c w_c g_c  =  u * sum_c (s_c w_c / u) g_c        u: the first contribution's s_c w_c
    gradient  G  <-  G + pool / sum_c w_c

Summing in units of the first contribution makes an update of a single one bitwise its gradient, and one of equal
contributions their sum divided by their number, as under DDP.

Memory is what limits all this, so contributions are not added one by one: they wait in their slots, as long as these
are unchanged, and those that came together are added in one pass, block by block, each block in the cache until all
are in it and it is divided. Every number meets the same operations in the same order as if they were not.

Late contributions that complete the mean of an earlier update (`KeptMean`) are in neither sum; their moves are added at
the end.

What becomes of the buffers is in `PushedBuffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.stale.decide.completion import completed
from lightning_hetero.stale.runtime.buffers import PushedBuffers
from lightning_hetero.stale.runtime.layout import FlatLayout, pool_dtype

BLOCK = 1 << 17
"""Numbers that are summed at a time: 512 KiB of float32 stay in a core's cache while every slot's pass by."""


def runs(layout: FlatLayout, indices: Sequence[int]) -> list[list[int]]:
    """Cuts consecutive parameters into runs of at most `BLOCK` numbers; one larger than that is a separate run."""
    cut: list[list[int]] = []
    filled = 0
    for i in indices:
        numel = layout.parameters[i].numel
        if not cut or filled + numel > BLOCK:
            cut.append([])
            filled = 0
        cut[-1].append(i)
        filled += numel
    return cut


class Spares:
    """Memory of gradients that are over, for the next ones: fresh pages cost as much as the copy into them."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._free: list[list[Tensor]] = [[] for _ in layout.parameters]

    def take(self, index: int) -> Tensor:
        """Returns memory for the pool of a parameter; its content is void."""
        entry = self._layout.parameters[index]
        return self._free[index].pop() if self._free[index] else entry.empty(pool_dtype(entry.dtype))

    def give(self, index: int, tensor: Tensor) -> None:
        """Takes memory back that `take` returned."""
        entry = self._layout.parameters[index]
        if (
            tensor.dtype == pool_dtype(entry.dtype)
            and tensor.stride() == entry.stride
            and len(self._free[index]) < 2
        ):
            self._free[index].append(tensor)


class _Waiting(NamedTuple):
    """A contribution that is still in its slot; flags and gradients of all parameters."""

    present: Sequence[int]
    values: Sequence[Tensor]
    factor: float


@dataclass(slots=True)
class GradientSum:
    """Contributions to one update.

    Attributes:
        layout, spares: what gradients look like, and where their memory comes from.
        sums: per parameter, in units of the first contribution; None if nobody had a gradient for it.
        moves: per parameter, of the means of earlier updates by late contributions; in units of gradients.
        weight: sum of the contributions' weights.
        samples: sum of their samples.
        steps, zeroes: optimizers that step with this update, and whose gradients were zeroed before it.
        current: a push of the present global step has set these.
        overflow: a contribution overflowed; the update is skipped.
        numbers: hyper-parameters of the newest push of the present global step.
        ranks: who is in it.
        buffers: what the contributions say of the buffers.
    """

    layout: FlatLayout
    spares: Spares
    sums: list[Tensor | None] = field(init=False)
    moves: list[Tensor | None] = field(init=False)
    weight: float = 0.0
    samples: int = 0
    steps: int = 0
    zeroes: int = 0
    current: bool = False
    overflow: bool = False
    numbers: list[float] | None = None
    ranks: set[int] = field(default_factory=set[int])
    buffers: PushedBuffers = field(init=False)
    _unit: float = 0.0
    _waiting: list[_Waiting] = field(default_factory=list[_Waiting])

    def __post_init__(self) -> None:
        self.sums = [None] * len(self.layout.parameters)
        self.moves = [None] * len(self.layout.parameters)
        self.buffers = PushedBuffers(self.layout)

    def count(self, weight: float, samples: int, scale: float) -> float:
        """Counts a contribution; returns the factor of its gradients in units of the first."""
        self.weight += weight
        self.samples += samples
        factor = scale * weight
        if self._unit == 0.0:
            self._unit = factor
        return factor / self._unit if self._unit != 0.0 else 0.0

    def wait(self, present: Sequence[int], values: Sequence[Tensor], factor: float) -> None:
        """Notes a contribution; `sum_up` adds it.

        Args:
            present: of each parameter, 0 if there is no gradient.
            values: each gradient, in the entry's strides; to stay as they are until they are added.
            factor: from `count`.
        """
        self._waiting.append(_Waiting(present, values, factor))

    @property
    def waits(self) -> int:
        """How many contributions are still in their slots."""
        return len(self._waiting)

    def sum_up(self, run: Sequence[int], factor: float = 1.0) -> None:
        """Adds to some parameters' sums what waits for them, then multiplies them by ``factor``.

        Different parameters may be summed from different threads; after all of them comes `summed_up`.

        Args:
            run: any parameters; in the cache together if they are one of `runs`, or a part of one.
        """
        if len(run) == 1 and self.layout.parameters[run[0]].numel > BLOCK:
            self._sum_blocks(run[0], factor)
            return
        for contribution in self._waiting:
            self._add_values(contribution, [i for i in run if contribution.present[i]])
        if factor != 1.0 and (totals := [total for i in run if (total := self.sums[i]) is not None]):
            torch._foreach_mul_(totals, factor)

    def summed_up(self) -> None:
        """Says that nothing waits any more."""
        self._waiting.clear()

    def _sum_blocks(self, index: int, factor: float) -> None:
        flat, total = self.layout.parameters[index].flat, self.sums[index]
        given = [c for c in self._waiting if c.present[index]]
        # One pass is one pass, in blocks or not.
        size = BLOCK if len(given) + (factor != 1.0) > 1 else self.layout.parameters[index].numel
        parts = [(flat(c.values[index]).split(size), c.factor) for c in given]
        fresh = total is None
        if total is None:
            if not parts:
                return
            self.sums[index] = total = self.spares.take(index)
        for k, block in enumerate(flat(total).split(size)):
            for j, (values, of_it) in enumerate(parts):
                if j > 0 or not fresh:
                    block.add_(values[k], alpha=of_it)
                    continue
                block.copy_(values[k])
                if of_it != 1.0:
                    block.mul_(of_it)
            if factor != 1.0:
                block.mul_(factor)

    def _add_values(self, contribution: _Waiting, indices: Sequence[int]) -> None:
        values, factor = contribution.values, contribution.factor
        old = [(total, values[i]) for i in indices if (total := self.sums[i]) is not None]
        new = [i for i in indices if self.sums[i] is None]
        if old:
            torch._foreach_add_([total for total, _ in old], [v for _, v in old], alpha=factor)
        if new:
            fresh = [self.spares.take(i) for i in new]
            torch._foreach_copy_(fresh, [values[i] for i in new])
            if factor != 1.0:
                torch._foreach_mul_(fresh, factor)
            for i, total in zip(new, fresh, strict=True):
                self.sums[i] = total

    def factor(self, divide_by: float | None) -> float:
        """Returns what `sum_up` turns a sum of the pool into its part of the gradient with."""
        divisor = self.weight if divide_by is None else divide_by
        return self._unit / divisor if divisor != 0.0 else 0.0

    def move(self, index: int, move: Tensor | None) -> None:
        """Adds the move of a parameter's mean of an earlier update."""
        if move is not None:
            total = self.moves[index]
            self.moves[index] = move if total is None else total.add_(move)

    def give_to(self, index: int, parameter: Tensor) -> None:
        """Adds a parameter's sum and moves to its ``.grad``; nothing if nobody had a gradient for it."""
        total, self.sums[index] = self.sums[index], None
        if (move := self.moves[index]) is not None:
            total = move if total is None else total.add_(move)
        if total is None:
            return
        if parameter.grad is not None:
            parameter.grad.add_(total.to(parameter.dtype))
            self.spares.give(index, total)
        elif total.dtype == parameter.dtype:
            parameter.grad = total
        else:
            parameter.grad = total.to(parameter.dtype)
            self.spares.give(index, total)


@dataclass(slots=True)
class KeptMean:
    """The mean of an update, kept for what comes late to it; the rule: `lightning_hetero.stale.decide.completion`.

        mean m, weight W        of the contributions that were up to date
        late (g, w)             W += w;  c = w / W (g - m);  m += c;  the next update moves by c

    A contribution without a gradient for a parameter counts as one of zeros there, as it does in a sum. Different
    parameters may be worked on from different threads.

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
            gradient: None: the contribution has no gradient for this parameter.
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
