"""``quantum="auto"``: shares in steps that compiled code and tensor cores can do with; pieces of a part (layer P).

Where code is compiled again for each number of samples, each new share costs seconds; so a rank should see few. On a
device with tensor cores libraries choose, and at times look for, other kernels for each. A coarse step costs balance:
half a step, at most, of what a rank should have. An eighth of the equal share is the compromise, see
docs/reference/balanced.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_hetero.shares.bounds import ShareBounds

TILE = 8  # rows that tensor cores take at once
PARTS = 8  # of an equal share


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeNeeds:
    """What a rank's module and device make of the number of samples.

    Attributes:
        compiled: something is compiled, so one sample would be compiled for itself.
        per_size: something is compiled again for each number.
        tiles: tensor cores compute.
    """

    compiled: bool = False
    per_size: bool = False
    tiles: bool = False

    @classmethod
    def of_all(cls, ranks: Sequence[ShapeNeeds]) -> ShapeNeeds:
        """Returns what suits all ranks."""
        return cls(**{name: any(getattr(one, name) for one in ranks) for name in cls.__slots__})

    @property
    def why(self) -> str:
        """In words, why shares have a quantum."""
        if self.per_size:
            return "the module is compiled again for each number of samples"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """What the ranks' parts of a full batch may be.

    Attributes:
        total: samples of the batch.
        world_size: number of ranks.
        bounds: of a piece of a part, as the user and BatchNorm have them.
        quantum: shares are multiples of it.
        pieces: in which a rank computes its part at most; 1: at once.
    """

    total: int
    world_size: int
    bounds: ShareBounds
    quantum: int = 1
    pieces: int = 1

    @classmethod
    def of(cls, total: int, world_size: int, bounds: ShareBounds, quantum: int | None, needs: ShapeNeeds) -> PartSizes:
        """Returns the sizes for a batch; bounds of the user's come before a quantum of ours.

        Args:
            total, world_size, bounds: see the class.
            quantum: the user's; None: as the ranks' devices need it.
            needs: of all ranks.

        Raises:
            ValueError: ``max_samples`` leaves no room for any sample.
        """
        tried = auto_quantum(total, world_size, needs) if quantum is None else quantum
        while quantum is None and tried > 1:
            with suppress(ValueError):
                pieces = bounds.pieces(world_size, total, tried)
                sizes = cls(total=total, world_size=world_size, bounds=bounds, quantum=tried, pieces=pieces)
                sizes.resolve()
                return sizes
            tried //= 2
        pieces = bounds.pieces(world_size, total, tried)
        return cls(total=total, world_size=world_size, bounds=bounds, quantum=tried, pieces=pieces)

    @property
    def least(self) -> int:
        """Samples of a rank that has any."""
        return self.bounds.least

    def of_parts(self, least: int | None = None) -> ShareBounds:
        """Returns the bounds of whole parts."""
        bounds = self.bounds if least is None else replace(self.bounds, least=least)
        return bounds.in_pieces(self.pieces, self.world_size, self.quantum)

    def resolve(self) -> tuple[list[int], list[int]]:
        """Returns least and most samples per rank of a batch.

        Raises:
            ValueError: the bounds admit no split.
        """
        return self.of_parts().resolve(self.world_size, self.total, self.quantum)

    def pieces_of(self, shares: Sequence[int], computed: int) -> list[int]:
        """Returns the samples of the pieces in which a rank computes its part, see `piece_sizes`; one: at once."""
        if self.pieces == 1:
            return [computed]
        caps = self.bounds.caps(self.world_size, self.quantum)
        return piece_sizes(shares, caps, computed, least=self.least, quantum=self.quantum)


def piece_sizes(
    shares: Sequence[int], caps: Sequence[int], computed: int, *, least: int = 1, quantum: int = 1
) -> list[int]:
    """Returns the samples of each piece of a rank's part, as equal as can be; 0: a piece that counts nothing.

    Their number is the same on all ranks, so that the ranks meet in whatever a step communicates: what the rank with
    the most pieces needs. A rank with too few samples for so many makes up for the others by pieces of 0.

    Args:
        shares: samples of the batch, per rank.
        caps: most samples of a piece, per rank; multiples of ``quantum``.
        computed: samples that this rank computes on: its share, or those of a dummy.
        least: samples of a piece that has any, where the part allows it.
        quantum: pieces are multiples of it, if the part is one and has enough.

    >>> piece_sizes([9, 3], [4, 4], 9), piece_sizes([9, 3], [4, 4], 3), piece_sizes([9, 1], [4, 4], 1)
    ([3, 3, 3], [1, 1, 1], [1, 0, 0])
    """

    def pieces(samples: int, wanted: int) -> int:
        return max(1, min(wanted, samples // least))

    number = max(pieces(share, -(-share // cap)) for share, cap in zip(shares, caps, strict=True) if share)
    own = pieces(computed, number)
    unit = quantum if computed % quantum == 0 and own * quantum <= computed else 1
    size, more = divmod(computed // unit, own)
    return [(size + (i < more)) * unit for i in range(own)] + [0] * (number - own)
