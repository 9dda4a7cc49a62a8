"""Nests of tuples, lists, dicts and registered classes: the tensors in them, and others put in their place (layer T).

What mostly passes between layers is one tensor, for which no tree need be walked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # private by name, but where torch registers its own classes

__all__ = ["split", "split_call"]

_HOLE = object()  # where a tensor was


def split(value: Any) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Any]]:
    """Returns the tensors of a nest, in order, and what makes such a nest of as many others.

    The latter does not keep the tensors.
    """
    if isinstance(value, Tensor):
        return [value], _only
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    leaves = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def joined(others: Iterable[Tensor]) -> Any:
        come = iter(others)
        return pytree.tree_unflatten([next(come) if leaf is _HOLE else leaf for leaf in leaves], spec)

    return tensors, joined


def split_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """As `split`, for the arguments of a call."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]], _only_argument
    return split((args, dict(kwargs)))


def _only(others: Iterable[Tensor]) -> Tensor:
    (tensor,) = others
    return tensor


def _only_argument(others: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(others), {}
