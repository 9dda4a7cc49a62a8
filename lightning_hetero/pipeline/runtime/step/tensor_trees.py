"""Nests of tensors: the tensors in tuples, lists, dicts, registered classes; other tensors instead; the loss (layer T).

What mostly passes between layers is one tensor, for which no tree need be walked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # private by name, but where torch registers its own classes

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


def detached(value: Any) -> Any:
    """Returns a nest with its tensors off their graph."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach() if tensor.requires_grad else tensor, value)


def weighted_loss(output: Any, weight: float, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Returns the loss in what ``training_step`` returned, as it goes into the gradient of the global batch.

    Args:
        weight: of the micro-batch.
        scale: e.g. a gradient scaler's; None: unscaled.

    Raises:
        TypeError: there is no loss, or it is no single number.
    """
    loss = loss_of(output)
    if loss.numel() != 1:
        raise TypeError(
            f"the loss of a training step must be a tensor with one element, got shape {tuple(loss.shape)}"
        )
    loss = loss * weight
    return loss if scale is None else scale(loss)


def loss_of(output: Any) -> Tensor:
    """Returns the loss in what ``training_step`` returned.

    Raises:
        TypeError: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, Tensor):
        return loss
    raise TypeError(
        f"training_step returned {type(output).__name__}; a pipeline needs a loss from every micro-batch: a tensor,"
        " or a dict with the key 'loss' (None, to skip a batch, is not possible on several devices)"
    )


def _only(others: Iterable[Tensor]) -> Tensor:
    (tensor,) = others
    return tensor
