"""A checksum of the parameters, a part of them per optimizer step, for the ranks to compare (layer T)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_hetero.measure.device import Device

__all__ = ["ParameterChecksum"]

_BITS = 52  # of a whole number that a float64 holds
_EXACT, _REST = (1 << _BITS) - 1, (1 << 64 - _BITS) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterChecksum:
    """Sums bit patterns as whole numbers: exact, whatever the type, and equal on ranks that hold the same.

    One part of the parameters after each optimizer step; after ``every`` steps all had their turn, and it begins anew.
    A sum does not see values of a part that have changed places.

    Args:
        every: optimizer steps for all parameters.
        parameters: what to sum, asked at the beginning of each round; the same on all ranks.
        device: where they are.
    """

    def __init__(self, every: int, parameters: Callable[[], Iterable[Tensor]], *, device: Device) -> None:
        self._every, self._parameters, self._device = every, parameters, device
        self._left = 0  # steps of this round
        self._ahead: list[Tensor] = []  # what is not summed yet, the next last
        self._part_bytes = 0
        self._sums: list[Tensor] = []
        self._under_way: Callable[[], float] | None = None

    def stepped(self) -> None:
        """An optimizer step is over: takes the next part. It waits for no device."""
        if not self._left:
            unique = {id(p): p.detach() for p in self._parameters()}
            self._ahead = list(reversed(unique.values()))
            words = -(-sum(p.numel() * p.element_size() for p in self._ahead) // (8 * self._every))
            self._part_bytes = 8 * words
            self._left = self._every
        self._left -= 1
        room = self._part_bytes
        while room > 0 and self._ahead:
            ahead = self._ahead.pop()
            if not _is_bits(ahead):
                self._ahead += reversed(_bits(ahead))
                continue
            n = -(-room // ahead.element_size())
            if len(ahead) > n:
                self._ahead.append(ahead[n:])
            self._sums.append(ahead[:n].sum(dtype=torch.int64))
            room -= len(ahead) * ahead.element_size()

    def take(self) -> float:
        """Returns the sum since it was taken last, in [0, 2**52); NaN without a step in between.

        On an accelerator it is the one before, which is known by now without waiting for the device.
        """
        sums, self._sums = self._sums, []
        if not self._device.asynchronous:
            return float(_folded(sum(map(int, sums)))) if sums else math.nan
        known, self._under_way = self._under_way, self._copied(sums) if sums else None
        return math.nan if known is None else known()

    def _copied(self, sums: list[Tensor]) -> Callable[[], float]:
        """Starts the way to the host; the result waits for its end."""
        total = torch.stack([one.to(self._device.device, non_blocking=True) for one in sums]).sum()
        host = total.to("cpu", non_blocking=True)
        over = self._device.stamp()

        def wait() -> float:
            over.wait()
            return float(_folded(int(host.item())))

        return wait


def _folded(total: int) -> int:
    """Returns 52 bits that all 64 have a part in: a sign is the highest of them."""
    return (total ^ (total >> _BITS & _REST)) & _EXACT


def _is_bits(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype in _INTEGERS.values() and tensor.is_contiguous()


def _bits(tensor: Tensor) -> list[Tensor]:
    """Returns flat views of whole numbers, of eight bytes where they fit, for these are summed fastest.

    Copies where memory has holes.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():  # e.g. channels_last: in the order of memory, the same on all ranks
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1).contiguous()
    ratio = 8 // flat.element_size()
    whole = len(flat) // ratio * ratio if flat.storage_offset() % ratio == 0 else 0
    parts = [(flat[:whole], torch.int64), (flat[whole:], _INTEGERS[flat.element_size()])]
    return [part.view(kind) for part, kind in parts if len(part)]
