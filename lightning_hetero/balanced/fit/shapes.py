"""What a rank's module and device make of the number of samples (layer L)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_hetero.balanced.decide.quantum import ShapeNeeds
from lightning_hetero.measure.compiles import compiled_parts
from lightning_hetero.measure.device import Device, device_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["shape_needs", "warn_of_tuning"]


def shape_needs(trainer: Trainer) -> ShapeNeeds:
    """Returns what this rank needs, once its module is set up."""
    device = device_of(trainer.strategy.root_device)
    compiled = compiled_parts(trainer.lightning_module, device)
    return ShapeNeeds(compiled=compiled.any, per_size=compiled.per_size, tiles=device.tensor_cores())


def warn_of_tuning(device: Device) -> None:
    """Warns where each new number of samples makes a library look for its best kernels."""
    if device.tunes_each_shape():
        rank_zero_warn(
            "torch.backends.cudnn.benchmark is on: cuDNN tries its kernels anew for every number of samples, and"
            " hetero_balanced changes them. Trainer(benchmark=False) switches it off; a larger quantum keeps the"
            " numbers few"
        )
