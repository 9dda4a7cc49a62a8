"""Two numbers of what a tensor holds, at once or while its bytes come, equal either way (layer T).

    bytes ──► pieces of 1 MiB, words in 128 columns ──► each column's sum, per piece ──► over all pieces, by place
                 while they are in the processor's cache

No digest: it finds what a wrong copy does, such as bits, words or pieces that are others, or elsewhere; not KiB that
have changed places within a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["Checksum", "Summing", "bytes_of", "checksums"]

Checksum = tuple[int, int]

_PIECE_BYTES = 2**20
_COLUMNS = 128  # few: their sums stay in registers
_ROW_BYTES = 8 * _COLUMNS


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[Checksum]:
    """Returns two numbers per tensor, of its bytes in the order of its elements: a sum by piece, one by place besides.

    Whole words of eight bytes are added up, wherever the tensor is; a device is waited for once.
    """
    sums = [_folded(_columns(bytes_of(tensor.contiguous()))) for tensor in tensors]
    found: list[Checksum] = [(0, 0)] * len(tensors)
    for device in {s.device for s in sums}:
        where = [i for i, s in enumerate(sums) if s.device == device]
        for i, (total, weighted) in zip(where, torch.stack([sums[i] for i in where]).tolist(), strict=True):
            found[i] = total, weighted
    return found


class Summing:
    """The checksum of bytes that are read, or written, one after the other.

    Args:
        data: all of them, uint8.
    """

    def __init__(self, data: Tensor) -> None:
        self._data, self._until = data, 0
        self._found: list[Tensor] = []

    def until(self, end: int) -> None:
        """Sums up whole pieces of what is there now.

        Args:
            end: the first byte that is not.
        """
        if end < self._data.numel():
            end -= end % _PIECE_BYTES
        if end > self._until:
            self._found.append(_columns(self._data[self._until : end]))
            self._until = end

    def checksum(self) -> Checksum:
        """Returns the checksum of all; equal to that of a tensor with these bytes."""
        self.until(self._data.numel())
        total, weighted = _folded(torch.cat(self._found)).tolist()
        return total, weighted


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor: the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def _columns(data: Tensor) -> Tensor:
    """Returns a row of sums for each piece; the last one may be shorter, and counts as if zeros followed."""
    if data.storage_offset() % 8:
        data = data.clone()
    pieces, rest = divmod(data.numel(), _PIECE_BYTES)
    whole = data.numel() - rest
    found = [data[:whole].view(torch.int64).view(pieces, _PIECE_BYTES // _ROW_BYTES, _COLUMNS).sum(1)]
    if rest:
        padded = data.new_zeros(-(-rest // _ROW_BYTES) * _ROW_BYTES)
        padded[:rest] = data[whole:]
        found.append(padded.view(torch.int64).view(-1, _COLUMNS).sum(0, keepdim=True))
    return torch.cat(found) if rest else found[0]


def _folded(columns: Tensor) -> Tensor:
    """Returns the two numbers; all arithmetic is modulo 2**64."""
    by_piece = torch.full((len(columns), 1), 31, dtype=torch.int64, device=columns.device).cumprod(0)
    of_all = (columns * by_piece).sum(0)
    return torch.stack([of_all.sum(), (of_all * _by_column(columns.device)).sum()])


@cache
def _by_column(device: torch.device) -> Tensor:
    return torch.arange(1, _COLUMNS + 1, dtype=torch.int64, device=device)
