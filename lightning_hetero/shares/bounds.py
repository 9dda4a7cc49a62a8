"""Least and most samples per rank, as the user gives them and as a global batch admits them (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

Bound = int | Sequence[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBounds:
    """Lower and upper number of samples per rank in a full global batch.

    Args:
        lower: least samples per rank, one number or one per rank; ``None``: a quarter of the equal share.
        upper: most samples per rank, one number or one per rank; ``None``: four times the equal share.
        least: a rank gets no sample or at least this many; 2 where BatchNorm cannot do with one.
        usual: least by default where all ranks can have it; 2 where one sample would be compiled for itself.

    Raises:
        ValueError: a bound is no number of samples.
    """

    lower: Bound = None
    upper: Bound = None
    least: int = 1
    usual: int = 1

    def __post_init__(self) -> None:
        _check_numbers("min_samples", self.lower)
        _check_numbers("max_samples", self.upper)

    def check_ranks(self, world_size: int, total: int | None = None) -> None:
        """Checks what can be known before the train loader is.

        Args:
            world_size: number of ranks.
            total: samples of the global batch, as far as they are known.

        Raises:
            ValueError: a list of the wrong length, bounds that cross, or least samples that are more than ``total``.
        """
        low = per_rank("min_samples", self.lower, world_size, 0)
        _check_order(low, per_rank("max_samples", self.upper, world_size, max(low)))
        if total is not None:
            replace(self, upper=None).resolve(world_size, total)

    def resolve(self, world_size: int, total: int, quantum: int = 1) -> tuple[list[int], list[int]]:
        """Returns bounds per rank as multiples of ``quantum``.

        Raises:
            ValueError: the bounds have the wrong length, cross, or admit no split of ``total``.
        """
        if total < self.least:
            raise ValueError(
                f"a global batch of {total} samples is less than the {self.least} that BatchNorm needs: raise it to at"
                f" least {self.least}"
            )
        equal = total / world_size
        least = -(-self.least // quantum) * quantum
        # At least one sample by default: a rank with none still runs a whole step on a dummy sample.
        usual = self.usual if self.usual <= equal else 1
        default_low = max(quantum, least, usual, _down(int(equal / 4), quantum))
        default_up = min(total, -(-math.ceil(4 * equal) // quantum) * quantum)
        low = per_rank("min_samples", self.lower, world_size, default_low)
        up = per_rank("max_samples", self.upper, world_size, default_up)
        if self.lower is None:  # a small explicit maximum also lowers the default minimum
            low = [min(a, b) if b >= least else 0 for a, b in zip(low, up, strict=True)]
            if sum(low) > total >= least > quantum:  # not enough for all: some ranks rest
                low = [0] * world_size
        if self.least > 1 and not low[0] and up[0] >= least and sum(low) + least <= total:
            low[0] = least  # BatchNorm's statistics are rank 0's, as in any DDP
        low = [max(-(-a // quantum) * quantum, least) if a else 0 for a in low]
        up = [_down(b, quantum) if b >= least else 0 for b in up]
        if sum(low) > total:
            asks = "the default minimum" if self.lower is None else f"min_samples={self.lower!r}"
            raise ValueError(
                f"{asks} asks for {sum(low)} samples on {world_size} ranks{self._why()}, but the global batch has"
                f" {total}; lower min_samples or raise the global batch to at least {sum(low)}"
            )
        _check_order(low, up, f" (multiples of {quantum}{self._why()})" if quantum > 1 else "")
        if sum(up) < total:
            raise ValueError(
                f"max_samples={self.upper!r} admits {sum(up)} samples on {world_size} ranks{self._why()}, but the"
                f" global batch has {total}; raise max_samples or lower the global batch to at most {sum(up)}"
            )
        return low, up

    def pieces(self, world_size: int, total: int, quantum: int = 1) -> int:
        """Returns in how many pieces ranks compute their parts at most, where all of ``total`` fits in no other way.

        Raises:
            ValueError: no rank has room for any sample.
        """
        if self.upper is None:
            return 1
        room = sum(self.caps(world_size, quantum))
        if room <= 0:
            raise ValueError(f"max_samples={self.upper!r} leaves no room for any sample{self._why()}; raise it")
        return -(-total // room)

    def caps(self, world_size: int, quantum: int = 1) -> list[int]:
        """Returns the most samples of a piece of each rank, where ``upper`` is given."""
        assert self.upper is not None
        least = -(-self.least // quantum) * quantum
        return [_down(b, quantum) if b >= least else 0 for b in per_rank("max_samples", self.upper, world_size, 0)]

    def in_pieces(self, number: int, world_size: int, quantum: int = 1) -> ShareBounds:
        """Returns the bounds of parts that are computed in so many pieces, each within ``upper``."""
        if number == 1:
            return self
        return replace(self, upper=[number * cap for cap in self.caps(world_size, quantum)])

    def among(self, ranks: Sequence[int]) -> ShareBounds:
        """Returns the bounds of these ranks."""
        lower, upper = ([b[r] for r in ranks] if isinstance(b, Sequence) else b for b in (self.lower, self.upper))
        return replace(self, lower=lower, upper=upper)

    def _why(self) -> str:
        return f", none or at least {self.least} per rank for BatchNorm" if self.least > 1 else ""


def _down(value: int, quantum: int) -> int:
    return value // quantum * quantum


def per_rank(name: str, value: Bound, world_size: int, default: int) -> list[int]:
    """Returns a bound for each rank: as given, or the default.

    Raises:
        ValueError: a list of another length.
    """
    values = [default if value is None else value] * world_size if not isinstance(value, Sequence) else list(value)
    if len(values) != world_size:
        raise ValueError(f"{name} lists {len(values)} ranks, but there are {world_size}: give one number per rank")
    return values


def _check_numbers(name: str, value: object) -> None:
    if value is None:
        return
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    values = cast("Sequence[object]", value) if listed else [cast("object", value)]
    for rank, number in enumerate(values):
        if type(number) is not int or number < 0:
            of = f" of rank {rank}" if listed else ""
            raise ValueError(f"{name}={number!r}{of} must be a whole number >= 0 (samples), or a list of one per rank")


def _check_order(low: Sequence[int], up: Sequence[int], why: str = "") -> None:
    for rank, (a, b) in enumerate(zip(low, up, strict=True)):
        if a > b:
            raise ValueError(
                f"rank {rank} must get at least {a} and at most {b} samples, which no number meets{why}; lower"
                " min_samples or raise max_samples"
            )
