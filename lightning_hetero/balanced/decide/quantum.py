"""``quantum="auto"``: shares in steps that compiled code and tensor cores can do with (layer P).

Where code is compiled anew for each number of samples, each new share costs seconds; so a rank should see few. On a
device with tensor cores libraries choose, and at times look for, other kernels for each. A coarse step costs balance:
half a step, at most, of what a rank should have. An eighth of the equal share is the compromise, see
docs/reference/balanced.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ShapeNeeds", "auto_quantum"]

TILE = 8  # rows that tensor cores take at once
PARTS = 8  # of an equal share


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeNeeds:
    """What a rank's module and device make of the number of samples.

    Attributes:
        compiled: something is compiled, so one sample would be compiled for itself.
        per_size: something is compiled anew for each number.
        tiles: tensor cores compute.
    """

    compiled: bool = False
    per_size: bool = False
    tiles: bool = False

    @classmethod
    def of_all(cls, ranks: Iterable[ShapeNeeds]) -> ShapeNeeds:
        """Returns what suits all ranks."""
        needs = list(ranks)
        return cls(
            compiled=any(n.compiled for n in needs),
            per_size=any(n.per_size for n in needs),
            tiles=any(n.tiles for n in needs),
        )

    @property
    def why(self) -> str:
        """In words, why shares have a quantum."""
        if self.per_size:
            return "the module is compiled anew for each number of samples"
        return "tensor cores compute in tiles"


def auto_quantum(total: int, world_size: int, needs: ShapeNeeds) -> int:
    """Returns of what the shares of a batch of ``total`` samples are multiples: a power of two that divides it.

    It is at most an eighth of the equal share, so 1 where that has fewer than 16 samples.

    >>> auto_quantum(256, 4, ShapeNeeds(per_size=True))
    8
    >>> auto_quantum(256, 4, ShapeNeeds())
    1
    """
    if needs.per_size:
        most = total
    elif needs.tiles:
        most = TILE
    else:
        return 1
    quantum = 1
    while 2 * quantum <= most and 2 * quantum * PARTS * world_size <= total and total % (2 * quantum) == 0:
        quantum *= 2
    return quantum
