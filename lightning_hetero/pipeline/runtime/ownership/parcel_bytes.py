"""The bytes of a parcel's tensors, one after the other, as they are sent through host memory (layer T)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero.pipeline.runtime.ownership.checksums import Summing, bytes_of, checksums
from lightning_hetero.pipeline.runtime.ownership.parcels import Note, Parcel, notes_of

__all__ = ["ParcelBytes", "portions"]

_ALONE_BYTES = 2**20  # a tensor from which on it is sent from where it is, to where it belongs


@dataclass(frozen=True, slots=True)
class _Staged:
    """One tensor whose bytes are on their way.

    Attributes:
        number: of it in the parcel.
        data: its bytes on the host, in the order of its elements.
        summing: of these.
        in_place: they are the tensor's own memory.
    """

    number: int
    data: Tensor
    summing: Summing
    in_place: bool


class ParcelBytes:
    """Hands them out in the order in which they travel.

    Args:
        parcel: to be read, or to be filled; what goes from device to device is left out.
        fill: which of both.
    """

    def __init__(self, parcel: Parcel, *, fill: bool) -> None:
        self._parcel, self._fill = parcel, fill
        self._left = deque(_order(notes_of(parcel.manifest)))
        self._at = 0  # in the first of these
        self._staged: _Staged | None = None  # that one
        self._taken: list[tuple[_Staged, int]] = []  # until which of its bytes

    @property
    def exhausted(self) -> bool:
        """Whether all has been taken."""
        return not self._left

    @property
    def in_place(self) -> list[Tensor]:
        """The tensors, of those left, whose own memory is handed out."""
        tensors = (self._parcel.tensors[number] for number in self._left)
        return [tensor for tensor in tensors if _lies_in_order(tensor)]

    def portions(self, most_bytes: int) -> list[int]:
        """Returns `portions` of all."""
        return portions(notes_of(self._parcel.manifest), most_bytes)

    def take(self, size: int) -> list[Tensor]:
        """Returns where the next bytes are: views of the tensors, where these lie on the host and in order."""
        found: list[Tensor] = []
        while size:
            staged = self._staged = self._staged or self._stage(self._left[0])
            n = min(size, staged.data.numel() - self._at)
            found.append(staged.data[self._at : self._at + n])
            size -= n
            self._at += n
            self._taken.append((staged, self._at))
            if self._at == staged.data.numel():
                self._left.popleft()
                self._at, self._staged = 0, None
        return found

    def _stage(self, number: int) -> _Staged:
        tensor = self._parcel.tensors[number]
        in_place = _lies_in_order(tensor)
        if in_place:
            data = bytes_of(tensor)
        elif self._fill:
            data = torch.empty(tensor.nbytes, dtype=torch.uint8)
        else:
            data = bytes_of(tensor.detach().to("cpu").contiguous())
        return _Staged(number, data, Summing(data), in_place)

    def complete(self) -> Callable[[], None]:
        """Returns what is to be done when all that was taken so far is there: put it in its place, and sum it up."""
        taken, self._taken = self._taken, []

        def finish() -> None:
            for staged, end in taken:
                self._finish(staged, end)

        return finish

    def _finish(self, staged: _Staged, end: int) -> None:
        number, whole = staged.number, end == staged.data.numel()
        tensor, sums = self._parcel.tensors[number], self._parcel.checksums
        elsewhere = self._fill and not staged.in_place
        if elsewhere and whole:
            tensor.copy_(staged.data.view(tensor.dtype).view(tensor.shape))
        if tensor.device.type != "cpu":
            return  # summed up there, see `Parcel.sum_up`
        if not elsewhere:
            staged.summing.until(end)
        if whole:
            [sums[number]] = checksums([tensor]) if elsewhere else [staged.summing.checksum()]


def _lies_in_order(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _order(notes: Sequence[Note]) -> list[int]:
    """Returns which tensors go through the hosts, largest first, the same on both sides."""
    found = [i for i, note in enumerate(notes) if not note.direct and note.size_bytes]
    return sorted(found, key=lambda i: -notes[i].size_bytes)


def portions(notes: Sequence[Note], most_bytes: int) -> list[int]:
    """Returns how many bytes go at once: of a large tensor alone, which spares copies; of small ones together.

    Args:
        notes: of a parcel.
        most_bytes: at once.
    """
    found: list[int] = []
    left = 0
    for size in (notes[i].size_bytes for i in _order(notes)):
        if size >= min(_ALONE_BYTES, most_bytes):
            found += [min(most_bytes, size - begin) for begin in range(0, size, most_bytes)]
        elif size <= left:
            found[-1] += size
            left -= size
        else:
            found.append(size)
            left = most_bytes - size
    return found
