"""What pushes say of the buffers: a worker finds it, the server makes it part of an update (layer T).

    running_mean, running_var    change since the pull   move by the mean change, weighted by samples
    num_batches_tracked          change since the pull   moves by the greatest one
    any other single number      change since the pull   moves by that of one contribution (from infinity: the value)
    any other buffer             value                   is that of one contribution

For BatchNorm's running mean that is exactly the statistics of the global batch; its running variance becomes the mean
of the workers' variances. (DDP keeps those of rank 0.)

The one contribution is that of the newest parameters; of several it is the lowest rank's, its first one.
DDP's is rank 0's. If even the newest is late, and what it has for a value was set meanwhile, nothing of it counts: a
queue and its pointer stay together. A change of single numbers alone, such as a counter, counts however late it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.stale.runtime.layout import CHANGE, VALUE, FlatLayout, pool_dtype

_WORD = torch.int64


class _Numbers(NamedTuple):
    """Buffers of one dtype whose change is sent.

    Attributes:
        where: their numbers, among all of this dtype in the memory of the buffers.
        counters: which buffers they are, one number each, if their value is sent in place of a change from an infinity.
    """

    dtype: torch.dtype
    where: Tensor
    counters: Tensor | None


class BufferChanges:
    """What a worker's buffers have become since they came; few calls, none of which waits for their device.

    Args:
        layout: of the memory; its buffers lie one after another in the area, as in the slot.
        device: of the memory.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        entries = layout.buffers
        spans = [(a - layout.parameter_bytes, b - layout.parameter_bytes) for a, b in layout.ranges[-len(entries) :]]
        size = _WORD.itemsize
        self._starts = torch.tensor([a // size for a, _ in spans], device=device)
        self._stops = torch.tensor([-(-b // size) for _, b in spans], device=device)
        told: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, entry in enumerate(entries):
            if entry.statistic or entry.counts:
                infinite = not entry.statistic and (entry.dtype.is_floating_point or entry.dtype.is_complex)
                told.setdefault((entry.dtype, infinite), []).append(i)
        changing = {i for chosen in told.values() for i in chosen}
        kinds = [CHANGE if i in changing else VALUE for i in range(len(entries))]
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
            out: for what is sent.
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


@dataclass(slots=True)
class PushedBuffers:
    """What the contributions to one update say, at the server.

    Attributes:
        layout: what buffers look like.
    """

    layout: FlatLayout
    _moved: dict[int, tuple[Tensor, int]] = field(default_factory=dict[int, tuple[Tensor, int]])
    _set: dict[int, tuple[int, Tensor]] = field(default_factory=dict[int, tuple[int, Tensor]])
    _of: tuple[int, int] | None = None  # minus the version, and the rank, of the contribution in `_set`

    def add(self, slot: Tensor, *, samples: int, base: int, rank: int) -> None:
        """Adds what a push says.

        Args:
            samples: its samples.
            base: version of the parameters that it was computed with.
            rank: of its worker.
        """
        present = {i: flag for i, flag in enumerate(self.layout.flags_of(slot)[1].tolist()) if flag}
        own = [i for i in present if not self.layout.buffers[i].statistic]
        if own and (self._of is None or (-base, rank) < self._of):
            self._of = (-base, rank)
            self._set = {i: (present[i], self.layout.buffer_of(slot, i).clone()) for i in own}
        for i in present:
            if self.layout.buffers[i].statistic:
                self._move(i, self.layout.buffer_of(slot, i), samples)

    def _move(self, i: int, change: Tensor, samples: int) -> None:
        total, before = self._moved.get(i, (None, 0))
        if not change.dtype.is_floating_point:
            total = change.clone() if total is None else torch.maximum(total, change)
        else:
            wide = change.to(pool_dtype(change.dtype)) * samples
            total = wide if total is None else total.add_(wide)
        self._moved[i] = total, before + samples

    def apply(self, buffers: Sequence[Tensor], worth: float, changed: dict[int, int], version: int) -> None:
        """Changes the server's buffers, and forgets all.

        Args:
            buffers: the server's.
            worth: what the update is worth, in batches.
            changed: version from which on each value is set; is brought up to date.
            version: the one that begins with this.
        """
        for i, (total, samples) in self._moved.items():
            if not total.dtype.is_floating_point:
                buffers[i].add_(total)
            elif samples:
                buffers[i].add_((total * (worth / samples)).to(buffers[i].dtype))
        values = [i for i, (flag, _) in self._set.items() if flag == VALUE]
        if self._of is not None and not any(changed.get(i, 0) > -self._of[0] for i in values):
            for i, (flag, given) in self._set.items():
                buffers[i].copy_(given if flag == VALUE else buffers[i] + given)
            changed.update(dict.fromkeys(values, version))
        self._moved.clear()
        self._set.clear()
        self._of = None
