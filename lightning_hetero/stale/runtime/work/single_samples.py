"""Batches of one sample and BatchNorm (layer T)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def normalise_single_samples() -> Callable[[], None]:
    """Has BatchNorm use its running statistics where a batch has one value per channel; returns the undo function.

    torch raises there. Stock training seldom meets such a batch, but a rank that fills in may be granted one sample.
    Nothing is registered on a layer: a module that is a hyperparameter is pickled into the checkpoint.
    """
    stock = _BatchNorm.forward

    def forward(layer: _BatchNorm, input: Tensor) -> Tensor:
        single = layer.training and layer.track_running_stats and input.dim() > 1 and input.numel() == input.size(1)
        if not single:
            return stock(layer, input)
        layer.training = False
        try:
            return stock(layer, input)
        finally:
            layer.training = True

    setattr(_BatchNorm, "forward", forward)  # noqa: B010
    return partial(setattr, _BatchNorm, "forward", stock)
