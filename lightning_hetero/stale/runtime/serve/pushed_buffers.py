"""What the contributions to one update say of the buffers (layer T).

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

import torch
from torch import Tensor

from lightning_hetero.stale.runtime.layout import VALUE, FlatLayout, pool_dtype


@dataclass(slots=True)
class PushedBuffers:
    """See the module.

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
