"""Writes a worker's gradients into its slot: most of them while backward runs (layer T).

backward -- hook of a parameter --> copy into the image of the slot on its device; when a bucket of about 25 MiB is
                                    whole: sent into the slot during backward; when it has landed: link.ready
push     -- for every parameter --> as it was copied: done; changed, replaced or new: copy; None: not present
            one wait per device  --> all is in the slot, and what was asked of the devices is known

A device's part of the slot is made in an image on the device, and gets into the slot during the device's other work. On
the host the image is the slot itself, and there is nothing to copy.

    compute stream   gradient --> image --> stamp                          the next gradients ...
    side stream                              '--> image to slot --> stamp
    host                                                              '--> reached: the part is in the slot

Whether a gradient is finite is looked up here, on the host while it is in the cache, and said with it: the server,
which would have to read every worker's once more for that, only reads the result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.measure.device import Stamp, device_of
from lightning_hetero.stale.runtime.buffers import BufferChanges
from lightning_hetero.stale.runtime.layout import FINITE, NONFINITE, FlatLayout, is_finite
from lightning_hetero.transport.link import WorkerLink

_BUCKET_BYTES = 25 << 20  # DDP's
_SAMPLED, _SAMPLES = 4, 64  # gradients, and entries of each, that are compared with what was copied


class Image:
    """One slot's image on one device.

    Args:
        device: whose gradients and buffers it is for.
        slot: on the host; page-locked, or a device waits for each copy.

    Attributes:
        bytes: memory on the device, in the slot's layout.
        asynchronous: it is not the slot itself.
    """

    def __init__(self, device: torch.device, slot: Tensor) -> None:
        self._device, self._slot = device_of(device), slot
        self.asynchronous = self._device.asynchronous
        self.bytes = torch.zeros_like(slot, device=device) if self.asynchronous else slot
        self._stream = self._device.side_stream()
        self._landed: Stamp | None = None

    def send(self, start: int, stop: int) -> Stamp:
        """Copies what the current stream has written of it into the slot; returns when that has landed."""
        if not self.asynchronous:
            return self._device.stamp()
        written = self._device.stamp()
        with self._device.on(self._stream):
            written.hold()
            self._slot[start:stop].copy_(self.bytes[start:stop], non_blocking=True)
            self._landed = self._device.stamp()
        return self._landed

    def hold(self) -> None:
        """Has the current stream wait for all that was sent: the next to read from the device finds it landed."""
        if self._landed is not None:
            self._landed.hold()

    def wait(self) -> None:
        """Has the host wait for all that was sent, which may not be on its way when the slot goes."""
        if self._landed is not None:
            self._landed.wait()


class Readout:
    """Collects flat tensors of bytes, all on one device; `read` fetches them at once."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, list[int]]] = []

    def add(self, part: Tensor) -> list[int]:
        """Returns the list that `read` fills with the bytes of ``part`` (uint8, flat)."""
        into: list[int] = []
        self._parts.append((part, into))
        return into

    def read(self) -> None:
        """Waits for the device's current stream, and reads what was added since the last time."""
        parts, self._parts = self._parts, []
        if parts:
            found = iter(torch.cat([part for part, _ in parts]).cpu().tolist())
            for part, into in parts:
                into[:] = islice(found, part.numel())


@dataclass(slots=True)
class _Copied:
    """A gradient as it was when it was written into the image."""

    gradient: Tensor
    version: int
    flag: int  # FINITE or NONFINITE; 0: a device is asked at the push


