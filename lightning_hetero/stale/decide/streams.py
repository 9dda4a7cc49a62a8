"""Finite streams, one of each rank's own: how many samples are known to come, and the global steps they make (layer P).

A position of the epoch's order stands for a sample of whoever is assigned it, so an assignment says only how many.
Every rank reads ahead of what it asks for, and says with each claim and push how many samples it has read and whether
that was all:

    all known samples   | batch 0 | batch 1 | batch 2 |  ..      a batch begins once it is known to be whole,
                                                                 or when all streams are through

A rank that is not through has read one global batch and one sample more than it was assigned. So there are as many
samples behind the present batch, unless all are through, and a rank that begins its part of the last batch knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNLIMITED = 2**31 - 1  # batches of an epoch without a limit


@dataclass(slots=True)
class Stream:
    """What one rank's stream has, in samples of the epoch.

    Attributes:
        rank: whose it is.
        read: read so far.
        through: whether these were all.
        used: trained, or left out because gradients were not finite.
    """

    rank: int
    read: int
    through: bool
    used: int = 0


class Streams:
    """The streams of an epoch; see the module.

    Args:
        numbers: what `numbers` has returned on a worker, where all have told what they have read.

    Attributes:
        ends: cumulative samples behind each known global step; where an epoch is resumed, behind those before in any
            strictly increasing way.
        used: samples of all ranks that were used before it was resumed.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._batch, self._most, drop_last, first, *told = numbers
        self._drop_last = bool(drop_last)
        four = zip(*[iter(told)] * 4, strict=True)
        self._of = {rank: Stream(rank, read, bool(through), used) for rank, read, through, used in four}
        self.used = sum(stream.used for stream in self._of.values())
        self.ends = list(range(self.used - first + 1, self.used + 1))
        self.grow()

    @staticmethod
    def numbers(batch: int, most: int, *, drop_last: bool, first: int, streams: Sequence[Stream]) -> list[int]:
        """Returns an epoch's beginning as numbers that travel.

        Args:
            batch: samples of a whole global batch.
            most: global steps at most.
            drop_last: leave out a last batch that is not whole.
            first: the global step at which it is resumed.
            streams: of all ranks.
        """
        of_all = [n for s in streams for n in (s.rank, s.read, int(s.through), s.used)]
        return [batch, most, int(drop_last), first, *of_all]

    @staticmethod
    def reserve(batch: int, *, drop_last: bool) -> int:
        """Returns how many samples a rank has read that it was not assigned, unless its stream is through."""
        return 2 * batch if drop_last else batch + 1

    def tell(self, rank: int, read: int, through: bool) -> None:
        """A rank has read so many samples, and its stream is through or not."""
        stream = self._of[rank]
        stream.read, stream.through = read, through

    def use(self, rank: int, samples: int) -> None:
        """So many samples of a rank's stream are used."""
        self._of[rank].used += samples

    def used_by_rank(self) -> dict[int, int]:
        """Returns the samples of each rank's stream that are used."""
        return {rank: stream.used for rank, stream in self._of.items()}

    def left(self, rank: int) -> int:
        """Returns how many samples a rank has read and not used."""
        return self._of[rank].read - self._of[rank].used

    def grow(self) -> list[int]:
        """Adds the ends of the batches that are known by now to `ends`, and returns them."""
        known, before = sum(stream.read for stream in self._of.values()), len(self.ends)
        while len(self.ends) < self._most and known - self._end >= self._batch:
            self.ends.append(self._end + self._batch)
        if self._through and known > self._end and not self._drop_last and len(self.ends) < self._most:
            self.ends.append(known)
        return self.ends[before:]

    @property
    def total(self) -> int:
        """Samples of the epoch; 0 while they are not known."""
        return self._end if self._through or len(self.ends) >= self._most else 0

    @property
    def _end(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def _through(self) -> bool:
        return all(stream.through for stream in self._of.values())
