"""Writes a worker's gradients into its slot: most of them while backward runs (layer T).

backward -- hook of a parameter --> copy into the slot; when a bucket of about 25 MiB is whole: link.ready
push     -- for every parameter --> as it was copied: done; changed, replaced or new: copy; None: not present

Whether a gradient is finite is looked up here, while it is in the cache, and said with it: the server, which would have
to read every worker's once more for that, only reads what it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.stale.runtime.memory.entry import CHANGE, FINITE, NONFINITE, VALUE
from lightning_hetero.stale.runtime.memory.layout import FlatLayout
from lightning_hetero.stale.runtime.work.page_locked import synchronize
from lightning_hetero.transport.base import WorkerLink

__all__ = ["BUCKET_BYTES", "GradientWriter"]

BUCKET_BYTES = 25 << 20  # DDP's
_SAMPLED, _SAMPLES = 4, 64  # gradients, and entries of each, that are compared with what was copied


@dataclass(slots=True)
class _Copied:
    """A gradient as it was when it was written into the slot."""

    gradient: Tensor
    version: int
    memory: Tensor | None  # what the codec keeps if this push is made
    flag: int | None  # FINITE or NONFINITE; None: it was not in the slot yet when it could have been looked at


class GradientWriter:
    """See the module.

    Args:
        link: whose slot is written.
        layout: of the slot.
        parameters: in the layout's order.

    Attributes:
        memory: what the codec keeps from one push to the next, by parameter.
    """

    def __init__(self, link: WorkerLink, layout: FlatLayout, parameters: Sequence[Parameter]) -> None:
        self.link, self.layout, self.parameters = link, layout, parameters
        self.memory: dict[int, Tensor | None] = {}
        self._values = layout.values_of(link.gradient)
        self._handles: list[Any] = []
        self._open = False
        self._copied: dict[int, _Copied] = {}
        self._bucket_of, self._buckets = _buckets(layout)
        self._missing: list[int] = []  # gradients of each bucket that are not written yet
        self._landing: deque[tuple[Any, tuple[int, int]]] = (
            deque()
        )  # CUDA event, bytes on their way to the slot
        self._reset_buckets()

    def attach(self) -> None:
        """Starts to copy gradients while backward runs."""
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:  # one that is unfrozen later is copied at the push
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(i)))

    def detach(self) -> None:
        """Stops doing so; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._copied.clear()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def copy(parameter: Tensor) -> None:
            if parameter.grad is not None:
                again = index in self._copied
                self._copy(index, parameter.grad)
                if not again:
                    self._count(index)

        return copy

    def _copy(self, index: int, gradient: Tensor) -> None:
        if not self._open:
            self.link.open_slot()
            self._open = True
        dense = gradient.detach()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        entry, out = self.layout.parameters[index], self.layout.gradient_of(self.link.gradient, index)
        memory = self.layout.codec.encode(dense, out, entry, self.memory.get(index))
        flag = self._look(index) if dense.device.type == "cpu" else None
        self._copied[index] = _Copied(gradient, gradient._version, memory, flag)

    def _look(self, index: int) -> int:
        """Returns what is to be said of a gradient in the slot."""
        return FINITE if self.layout.codec.finite(self._values[index]) else NONFINITE

    def _copy_all(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Writes many gradients with few calls, where that is possible."""
        plain = self.layout.codec.keeps_every_entry
        at_once = [
            (i, g) for i, g in gradients if plain and g.layout is torch.strided and g.device.type == "cpu"
        ]
        if at_once:
            torch._foreach_copy_([self._values[i] for i, _ in at_once], [g.detach() for _, g in at_once])
        done = {i for i, _ in at_once}
        for i in done:
            self._copied.pop(i, None)
        for i, gradient in gradients:
            if i not in done:
                self._copy(i, gradient)

    def _count(self, index: int) -> None:
        """A bucket whose gradients are all written may travel."""
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            device = self.parameters[index].device
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._landing.append((event, self._buckets[bucket]))
            else:
                self.link.ready(*self._buckets[bucket])
        while self._landing and self._landing[0][0].query():
            self.link.ready(*self._landing.popleft()[1])

    def _reset_buckets(self) -> None:
        self._missing = [0] * len(self._buckets)
        for bucket in self._bucket_of:
            self._missing[bucket] += 1
        self._landing.clear()

    def write(self, buffers: Iterable[tuple[Tensor, Tensor]], numbers: Callable[[Tensor], None]) -> int:
        """Completes the slot from what the gradients are now, drops them, and closes it.

        Args:
            buffers: each as it is and as it was pulled; the latter is brought up to date.
            numbers: fills the hyper-parameters in.

        Returns:
            The slot's sequence number.
        """
        layout, slot = self.layout, self.link.gradient
        if not self._open:
            self.link.open_slot()
            self._open = True
        flags = [0] * (len(self.parameters) + len(layout.buffers))
        distrust = self._changed_unseen()
        rest: list[tuple[int, Tensor]] = []
        for i, parameter in enumerate(self.parameters):
            gradient, copied = parameter.grad, self._copied.get(i)
            if gradient is None:
                continue
            flags[i] = FINITE
            seen = copied is not None and copied.gradient is gradient and copied.version == gradient._version
            if not seen or distrust:
                rest.append((i, gradient))
                if copied is not None:  # its bucket may have travelled already
                    self._landing.append((None, layout.gradient_ranges[i]))
        self._copy_all(rest)
        for i, (buffer, clean) in enumerate(buffers):
            flags[len(self.parameters) + i] = self._write_buffer(i, buffer, clean)
        numbers(layout.numbers_of(slot))
        synchronize({parameter.device for parameter in self.parameters})
        for i in range(len(self.parameters)):
            if flags[i]:
                copied = self._copied.get(i)
                flags[i] = self._look(i) if copied is None or copied.flag is None else copied.flag
        slot[slice(*layout.present)].copy_(torch.tensor(flags, dtype=torch.uint8))
        for _, span in self._landing:
            self.link.ready(*span)
        sequence = self.link.close_slot()
        self._open = False
        self.memory.update(
            {i: c.memory for i, c in self._copied.items() if flags[i] and c.memory is not None}
        )
        self._copied.clear()
        for parameter in self.parameters:
            parameter.grad = None
        self._reset_buckets()
        return sequence

    def _changed_unseen(self) -> bool:
        """Whether gradients were changed in a way autograd does not count (``.data``, `torch.amp.GradScaler`).

        Compares a few entries of the largest and of the smallest gradients; scaling, the usual reason, changes all.
        """
        layout = self.layout
        if not layout.codec.keeps_every_entry:
            return False
        by_size = sorted(self._copied, key=lambda i: layout.parameters[i].numel)
        chosen = {*by_size[:_SAMPLED], *by_size[-_SAMPLED:]}
        synchronize({self.parameters[i].device for i in chosen})  # copies must have landed
        for i in chosen:
            copied, entry = self._copied[i], layout.parameters[i]
            if self.parameters[i].grad is not copied.gradient or copied.gradient.layout is not torch.strided:
                continue
            written = self._values[i]
            now = copied.gradient.detach()
            per_dimension = max(1, round(_SAMPLES ** (1 / max(1, len(entry.shape)))))
            every = tuple(slice(None, None, -(-size // per_dimension) or 1) for size in entry.shape)
            written, now = written[every], now[every].to("cpu", written.dtype)
            if not torch.equal(written, now) and not bool(now.isnan().any()):
                return True
        return False

    def _write_buffer(self, index: int, buffer: Tensor, clean: Tensor) -> int:
        """Writes a buffer, or how it changed since the last pull or push; returns which, or 0 if it did not."""
        if torch.equal(buffer, clean):
            return 0
        entry, out, flag = self.layout.buffers[index], self.layout.buffer_of(self.link.gradient, index), VALUE
        out.copy_(buffer)
        if entry.statistic or (entry.counts and bool(clean.isfinite())):
            # An infinity that stays is no change.
            out.copy_((buffer - clean).masked_fill_(buffer == clean, 0))
            flag = CHANGE
        clean.copy_(buffer)
        return flag


def _buckets(layout: FlatLayout) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the bucket of each parameter, and the bytes of each bucket; backward begins with the last parameters."""
    bucket_of, buckets = [0] * len(layout.parameters), list[tuple[int, int]]()
    for i in reversed(range(len(layout.parameters))):
        start, stop = layout.gradient_ranges[i]
        if buckets and buckets[-1][1] - start <= BUCKET_BYTES:
            buckets[-1] = (start, buckets[-1][1])
        else:
            buckets.append((start, stop))
        bucket_of[i] = len(buckets) - 1
    return bucket_of, buckets
