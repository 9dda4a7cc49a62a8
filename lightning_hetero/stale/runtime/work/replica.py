"""A rank's copy of the model in flat memory, so that newer parameters come with one copy (layer T).

    published bytes --> memory of each device --> parameters and buffers: views of it

Forward passes change buffers (running statistics); what they were when they came is kept, to be put back and to tell
what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.stale.runtime.memory.layout import FlatLayout
from lightning_hetero.stale.runtime.work.watch import ParameterPlace, ReplicaWatch


class Replica:
    """See the module.

    Args:
        layout: of the flat memory.
        parameters, buffers: as in the layout; a callable returns the module's present buffers, for modules that
            replace theirs.
        held: where modules keep the parameters, see `ReplicaWatch`.

    Attributes:
        watch: what of it is changed.
        parameters: each once, in the layout's order.
        attached: whether parameters and buffers are in flat memory.
        areas: uint8 (bytes of the layout,), the flat memory of each device; none unless attached.

    Raises:
        ValueError: parameters or buffers are not the layout's.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor] | Callable[[], Sequence[Tensor]] = (),
        held: Sequence[ParameterPlace] = (),
    ) -> None:
        self.layout = layout
        self.parameters: list[Parameter] = _once(parameters)
        self._buffers = buffers if callable(buffers) else partial(list, _once(buffers))
        for kind, entries, tensors in (
            ("parameter", layout.parameters, self.parameters),
            ("buffer", layout.buffers, self._buffers()),
        ):
            if len(entries) != len(tensors):
                raise ValueError(f"{len(tensors)} {kind}s, the layout has {len(entries)}")
            for entry, tensor in zip(entries, tensors, strict=True):
                if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
                    raise ValueError(
                        f"{kind} {entry.name!r} is {tuple(tensor.shape)} {tensor.dtype}, in the layout"
                        f" {entry.shape} {entry.dtype}"
                    )
        self.attached = False
        self.areas: list[Tensor] = []
        self._views: list[Tensor] = []
        self._clean: list[Tensor] = []  # of each area: its buffers as they came
        self.watch = ReplicaWatch(layout, self.parameters, self._buffers, held)

    def _tensors(self) -> list[Tensor]:
        return [*self.parameters, *self._buffers()]

    def attach(self) -> None:
        """Moves parameters and buffers into flat memory; idempotent."""
        if self.attached:
            return
        self.attached = True
        tensors = self._tensors()
        devices = dict.fromkeys([tensor.device for tensor in tensors] or [torch.device("cpu")])
        self.areas = [torch.zeros(self.layout.bytes, dtype=torch.uint8, device=device) for device in devices]
        views = {area.device: self.layout.views(area) for area in self.areas}
        self._views = [_of_its_own(views[tensor.device][i]) for i, tensor in enumerate(tensors)]
        self.adopt()
        self._clean = [now.clone() for now in self._buffer_bytes()]
        self.watch.attach(self.areas)

    def adopt(self) -> None:
        """Parameters and buffers that lie elsewhere, e.g. because a module replaced them, come into flat memory."""
        for i, (tensor, view) in enumerate(zip(self._tensors(), self._views, strict=True)):
            if tensor.data_ptr() != view.data_ptr() and tensor.numel():
                view.copy_(tensor.detach())
                tensor.data = view
                self.watch.moved(i)

    def detach(self) -> None:
        """Gives parameters and buffers memory of their own, with their present values; idempotent."""
        if not self.attached:
            return
        self.attached = False
        for tensor, view in zip(self._tensors(), self._views, strict=True):
            if tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone()
        self.areas, self._views, self._clean = [], [], []
        self.watch.detach()

    def read(self, read_parameters: Callable[[Tensor], int]) -> int:
        """Takes over newer parameters and buffers; returns their version.

        Args:
            read_parameters: copies them as bytes and returns their version; `WorkerLink.read_parameters`.
        """
        versions = {read_parameters(area) for area in self.areas}
        while len(versions) > 1:  # a newer one came between two devices
            versions = {read_parameters(area) for area in self.areas}
        for now, clean in self.buffers():
            clean.copy_(now)
        self.watch.came()
        return versions.pop()

    def restore_buffers(self) -> None:
        """Puts the buffers back as they came."""
        for now, clean in self.buffers():
            now.copy_(clean)

    def changed_buffers(self) -> list[int]:
        """Returns which buffers are not as they came, or were pushed."""
        if not (written := self.watch.written_buffers()):
            return []
        first, start = len(self.parameters), self.layout.parameter_bytes
        clean = {each.device: each for each in self._clean}
        changed: list[int] = []
        for i in written:
            view, (begin, end) = self._views[first + i], self.layout.ranges[first + i]
            came = self.layout.buffers[i].view(clean[view.device][begin - start : end - start])
            if not torch.equal(view, came):
                changed.append(i)
        return changed

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the memory of each device's buffers (uint8), with what it was when they came."""
        return list(zip(self._buffer_bytes(), self._clean, strict=True))

    def buffer_devices(self) -> list[torch.device]:
        """Returns where each buffer is."""
        return [view.device for view in self._views[len(self.parameters) :]]

    def _buffer_bytes(self) -> list[Tensor]:
        return [area[self.layout.parameter_bytes :] for area in self.areas]


def _of_its_own(view: Tensor) -> Tensor:
    """Returns the same memory as a storage of its own.

    ``torch.save`` writes whole storages, and refuses one that tensors of several dtypes share.
    """
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(view))


def _once(tensors: Iterable[Any]) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())
