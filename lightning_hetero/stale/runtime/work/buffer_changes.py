"""What a push carries of the buffers: how they have changed, or what they are; all with few calls (layer T).

Nothing here waits for a device: what has changed is found where the buffers lie. They are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.stale.runtime.layout import CHANGE, VALUE, FlatLayout

_WORD = torch.int64


class _Numbers(NamedTuple):
    """Buffers of one dtype whose change is told.

    Attributes:
        where: their numbers, among all of this dtype in the memory of the buffers.
        counters: which buffers they are, one number each, if their value is told in place of a change from an infinity.
    """

    dtype: torch.dtype
    where: Tensor
    counters: Tensor | None


class BufferChanges:
    """See the module.

    Args:
        layout: of the memory; its buffers lie behind one another in the area, and in the slot likewise.
        own: which of them are there.
        device: of the memory.

    Attributes:
        runs: first and last of its buffers that follow one another.
    """

    def __init__(self, layout: FlatLayout, own: Sequence[bool], device: torch.device) -> None:
        entries = layout.buffers
        spans = [(a - layout.parameter_bytes, b - layout.parameter_bytes) for a, b in layout.ranges[-len(entries) :]]
        size = _WORD.itemsize
        self._starts = torch.tensor([a // size for a, _ in spans], device=device)
        self._stops = torch.tensor([-(-b // size) for _, b in spans], device=device)
        told: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, entry in enumerate(entries):
            if own[i] and (entry.statistic or entry.counts):
                infinite = not entry.statistic and (entry.dtype.is_floating_point or entry.dtype.is_complex)
                told.setdefault((entry.dtype, infinite), []).append(i)
        changing = {i for chosen in told.values() for i in chosen}
        kinds = [(CHANGE if i in changing else VALUE) if own[i] else 0 for i in range(len(entries))]
        indices = [[i for i, _ in run] for mine, run in groupby(enumerate(own), lambda each: each[1]) if mine]
        self.runs = [(run[0], run[-1]) for run in indices]
        self._kinds = torch.tensor(kinds, dtype=torch.uint8, device=device)
        self._told = []
        for (dtype, infinite), chosen in told.items():
            of_each = [torch.arange(spans[i][0] // dtype.itemsize, spans[i][1] // dtype.itemsize) for i in chosen]
            counters = torch.tensor(chosen, device=device) if infinite else None
            self._told.append(_Numbers(dtype, torch.cat(of_each).to(device), counters))

    def write(self, now: Tensor, was: Tensor, out: Tensor) -> Tensor:
        """Writes the buffers, or how they changed since they came or were pushed; returns which: uint8, 0 for neither.

        Args:
            now: uint8, the memory of the buffers.
            was: what they were; is what they are afterwards.
            out: for what is told.
        """
        differs = (now.view(_WORD) != was.view(_WORD)).cumsum(0)
        counted = torch.nn.functional.pad(differs, (1, 0))
        changed = counted.index_select(0, self._stops) != counted.index_select(0, self._starts)
        kinds = self._kinds
        out.copy_(now)
        for dtype, where, counters in self._told:
            new, old = now.view(dtype).index_select(0, where), was.view(dtype).index_select(0, where)
            change = (new - old).masked_fill_(new == old, 0)  # an infinity that stays is no change
            if counters is not None:
                known = old.isfinite()
                change = torch.where(known, change, new)
                kinds = kinds.index_copy(0, counters, torch.where(known, CHANGE, VALUE).to(torch.uint8))
            out.view(dtype).index_copy_(0, where, change)
        was.copy_(now)
        return kinds * changed
