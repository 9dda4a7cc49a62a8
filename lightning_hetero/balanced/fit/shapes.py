"""What a rank's module and device make of the number of samples (layer L)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_hetero.balanced.decide.quantum import ShapeNeeds
from lightning_hetero.measure.compiles import compiled_parts
from lightning_hetero.measure.device import device_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["shape_needs"]


def shape_needs(trainer: Trainer) -> ShapeNeeds:
    """Returns what this rank needs, once its module is set up."""
    device = device_of(trainer.strategy.root_device)
    compiled = compiled_parts(trainer.lightning_module, device)
    return ShapeNeeds(compiled=compiled.any, per_size=compiled.per_size, tiles=device.tensor_cores())
