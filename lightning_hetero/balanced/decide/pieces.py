"""In which pieces a rank computes its part of a batch, where ``max_samples`` is less than the part (layer P)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["piece_sizes"]


def piece_sizes(
    shares: Sequence[int], caps: Sequence[int], rank: int, *, computed: int, least: int = 1, quantum: int = 1
) -> list[int]:
    """Returns the samples of each piece of a rank's part, as equal as can be; 0: a piece that counts nothing.

    Their number is the same on all ranks, so that the ranks meet in whatever a step communicates: what the rank with
    the most pieces needs. A rank with too few samples for so many makes up for the others by pieces of 0.

    Args:
        shares: samples of the batch, per rank.
        caps: most samples of a piece, per rank; multiples of ``quantum``.
        rank: whose pieces.
        computed: samples that the rank computes on: its share, or those of a dummy.
        least: samples of a piece that has any, where the part allows it.
        quantum: pieces are multiples of it, if the part is one and has enough.

    >>> piece_sizes([9, 3], [4, 4], 0, computed=9), piece_sizes([9, 3], [4, 4], 1, computed=3)
    ([3, 3, 3], [1, 1, 1])
    >>> piece_sizes([9, 1], [4, 4], 1, computed=1)
    [1, 0, 0]
    """
    number = max(_pieces(share, -(-share // cap), least) for share, cap in zip(shares, caps, strict=True) if share)
    own = _pieces(computed, number, least)
    unit = quantum if computed % quantum == 0 and own * quantum <= computed else 1
    size, more = divmod(computed // unit, own)
    return [(size + (i < more)) * unit for i in range(own)] + [0] * (number - own)


def _pieces(samples: int, wanted: int, least: int) -> int:
    return max(1, min(wanted, samples // least))
