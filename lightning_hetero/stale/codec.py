"""Trees of plain values and tensors as bytes, without pickle (layer T).

    b"HETTREE1" | length of the head: uint64 | head: JSON | tensors, each at a multiple of 64 bytes

The head says what the tree is: numbers, strings and None as they are in JSON, everything else as an object with one key
that names its kind. Nothing that is decoded can run code.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

__all__ = ["decode", "encode"]

_MAGIC = b"HETTREE1"
_LENGTH = struct.Struct("<8sQ")
_ALIGN_BYTES = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip


def encode(tree: Any) -> bytes:
    """Returns a tree of dict, list, tuple, None, bool, int, float, str and (dense) Tensor as bytes.

    Keys of a dict may be str, int, float, bool or None. Tensors come back on the CPU, contiguous, without history.

    Raises:
        TypeError: something else is in it; the message says where.
    """
    tensors: list[bytes] = []
    offset = 0

    def describe(value: Any, path: str) -> Any:
        nonlocal offset
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            name = str(value.dtype).removeprefix("torch.")
            if name not in _DTYPES or value.layout is not torch.strided:
                raise TypeError(
                    f"{path or 'the tree'} is a {value.layout} tensor of {name}; it cannot be encoded"
                )
            data = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            at, padding = offset, -len(data) % _ALIGN_BYTES
            tensors.append(data + bytes(padding))
            offset += len(data) + padding
            return {"tensor": [name, list(value.shape), at]}
        if isinstance(value, (bool, int, float, str)):  # a subclass, e.g. of NumPy
            plain = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
            return plain(value)
        if isinstance(value, dict):
            return {"dict": [[key(k, path), describe(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [describe(v, f"{path}[{i}]") for i, v in enumerate(value)]}
        raise TypeError(
            f"{path or 'the tree'} is a {type(value).__name__}; only plain values and tensors are encoded"
        )

    def key(value: Any, path: str) -> Any:
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"{path or 'the tree'} has the key {value!r}: a {type(value).__name__} cannot be one"
            )
        return describe(value, path)

    head = json.dumps(describe(tree, "")).encode()
    start = _LENGTH.pack(_MAGIC, len(head)) + head
    return b"".join([start, bytes(-len(start) % _ALIGN_BYTES), *tensors])


def decode(data: bytes) -> Any:
    """Returns the tree.

    Raises:
        ValueError: these are not the bytes of a tree, or not all of them.
    """
    try:
        magic, length = _LENGTH.unpack_from(data)
        if magic != _MAGIC or length > len(data) - _LENGTH.size:
            raise ValueError("a wrong beginning, or it was cut off")
        head = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        start = -(-(_LENGTH.size + length) // _ALIGN_BYTES) * _ALIGN_BYTES
        return _build(head, memoryview(data)[start:])
    except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes are not an encoded tree: {error}") from error


def _build(node: Any, tensors: memoryview) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("a bare list in the head")
        return node
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _build(value, tensors) for key, value in content}
    if kind == "list":
        return [_build(value, tensors) for value in content]
    if kind == "tuple":
        return tuple(_build(value, tensors) for value in content)
    if kind == "tensor":
        name, shape, at = content
        value = torch.empty(shape, dtype=_DTYPES[name])
        size = value.numel() * value.dtype.itemsize
        if not 0 <= at <= at + size <= len(tensors):
            raise ValueError(f"a tensor of {size} bytes at {at} lies outside the {len(tensors)} there are")
        if size:
            flat = torch.frombuffer(bytearray(tensors[at : at + size]), dtype=torch.uint8)
            value.reshape(-1).view(torch.uint8).copy_(flat)
        return value
    raise ValueError(f"unknown kind {kind!r}")
