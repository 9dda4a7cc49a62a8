"""Manual optimization by ``loss.backward()`` where it should be ``self.manual_backward(loss)`` (layer L).

Under stock DDP the former synchronises nothing: each rank trains for itself, without a word. A sharded model
synchronises either, but only the latter weights the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.balanced.runtime.pieces import leaves
from lightning_hetero.balanced.runtime.shard import fully_sharded


class PlainBackward:
    """Makes ``loss.backward()`` in a training step what ``self.manual_backward(loss)`` is.

    Attributes:
        manual: whether a backward pass of Lightning's runs, which needs no help.
    """

    def __init__(self) -> None:
        self.manual = False

    @contextmanager
    def taken(self, module: LightningModule, model: Any) -> Iterator[None]:
        """Around a training step.

        Args:
            module: the user's.
            model: as it is trained, wrapped or not.
        """
        original = torch.Tensor.backward

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.manual or "inputs" in kwargs or len(args) > 3 or not _synchronised(loss, model):
                return original(loss, *args, **kwargs)
            return module.manual_backward(loss, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.Tensor.backward = original  # type: ignore[method-assign]


def _synchronised(loss: Tensor, model: Any) -> bool:
    """Whether a backward pass reaches parameters that are sharded, or that DDP keeps equal.

    Raises:
        RuntimeError: it reaches some of them only, and DDP was not told that this may be.
    """
    if not isinstance(model, DistributedDataParallel):
        return fully_sharded(model) and any(isinstance(leaf, nn.Parameter) for leaf in leaves(loss))
    ours = {id(p) for p in model.parameters() if p.requires_grad}
    reached = {id(leaf) for leaf in leaves(loss)} & ours
    if reached and reached != ours and not model.find_unused_parameters:
        raise RuntimeError(
            f"loss.backward() in training_step reaches {len(reached)} of {len(ours)} trained parameters. Alone it would"
            " synchronise nothing between the ranks, as under strategy='ddp', and self.manual_backward(loss) waits for"
            " all of them: use strategy='hetero_balanced_find_unused_parameters_true'"
        )
    return bool(reached)
