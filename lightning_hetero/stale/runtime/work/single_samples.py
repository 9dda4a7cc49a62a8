"""Batches of one sample and BatchNorm (layer T)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def normalise_single_samples(module: nn.Module) -> Callable[[], None]:
    """Has BatchNorm use its running statistics where a batch has one value per channel; returns the undo function.

    torch raises there. Stock training seldom meets such a batch, but a rank that fills in may be granted one sample.
    """
    handles: list[Any] = []
    spared: list[_BatchNorm] = []

    def before(layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        if layer.training and inputs and inputs[0].dim() > 1 and inputs[0].numel() == inputs[0].size(1):
            layer.training = False
            spared.append(layer)

    def after(layer: _BatchNorm, *_: Any) -> None:
        if spared and spared[-1] is layer:
            spared.pop().training = True

    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            handles.append(layer.register_forward_pre_hook(before))
            handles.append(layer.register_forward_hook(after, always_call=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
