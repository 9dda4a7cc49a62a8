"""The server's weights on a rank: pulled into flat memory, and what the user's code has changed of them (layer T).

    published bytes --> memory of each device --> parameters and buffers: views of it, so a pull is one copy

Forward passes change buffers (running statistics); what they were when they came is kept, to be put back and to find
out what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.work.watch import ParameterPlace, ReplicaWatch
from lightning_hetero.transport.link import WorkerLink


class Phase(Enum):
    """What the user's code is doing; the values say where a change was made."""

    BATCH = "in training_step or in a hook between the batch's start and the optimizer's step"
    BETWEEN = "behind an optimizer's step, e.g. in on_train_batch_end or in optimizer_step"
    MET = "where ranks met within an epoch, e.g. in a hook of a validation"  # and nobody trains


class PulledWeights:
    """See the module; parameters and buffers are in flat memory from here to `detach`.

    Args:
        link: where published parameters are read.
        layout: of the flat memory.
        parameters: each once, in the layout's order.
        buffers: returns the module's present buffers, in the layout's order; modules may replace theirs.
        held: where modules keep the parameters, see `ReplicaWatch`.

    Attributes:
        parameters: as given.
        area: uint8 (bytes of the layout,), the flat memory.
        buffer_bytes, clean_bytes: the part of it that has the buffers, and what that was when they came.
        version: of the parameters pulled last; -1 before.
        kept: the user's code has changed some where ranks met, and they stay.

    Raises:
        ValueError: parameters and buffers are on several devices.
    """

    def __init__(
        self, link: WorkerLink, layout: FlatLayout, parameters: Sequence[Parameter],
        buffers: Callable[[], Sequence[Tensor]], held: Sequence[ParameterPlace] = (),
    ) -> None:  # fmt: skip
        self._link, self._layout = link, layout
        self.parameters, self._buffers = list(parameters), buffers
        self.version = -1
        self.kept = False
        self._substeps_used = False
        self._buffers_pushed = False  # since the last pull
        self._phase = Phase.MET
        tensors = self._tensors()
        device, *others = dict.fromkeys([tensor.device for tensor in tensors] or [torch.device("cpu")])
        if others:
            raise ValueError(
                f"the module's parameters and buffers are on {device} and {others[0]}: hetero_stale trains, as DDP"
                " does, what is on one device. Move them there, e.g. in setup(), or keep a buffer as a plain attribute"
            )
        self.area = torch.zeros(layout.bytes, dtype=torch.uint8, device=device)
        self._views = [_of_its_own(view) for view in layout.views(self.area)]
        for tensor, view in zip(tensors, self._views, strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
        self.buffer_bytes = self.area[layout.parameter_bytes :]
        self.clean_bytes = self.buffer_bytes.clone()
        self._watch = ReplicaWatch(layout, self.area, self.parameters, buffers, held)

    def detach(self) -> None:
        """Gives parameters and buffers their own memory, with their present values; idempotent."""
        for tensor, view in zip(self._tensors(), self._views, strict=False):
            if tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone()
        self.area = self.buffer_bytes = self.clean_bytes = self.area[:0]
        self._views = []
        self._watch.detach()
        self.version = -1

    def _tensors(self) -> list[Tensor]:
        return [*self.parameters, *self._buffers()]

    # ---- pulls ------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether parameters and buffers are for certain those of `version`.

        Sub-steps change parameters under the same version; after a push that was not applied, buffers are the rank's.
        """
        return self.version >= 0 and not self._substeps_used and not self._buffers_pushed

    @property
    def is_newest(self) -> bool:
        """Whether the newest parameters and buffers are here for certain."""
        return self.whole and self._link.newest_version() <= self.version

    def pull(self) -> int:
        """See `Worker.pull`."""
        if self.kept:
            return self.version
        self._adopt()
        if self.is_newest:
            self.buffer_bytes.copy_(self.clean_bytes)
        else:
            self.read(self._link.read_parameters)
        self._watch.settle_buffers()
        return self.version

    def read(self, read_parameters: Callable[[Tensor], int]) -> None:
        """Takes over other parameters and buffers.

        Args:
            read_parameters: copies them as bytes and returns their version; `WorkerLink.read_parameters`.
        """
        self.version = read_parameters(self.area)
        self.clean_bytes.copy_(self.buffer_bytes)
        self._watch.came()
        self._buffers_pushed = False

    def _adopt(self) -> None:
        """Parameters and buffers that lie elsewhere, e.g. because a module replaced them, come into flat memory."""
        for i, (tensor, view) in enumerate(zip(self._tensors(), self._views, strict=True)):
            if tensor.data_ptr() != view.data_ptr() and tensor.numel():
                view.copy_(tensor.detach())
                tensor.data = view
                self._watch.moved(i)

    def pushed(self, *, substep: bool) -> None:
        """Gradients and buffers were pushed; a sub-step changes parameters under the same version."""
        self._buffers_pushed = bool(self._layout.buffers)
        self._substeps_used = self._substeps_used or substep

    def go_on(self, phase: Phase) -> None:
        """The server has answered: it overwrites what was kept."""
        self._phase, self.kept = phase, False

    def answered(self, phase: Phase) -> None:
        """The server has answered a claim: buffers count as unchanged from here on."""
        self.go_on(phase)
        self._watch.settle_buffers()

    # ---- what else changes them -------------------------------------------------------------------------------

    def changes(self) -> tuple[list[str], list[str]]:
        """Returns the names of parameters and buffers that the user's code has changed where the ranks met.

        They stay as they are until `discard`, or for good if the worker leaves.
        """
        self._adopt()
        parameters, buffers = self._watch.changed(self._published), self._changed_buffers()
        self.kept = bool(parameters or buffers)
        return [self._layout.parameters[i].name for i in parameters], [self._layout.buffers[i].name for i in buffers]

    def discard(self) -> None:
        """Has the next pull bring everything."""
        self.kept, self.version = False, -1

    def _changed_buffers(self) -> list[int]:
        """Returns which buffers are not as they came, or were pushed."""
        first, start = len(self.parameters), self._layout.parameter_bytes
        changed: list[int] = []
        for i in self._watch.written_buffers():
            view, (begin, end) = self._views[first + i], self._layout.ranges[first + i]
            came = self._layout.buffers[i].view(self.clean_bytes[begin - start : end - start])
            if not torch.equal(view, came):
                changed.append(i)
        return changed

    def _published(self) -> Tensor | None:
        """Returns the area of `version`, or None if that is not to be had any more."""
        if self._phase is not Phase.MET and not self.is_newest:
            return None
        area = torch.empty(self._layout.bytes, dtype=torch.uint8)
        return area if self._link.read_parameters(area) == self.version else None

    def look(self, *, wait: bool = False) -> None:
        """Refuses what the user's code has changed and the next pull would overwrite.

        Args:
            wait: for the device; else what it finds is noted, see `noted`.
        """
        self._adopt()
        if self.version < 0:
            return
        phase = self._phase
        if not wait:
            self._watch.note(phase)
        names = [self._layout.parameters[i].name for i in self._watch.changed(self._published, wait=wait)]
        if phase is not Phase.BATCH:
            entries = [self._layout.buffers[i] for i in self._changed_buffers()]
            names += [entry.name for entry in entries if phase is Phase.MET or not entry.statistic]
        if wait:
            self.refuse_noted()
        self._refuse(names, phase)

    def noted(self) -> list[Tensor]:
        """Returns what shows whether a device has noted anything (uint8), which the next push reads."""
        return self._watch.noted()

    def refuse_noted(self) -> None:
        """Refuses what a device has noted."""
        found = self._watch.take_noted()
        for phase in (Phase.BETWEEN, Phase.MET, Phase.BATCH):  # where it was seen first
            self._refuse([self._layout.parameters[i].name for i in sorted(found.get(phase, ()))], phase)

    def _refuse(self, names: Sequence[str], phase: Phase) -> None:
        if names:
            self.stop()
            _refuse(names, self._link.rank, phase)

    def look_where_all_meet(self) -> None:
        """Keeps what was changed since they met; what was changed before is refused."""
        if self._phase is not Phase.MET:
            self.look(wait=True)
        elif self.version >= 0:
            self._adopt()
            self.kept = self.kept or self._watch.touched

    def stop(self) -> None:
        """The batch is left by an error: what is changed from here on stays, e.g. weights that a finder restores."""
        self._phase = Phase.MET


def _of_its_own(view: Tensor) -> Tensor:
    """Returns the same memory as a separate storage.

    ``torch.save`` writes whole storages, and refuses one that tensors of several dtypes share.
    """
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(view))


def _refuse(names: Sequence[str], rank: int, phase: Phase) -> NoReturn:
    """Raises RuntimeError: parameters or buffers were changed on a rank."""
    listed = f"{names[0]} was" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more were"
    raise RuntimeError(
        f"{listed} changed on rank {rank} other than by an optimizer, {phase.value}. Under hetero_stale the parameter"
        " server has the parameters and buffers, and what it sends next would undo the change. Change them in"
        " on_train_epoch_start or on_train_epoch_end, in the same way on all ranks, or use strategy='hetero_balanced'"
    )
