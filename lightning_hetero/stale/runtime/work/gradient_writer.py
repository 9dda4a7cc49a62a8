"""Writes a worker's gradients into its slot: most of them while backward runs (layer T).

backward -- hook of a parameter --> copy into the image of the slot on its device; when a bucket of about 25 MiB is
                                    whole: sent into the slot beside backward; when it has landed: link.ready
push     -- for every parameter --> as it was copied: done; changed, replaced or new: copy; None: not present
            one wait per device  --> all is in the slot, and what was asked of the devices is known

A device's part of the slot is made in an image on the device, and gets into the slot beside the device's other work. On
the host the image is the slot itself, and there is nothing to copy.

    compute stream   gradient --> image --> stamp                          the next gradients ...
    side stream                              '--> image to slot --> stamp
    host                                                              '--> reached: the part is in the slot

Whether a gradient is finite is looked up here, on the host while it is in the cache, and said with it: the server,
which would have to read every worker's once more for that, only reads what it is told.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.measure.device import HostDevice, Stamp, device_of
from lightning_hetero.stale.runtime.buffers import BufferChanges
from lightning_hetero.stale.runtime.layout import FINITE, NONFINITE, FlatLayout, is_finite
from lightning_hetero.transport.base import WorkerLink

_BUCKET_BYTES = 25 << 20  # DDP's
_SAMPLED, _SAMPLES = 4, 64  # gradients, and entries of each, that are compared with what was copied


def lock_pages(memories: Iterable[Tensor], devices: Sequence[HostDevice]) -> list[Callable[[], None]]:
    """Locks the host's memory (uint8) for copies to and from devices, once, where that is to be had; returns what ends
    it."""
    locked: list[Callable[[], None]] = []
    for memory in memories:
        for device in devices:
            if (unlock := device.page_lock(memory.data_ptr(), memory.numel())) is not None:
                locked.append(unlock)
                break
    return locked


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
    """Collects flat tensors of bytes; `read` fetches them all."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, list[int]]] = []

    def add(self, part: Tensor) -> list[int]:
        """Returns the list that `read` fills with the bytes of ``part`` (uint8, flat)."""
        into: list[int] = []
        self._parts.append((part, into))
        return into

    def read(self) -> None:
        """Waits for the devices' current streams, and reads what was added since the last time."""
        by_device: dict[torch.device, list[tuple[Tensor, list[int]]]] = {}
        for part, into in self._parts:
            by_device.setdefault(part.device, []).append((part, into))
        self._parts = []
        for parts in by_device.values():
            found = iter(torch.cat([part for part, _ in parts]).cpu().tolist())
            for part, into in parts:
                into[:] = [next(found) for _ in range(part.numel())]


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
        parameters: in the layout's order; where they stay.
        buffers: where each buffer is.
        overlap: copy gradients while backward runs; None: if they are on a device, or so many that it takes time.
    """

    def __init__(
        self,
        link: WorkerLink,
        layout: FlatLayout,
        parameters: Sequence[Parameter],
        buffers: Sequence[torch.device] = (),
        *,
        overlap: bool | None = None,
    ) -> None:
        self._link, self._layout, self._parameters = link, layout, parameters
        devices = [parameter.device for parameter in parameters]
        images = self._images = {device: Image(device, link.gradient) for device in dict.fromkeys([*devices, *buffers])}
        self._changes = {d: BufferChanges(layout, [each == d for each in buffers], d) for d in images if buffers}
        self._image = [images[device] for device in devices]  # of each parameter
        values = {device: layout.values_of(image.bytes) for device, image in images.items()}
        self._values = [values[device][i] for i, device in enumerate(devices)]  # numbers of each gradient in its image
        self._open = False
        self._copied: dict[int, _Copied] = {}
        self._bucket_of, self._buckets = _buckets(layout, devices)
        self._missing: list[int] = []  # gradients of each bucket that are not written yet
        self._rewritten = set[int]()  # gradients that were written again since
        self._landing: deque[tuple[Stamp, tuple[int, int]]] = deque()  # bytes on their way to the slot
        self._reset_buckets()
        if overlap is None:
            overlap = layout.slot_bytes > _BUCKET_BYTES or any(image.asynchronous for image in images.values())
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, i))
            for i, parameter in enumerate(parameters)
            if overlap and parameter.requires_grad  # one that is unfrozen later is copied at the push
        ]

    def detach(self) -> None:
        """Ends it; idempotent."""
        for handle in self._handles:
            handle.remove()
        for image in self._images.values():
            image.wait()
        self._handles.clear()
        self._copied.clear()
        self._images, self._image, self._values, self._changes = {}, [], [], {}

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        """A backward pass has made a gradient."""
        gradient = parameter.grad
        if gradient is None:
            return
        if again := index in self._copied:  # by a backward pass before: it may be on its way
            self._image[index].hold()
            self._rewritten.add(index)
        self._copy([(index, gradient)])
        flag = 0 if self._image[index].asynchronous else self._look(index)
        self._copied[index] = _Copied(gradient, gradient._version, flag)
        if not again:
            self._count(index)

    def _copy(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Writes gradients into their images, with few calls."""
        if not self._open:
            self._link.open_slot()
            self._open = True
        if gradients:
            now = [gradient.detach() for _, gradient in gradients]
            dense = [gradient if gradient.layout is torch.strided else gradient.to_dense() for gradient in now]
            torch._foreach_copy_([self._values[i] for i, _ in gradients], dense)

    def _look(self, index: int) -> int:
        """Returns what is to be said of a gradient that is in the slot."""
        return FINITE if is_finite(self._values[index]) else NONFINITE

    def _count(self, index: int) -> None:
        """A bucket whose gradients are all written may travel."""
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            span = self._buckets[bucket]
            self._landing.append((self._image[index].send(*span), span))
        while self._landing and self._landing[0][0].reached():
            self._link.ready(*self._landing.popleft()[1])

    def _reset_buckets(self) -> None:
        self._missing = [0] * len(self._buckets)
        for bucket in self._bucket_of:
            self._missing[bucket] += 1
        self._rewritten.clear()
        self._landing.clear()

    def write(
        self, buffers: Sequence[tuple[Tensor, Tensor]], numbers: Callable[[Tensor], None], told: Readout | None = None
    ) -> int:
        """Completes the slot from what the gradients are now, drops them, and closes it.

        Args:
            buffers: memory of the buffers of each device, as it is and as it was pulled; the latter is brought up to
                date.
            numbers: fills the hyper-parameters in.
            told: what else is to be read from the devices.

        Returns:
            The slot's sequence number.
        """
        layout, slot, told = self._layout, self._link.gradient, told or Readout()
        self._copy([])  # opens the slot
        numbers(layout.numbers_of(slot))
        present = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        unseen = [told.add(changed) for changed in self._changed_unseen()]
        found = [self._write_buffers(told, now, was) for now, was in buffers] if layout.buffers else []
        finite = self._settle([(i, g) for i, g in present if not self._is_seen(i, g)], present, told)
        if any(map(any, unseen)):
            finite = self._settle(present, present, told)
        flags = [0] * len(self._parameters)
        for i, _ in present:
            copied = self._copied.get(i)
            flags[i] = finite.get(i, 0) or (self._look(i) if copied is None or not copied.flag else copied.flag)
        changed = [max(each) for each in zip(*found, strict=True)] if found else [0] * len(layout.buffers)
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
        """Writes gradients, has all that is not in the slot get there, and waits for it and for what is told.

        Returns:
            What is to be said of the gradients of devices that do not wait for theirs.
        """
        travelled = self._rewritten | {i for i, _ in again if i in self._copied}  # their buckets may have
        for image in self._images.values():
            image.hold()
        self._copy(again)
        for i, _ in again:
            self._copied.pop(i, None)
        for bucket, missing in enumerate(self._missing):
            if missing:
                self._image[self._bucket_of.index(bucket)].send(*self._buckets[bucket])
        for i in sorted(travelled):
            span = self._layout.gradient_ranges[i]
            self._landing.append((self._image[i].send(*span), span))
        asked: list[tuple[list[int], list[int]]] = []
        for image in self._images.values():
            if image.asynchronous:
                of_it = [i for i, _ in present if self._image[i] is image and self._values[i].numel()]
                if of_it:
                    asked.append((of_it, told.add(_finite([self._values[i] for i in of_it]))))
                image.hold()
        told.read()
        return {i: flag for of_it, said in asked for i, flag in zip(of_it, said, strict=True)}

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

    def _write_buffers(self, told: Readout, now: Tensor, was: Tensor) -> list[int]:
        """Writes a device's buffers; returns the list for what is to be said of them."""
        image, changes, start = self._images[now.device], self._changes[now.device], self._layout.buffer_ranges[0][0]
        flags = told.add(changes.write(now, was, image.bytes[start : start + now.numel()]))
        for first, last in changes.runs:
            image.send(self._layout.buffer_ranges[first][0], self._layout.buffer_ranges[last][1])
        return flags


def _finite(values: Sequence[Tensor]) -> Tensor:
    """Returns what is to be said of gradients, on their device (uint8); the largest magnitude tells, in one pass."""
    norms = torch._foreach_norm([torch.view_as_real(v) if v.is_complex() else v for v in values], math.inf)
    return torch.where(torch.stack(norms).isfinite(), FINITE, NONFINITE).to(torch.uint8)


def _buckets(
    layout: FlatLayout, devices: Sequence[torch.device]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the bucket of each parameter, and the bytes of each bucket, which is on one device; backward begins with
    the last parameters."""
    bucket_of, buckets = [0] * len(layout.parameters), list[tuple[int, int]]()
    before: torch.device | None = None
    for i in reversed(range(len(layout.parameters))):
        start, stop = layout.gradient_ranges[i]
        if devices[i] == before and buckets[-1][1] - start <= _BUCKET_BYTES:
            buckets[-1] = (start, buckets[-1][1])
        else:
            buckets.append((start, stop))
        bucket_of[i], before = len(buckets) - 1, devices[i]
    return bucket_of, buckets
