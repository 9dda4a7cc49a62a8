"""A rank's copy of the model in flat memory, so that newer parameters come with one copy (layer T).

    published bytes --> host memory --> memory of each device --> parameters and buffers: views of it

Forward passes change buffers (running statistics); what they were when they came is kept, to be put back and to tell
what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.stale.runtime.memory.layout import FlatLayout
from lightning_hetero.stale.runtime.work.page_locked import synchronize
from lightning_hetero.stale.runtime.work.watch import Place, Watch

__all__ = ["Replica"]


class Replica:
    """See the module.

    Args:
        layout: of the flat memory.
        parameters, buffers: as in the layout; a callable returns the module's present buffers, for modules that
            replace theirs.
        held: where modules keep the parameters, see `Watch`.

    Attributes:
        watch: what of it is changed.
        parameters: each once, in the layout's order.
        attached: whether parameters and buffers are in flat memory.
        host: uint8 (bytes of the layout,), on the CPU: what `read` reads into. Empty unless attached.

    Raises:
        ValueError: parameters or buffers are not the layout's.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor] | Callable[[], Sequence[Tensor]] = (),
        held: Sequence[Place] = (),
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
        self.host = torch.empty(0, dtype=torch.uint8)
        self._areas: dict[torch.device, Tensor] = {}  # flat memory of the other devices
        self._views: list[Tensor] = []
        self._clean: list[Tensor] = []  # buffers as they came
        self.watch = Watch(layout, self.parameters, self._buffers, held)

    def _tensors(self) -> list[Tensor]:
        return [*self.parameters, *self._buffers()]

    @property
    def on_cuda(self) -> bool:
        """Whether a part of the model is on a GPU."""
        return any(tensor.device.type == "cuda" for tensor in self._tensors())

    def attach(self) -> None:
        """Moves parameters and buffers into flat memory; idempotent."""
        if self.attached:
            return
        self.attached = True
        tensors = self._tensors()
        size_bytes = self.layout.bytes
        self.host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=self.on_cuda)
        others = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._areas = {d: torch.zeros(size_bytes, dtype=torch.uint8, device=d) for d in others}
        views = {area.device: self.layout.views(area) for area in (self.host, *self._areas.values())}
        self._views = [_of_its_own(views[tensor.device][i]) for i, tensor in enumerate(tensors)]
        self.adopt()
        self._clean = [view.detach().clone() for view in self._buffer_views()]
        self.watch.attach((self.host, *self._areas.values()))

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
        self.host = torch.empty(0, dtype=torch.uint8)
        self._views, self._clean, self._areas = [], [], {}
        self.watch.detach()

    def read(self, read_parameters: Callable[[Tensor], int]) -> int:
        """Takes over newer parameters and buffers; returns their version.

        Args:
            read_parameters: copies them as bytes and returns their version; `WorkerLink.read_parameters`.
        """
        synchronize(self._areas)  # the last copy out of host memory must have ended
        version = read_parameters(self.host)
        for area in self._areas.values():
            area.copy_(self.host, non_blocking=True)
        for buffer, clean in self.buffers():
            clean.copy_(buffer)
        self.watch.came()
        return version

    def restore_buffers(self) -> None:
        """Puts the buffers back as they came."""
        for buffer, clean in self.buffers():
            buffer.copy_(clean)

    def changed_buffers(self) -> list[int]:
        """Returns which buffers are not as they came, or were pushed."""
        pairs = list(self.buffers())
        return [i for i in self.watch.written_buffers() if not torch.equal(*pairs[i])]

    def buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each buffer with what it was when it came."""
        return zip(self._buffer_views(), self._clean, strict=True)

    def _buffer_views(self) -> list[Tensor]:
        return self._views[len(self.parameters) :]


def _of_its_own(view: Tensor) -> Tensor:
    """Returns the same memory as a storage of its own.

    ``torch.save`` writes whole storages, and refuses one that tensors of several dtypes share.
    """
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(view))


def _once(tensors: Iterable[Any]) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())