class GradientWriter:
    """See the module.

    Args:
        link: whose slot is written.
        layout: of the slot.
        parameters: in the layout's order.
        device: where they and the buffers are.
        overlap: copy gradients while backward runs; None: if they are on a device, or so many that it takes time.
    """

    def __init__(
        self, link: WorkerLink, layout: FlatLayout, parameters: Sequence[Parameter], device: torch.device, *,
        overlap: bool | None = None,
    ) -> None:  # fmt: skip
        self._link, self._layout, self._parameters = link, layout, parameters
        self._image = Image(device, link.gradient)
        self._changes = BufferChanges(layout, device) if layout.buffers else None
        self._values = layout.values_of(self._image.bytes)  # numbers of each gradient in the image
        self._open = False
        self._copied: dict[int, _Copied] = {}
        self._bucket_of, self._buckets = _buckets(layout)
        self._missing: list[int] = []  # gradients of each bucket that are not written yet
        self._rewritten = set[int]()  # gradients that were written again since
        self._landing: deque[tuple[Stamp, tuple[int, int]]] = deque()  # bytes on their way to the slot
        self._reset_buckets()
        if overlap is None:
            overlap = layout.slot_bytes > _BUCKET_BYTES or self._image.asynchronous
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, i))
            for i, parameter in enumerate(parameters)
            if overlap and parameter.requires_grad  # one that is unfrozen later is copied at the push
        ]

    def detach(self) -> None:
        """Ends it; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._image.wait()
        self._handles.clear()
        self._copied.clear()
        self._values = []

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        """A backward pass has made a gradient."""
        gradient = parameter.grad
        if gradient is None:
            return
        if again := index in self._copied:  # by a backward pass before: it may be on its way
            self._image.hold()
            self._rewritten.add(index)
        self._copy([(index, gradient)])
        flag = 0 if self._image.asynchronous else self._look(index)
        self._copied[index] = _Copied(gradient, gradient._version, flag)
        if not again:
            self._count(index)

    def _copy(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Writes gradients into their images, with few calls."""
        if not self._open:
            self._link.open_slot()
            self._open = True
        now = [gradient.detach() for _, gradient in gradients]
        dense = [gradient if gradient.layout is torch.strided else gradient.to_dense() for gradient in now]
        values = [self._values[i] for i, _ in gradients]
        if len(values) == 1:
            values[0].copy_(dense[0])
        elif values:
            torch._foreach_copy_(values, dense)

    def _look(self, index: int) -> int:
        """Returns what is to be said of a gradient that is in the slot."""
        return FINITE if is_finite(self._values[index]) else NONFINITE

    def _count(self, index: int) -> None:
        """A bucket whose gradients are all written may travel."""
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            span = self._buckets[bucket]
            self._landing.append((self._image.send(*span), span))
        while self._landing and self._landing[0][0].reached():
            self._link.ready(*self._landing.popleft()[1])

    def _reset_buckets(self) -> None:
        self._missing = [0] * len(self._buckets)
        for bucket in self._bucket_of:
            self._missing[bucket] += 1
        self._rewritten.clear()
        self._landing.clear()

    def write(
        self, buffers: Tensor, clean: Tensor, numbers: Callable[[Tensor], None], told: Readout | None = None
    ) -> int:
        """Completes the slot from what the gradients are now, drops them, and closes it.

        Args:
            buffers, clean: memory of the buffers, as it is and as it was pulled; the latter is brought up to date.
            numbers: fills the hyper-parameters in.
            told: what else is to be read from the device.

        Returns:
            The slot's sequence number.
        """
        layout, slot, told = self._layout, self._link.gradient, told or Readout()
        self._copy([])  # opens the slot
        numbers(layout.numbers_of(slot))
        present = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        unseen = [told.add(changed) for changed in self._changed_unseen()]
        changed = [] if self._changes is None else self._write_buffers(self._changes, told, buffers, clean)
        finite = self._settle([(i, g) for i, g in present if not self._is_seen(i, g)], present, told)
        if any(map(any, unseen)):
            finite = self._settle(present, present, told)
        flags = [0] * len(self._parameters)
        for i, _ in present:
            copied = self._copied.get(i)
            flags[i] = finite.get(i, 0) or (self._look(i) if copied is None or not copied.flag else copied.flag)
        slot[slice(*layout.present)].copy_(torch.tensor([*flags, *changed], dtype=torch.uint8))
        for _, span in self._landing:
            self._link.ready(*span)
        sequence = self._link.close_slot()
        self._open = False
        self._copied.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self._reset_buckets()
        return sequence

    def _is_seen(self, index: int, gradient: Tensor) -> bool:
        copied = self._copied.get(index)
        return copied is not None and copied.gradient is gradient and copied.version == gradient._version

    def _settle(
        self, again: Sequence[tuple[int, Tensor]], present: Sequence[tuple[int, Tensor]], told: Readout
    ) -> dict[int, int]:
        """Writes gradients, has all that is not in the slot get there, and waits for it and for what is said with it.

        Returns:
            What is to be said of the gradients of devices that do not wait for theirs.
        """
        travelled = self._rewritten | {i for i, _ in again if i in self._copied}  # their buckets may have
        self._image.hold()
        self._copy(again)
        for i, _ in again:
            self._copied.pop(i, None)
        for bucket, missing in enumerate(self._missing):
            if missing:
                self._image.send(*self._buckets[bucket])
        for i in sorted(travelled):
            span = self._layout.gradient_ranges[i]
            self._landing.append((self._image.send(*span), span))
        asked = [i for i, _ in present if self._values[i].numel()] if self._image.asynchronous else []
        said = told.add(_finite([self._values[i] for i in asked])) if asked else []
        self._image.hold()
        told.read()
        return dict(zip(asked, said, strict=True))

    def _changed_unseen(self) -> list[Tensor]:
        """Whether gradients were changed in a way autograd does not count (``.data``, `torch.amp.GradScaler`).

        Compares a few entries of the largest and of the smallest gradients; scaling, the usual reason, changes all.
        """
        layout = self._layout
        by_size = sorted(self._copied, key=lambda i: layout.parameters[i].numel)
        changed: list[Tensor] = []
        for i in {*by_size[:_SAMPLED], *by_size[-_SAMPLED:]}:
            copied, entry = self._copied[i], layout.parameters[i]
            if self._parameters[i].grad is not copied.gradient or copied.gradient.layout is not torch.strided:
                continue
            per_dimension = max(1, round(_SAMPLES ** (1 / max(1, len(entry.shape)))))
            every = tuple(slice(None, None, -(-size // per_dimension) or 1) for size in entry.shape)
            written = self._values[i][every]
            now = copied.gradient.detach()[every].to(written.dtype)
            changed.append(((written != now) & (now == now)).any().view(1).to(torch.uint8))
        return changed

    def _write_buffers(self, changes: BufferChanges, told: Readout, now: Tensor, was: Tensor) -> list[int]:
        """Writes the buffers; returns the list for what is to be said of them."""
        start = self._layout.buffer_ranges[0][0]
        flags = told.add(changes.write(now, was, self._image.bytes[start : start + now.numel()]))
        self._image.send(start, self._layout.buffer_ranges[-1][1])
        return flags


def _finite(values: Sequence[Tensor]) -> Tensor:
    """Returns what is to be said of gradients, on their device (uint8); the largest magnitude tells, in one pass."""
    norms = torch._foreach_norm([torch.view_as_real(v) if v.is_complex() else v for v in values], math.inf)
    return torch.where(torch.stack(norms).isfinite(), FINITE, NONFINITE).to(torch.uint8)


def _buckets(layout: FlatLayout) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the bucket of each parameter, and the bytes of each bucket; backward begins with the last parameters."""
    bucket_of, buckets = [0] * len(layout.parameters), list[tuple[int, int]]()
    for i in reversed(range(len(layout.parameters))):
        start, stop = layout.gradient_ranges[i]
        if buckets and buckets[-1][1] - start <= _BUCKET_BYTES:
            buckets[-1] = (start, buckets[-1][1])
        else:
            buckets.append((start, stop))
        bucket_of[i] = len(buckets) - 1
    return bucket_of, buckets
