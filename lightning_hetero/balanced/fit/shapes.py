"""What a rank's module and device make of the number of samples (layer L)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_hetero.balanced.decide.quantum import ShapeNeeds
from lightning_hetero.measure.compiles import compiled_parts

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["shape_needs"]

_HALF = ("16", "transformer-engine")  # in the words for precision


def shape_needs(trainer: Trainer) -> ShapeNeeds:
    """Returns what this rank needs, once its module is set up."""
    device = trainer.strategy.root_device
    compiled = compiled_parts(trainer.lightning_module, device)
    half = any(word in str(trainer.precision) for word in _HALF)
    return ShapeNeeds(compiled=compiled.any, per_size=compiled.per_size, tiles=half and device.type == "cuda")
