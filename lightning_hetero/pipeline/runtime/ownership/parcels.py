"""What travels when layers move: values with tensors in them, described, and summed up (layer T).

    source    {key: value} ──► manifest: the same with a `Note` for each tensor
    all       manifests, in one message; then the bytes, and checksums of both sides   [exchange]
    target    rebuilt from manifest and bytes, if the checksums are equal
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.runtime.ownership.checksums import Checksum, checksums

__all__ = ["Manifest", "Note", "Parcel", "notes_of", "packed", "rebuilt", "room_for"]

Manifest = dict[Any, Any]
"""Values by key, with notes instead of tensors."""


@dataclass(frozen=True, slots=True)
class Note:
    """Stands for a tensor in a manifest.

    Attributes:
        shape, dtype: of the tensor.
        stride: of one that lies densely in another order than its dimensions, e.g. ``channels_last``; else empty.
        on_host: it is on the CPU though the rank's layers are not, such as an optimizer's counter.
        direct: it goes from device to device.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    on_host: bool
    direct: bool

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes from one rank to another.

    Attributes:
        manifest: the values.
        tensors: in the order of its notes.
        checksums: of these, see `checksums`; known after `exchange`.
    """

    manifest: Manifest
    tensors: list[Tensor]
    checksums: dict[int, Checksum] = field(default_factory=dict[int, Checksum])

    @property
    def direct(self) -> list[Tensor]:
        """The tensors that go from device to device; none without elements."""
        pairs = zip(notes_of(self.manifest), self.tensors, strict=True)
        return [tensor for note, tensor in pairs if note.direct and note.size_bytes]

    def sum_up(self) -> None:
        """Adds the checksums that are missing."""
        missing = [i for i in range(len(self.tensors)) if i not in self.checksums]
        self.checksums.update(zip(missing, checksums([self.tensors[i] for i in missing]), strict=True))


def packed(values: Mapping[Any, Any], device: torch.device, *, direct: bool) -> Parcel:
    """Returns values as a parcel; tensors are those of the values, not copied.

    Args:
        values: by key; nests of tensors and of what can be pickled.
        device: of the sender's layers.
        direct: whether there is a way from device to device.

    Raises:
        TypeError: a tensor that is not dense.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(
                f"a tensor of layout {tensor.layout} on {tensor.device} and of shape {tuple(tensor.shape)} cannot be"
                " sent to another rank, only dense ones"
            )
    notes: list[Note] = []
    for tensor in tensors:
        stride = tensor.stride() if not tensor.is_contiguous() and _is_dense(tensor) else ()
        on_host = tensor.device.type != device.type
        notes.append(Note(tensor.shape, tensor.dtype, stride, on_host, direct and not on_host))
    given = iter(notes)
    manifest = pytree.tree_map(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, dict(values))
    return Parcel(manifest, tensors)


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda i: -tensor.stride(i))
    return tensor.permute(order).is_contiguous()


def notes_of(manifest: Manifest) -> list[Note]:
    """Returns the notes, in the order of the tensors."""
    return [leaf for leaf in pytree.tree_leaves(manifest) if isinstance(leaf, Note)]


def room_for(manifest: Manifest, device: torch.device) -> Parcel:
    """Returns a parcel to be filled.

    Args:
        manifest: of what comes.
        device: of the receiver's layers.
    """
    rooms: list[Tensor] = []
    for note in notes_of(manifest):
        place = torch.device("cpu") if note.on_host else device
        if note.stride:
            rooms.append(torch.empty_strided(note.shape, note.stride, dtype=note.dtype, device=place))
        else:
            rooms.append(torch.empty(note.shape, dtype=note.dtype, device=place))
    return Parcel(manifest, rooms)


def rebuilt(parcel: Parcel, sent: Mapping[int, Checksum]) -> dict[Any, Any]:
    """Returns the values of a parcel that has come.

    Args:
        parcel: after `exchange`.
        sent: checksums of the same where it came from.

    Raises:
        ValueError: a tensor is not what was sent; names its key.
    """
    notes = [(key, leaf) for key, value in parcel.manifest.items() for leaf in pytree.tree_leaves(value)]
    notes = [(key, leaf) for key, leaf in notes if isinstance(leaf, Note)]
    for i, (key, _) in enumerate(notes):
        if sent[i] != parcel.checksums[i]:
            raise ValueError(f"{key} has arrived with another checksum than it was sent with")
    given = iter(parcel.tensors)
    return pytree.tree_map(lambda leaf: next(given) if isinstance(leaf, Note) else leaf, parcel.manifest)
