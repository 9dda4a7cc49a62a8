"""How many samples a rank's memory holds: learned from what fitted and what did not (layer P).

    a rank     `MemoryCap`     the largest share that fitted, the least that did not, what is measured of memory
               `MemoryUse`     bytes as a line over samples
    all ranks  `ShareLimits`        the bounds of the split, from what every rank says that it can hold

    most = the least of   GROWTH (1.25) x the largest that fitted, where memory is limited or once it was short
                          HEADROOM (0.9) x the least that did not fit
                          samples at which the line reaches HEADROOM x the memory there is
           but never less than the largest that fitted

All numbers are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.solvers import minimax_none_or_least
from lightning_hetero.types import AffineCost, Allocation

GROWTH, HEADROOM = 1.25, 0.9
_UNSTEADY = 2  # first steps, in which gradients, buckets and the optimizer's state come into being


class MemoryUse:
    """Bytes of a step as a line over its samples, through the smallest and the largest step seen.

    What does not grow with samples, parameters, gradients, their buckets and the optimizer's state, is the line's value
    at 0. As long as all steps had one size, it is what was there before the step, so that gradients made in it count as
    if they grew with samples: too few samples rather than too many.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._base_bytes = 0.0
        self._peaks: dict[int, float] = {}  # by samples: of the smallest and of the largest step

    def wants(self, samples: int) -> bool:
        """Whether a step of so many samples would tell something new."""
        if samples < 1 or self._steps <= _UNSTEADY:
            return samples > 0
        return not min(self._peaks, default=samples + 1) <= samples <= max(self._peaks, default=samples)

    def observe(self, samples: int, base_bytes: float, peak_bytes: float) -> None:
        """Takes in a step: the bytes in use before it, and the most during it."""
        self._steps += 1
        if samples < 1 or self._steps <= _UNSTEADY:
            return
        self._base_bytes = base_bytes
        self._peaks[samples] = peak_bytes
        ends = min(self._peaks), max(self._peaks)
        self._peaks = {n: self._peaks[n] for n in ends}

    def most(self, limit_bytes: float) -> int | None:
        """Returns the samples that fit into `HEADROOM` of ``limit_bytes``; None: nothing is known of it."""
        if not self._peaks:
            return None
        small, large = min(self._peaks), max(self._peaks)
        rise = self._peaks[large] - (self._peaks[small] if small < large else self._base_bytes)
        per_sample = rise / ((large - small) if small < large else large)
        if per_sample <= 0:
            return None
        at_zero = self._peaks[large] - per_sample * large
        return max(0, math.floor((HEADROOM * limit_bytes - at_zero) / per_sample))


class MemoryCap:
    """What one rank knows about its memory.

    Args:
        careful: the device has its own memory, so shares grow step by step from the start; else only once a step
            did not fit.

    Attributes:
        safe: the largest step that fitted [samples]; 0: none was seen.
        failed: the smallest that did not; None: none was seen.
        estimate: what is measured of memory allows [samples]; None: not known.
    """

    def __init__(self, *, careful: bool = False) -> None:
        self.careful = careful
        self.safe = 0
        self.failed: int | None = None
        self.estimate: int | None = None

    def fits(self, samples: int) -> None:
        """A step, or a piece of one, of so many samples has fitted."""
        if self.failed is None or samples < self.failed:
            self.safe = max(self.safe, samples)

    def fails(self, samples: int) -> None:
        """It has not. If as many have fitted before, samples differ in size, and some headroom is left from now on."""
        self.failed = samples if self.failed is None else min(self.failed, samples)
        if self.safe >= self.failed:
            self.safe = min(self.failed - 1, math.floor(HEADROOM * self.failed))

    def goes_on(self, most: int) -> None:
        """Takes over what an earlier run has learned. Only a careful device tries again whether more would fit."""
        self.safe, self.failed = most, None if self.careful else most + 1

    def untried(self, samples: int) -> bool:
        """Whether no step as large has fitted yet."""
        return samples > self.safe

    def exceeded_by(self, samples: int) -> bool:
        """Whether it is known that so many do not fit."""
        return self.failed is not None and samples >= self.failed

    @property
    def most(self) -> int | None:
        """The most samples that this rank should get; None: as many as it likes."""
        if not self.safe or (self.failed is None and not self.careful):
            return None
        most = max(self.safe + 1, math.floor(GROWTH * self.safe))
        if self.failed is not None:
            most = min(most, math.floor(HEADROOM * self.failed))
        if self.estimate is not None:
            most = min(most, self.estimate)
        return max(self.safe, most)


def held_bounds(
    lower: Sequence[int], upper: Sequence[int], most: Sequence[int | None], *, total: int, quantum: int = 1,
    least: int = 1,
) -> tuple[list[int], list[int], bool]:  # fmt: skip
    """Returns the bounds of a split that no rank's memory is too small for, and whether there is one.

    If the ranks together hold less than ``total``, each gets more in proportion to what it holds, and computes its
    share in pieces.

    Args:
        lower, upper: bounds per rank, multiples of ``quantum`` that admit a split of ``total``.
        most: samples that each rank says it can hold; None: as many as it likes.
        total: samples to be split.
        quantum: shares are multiples of this.
        least: a rank gets none or at least this many.

    >>> held_bounds([2, 2], [16, 16], [None, 5], total=16)
    ([2, 2], [16, 5], True)
    >>> held_bounds([2, 2], [16, 16], [3, 5], total=16)
    ([2, 2], [6, 10], False)
    """
    held = [b if m is None else min(b, m // quantum * quantum) for b, m in zip(upper, most, strict=True)]
    held = [b if b >= least else 0 for b in held]
    enough = sum(held) >= total
    if not enough:
        room = math.fsum(b if m is None else m for b, m in zip(upper, most, strict=True))
        held = [
            b if m is None else min(b, math.ceil(m * total / room / quantum) * quantum)
            for b, m in zip(upper, most, strict=True)
        ]
        if sum(held) < total:
            held = list(upper)
    return [min(a, b) for a, b in zip(lower, held, strict=True)], held, enough


class ShareLimits:
    """Least and most samples per rank: the user's bounds, as far as the ranks can hold them. The same on every rank.

    Attributes:
        lower, upper: samples per rank of a full global batch; multiples of ``quantum``.
        total: samples of a full global batch.
        quantum: shares are multiples of this.
        least: a rank gets none or at least this many.
        most_samples: per rank, what it has last said that it can hold; None: as many as it likes.
        fit: whether the ranks together hold a global batch by that; if not, some compute their shares in pieces.
    """

    def __init__(self) -> None:
        self.lower: list[int] = []
        self.upper: list[int] = []
        self.total, self.quantum, self.least = 0, 1, 1
        self.most_samples: tuple[int | None, ...] = ()
        self.fit = True
        self._wanted: tuple[list[int], list[int]] = ([], [])  # by the user
        self._restored: tuple[int | None, ...] = ()  # for the next start
        self._proved: dict[int, int] = {}  # by rank, of those with a limit: the most that it has computed within it

    def start(self, lower: list[int], upper: list[int], *, total: int, quantum: int, least: int) -> None:
        """Opens a run with the user's bounds; what ranks have said that they can hold stays."""
        self._wanted = lower, upper
        self.total, self.quantum, self.least = total, quantum, least
        if len(self.most_samples) != len(lower):
            known, self._restored = self._restored, ()
            self.most_samples = known if len(known) == len(lower) else (None,) * len(lower)
        self._hold()

    def take(self, most_samples: Sequence[int | None], samples: Sequence[float], compute_s: Sequence[float]) -> bool:
        """Takes in what each rank says that it can hold; see `BalancePolicy.limit`. Returns whether that is new."""
        for rank, most in enumerate(self.most_samples):
            if most is not None and compute_s[rank] > 0 and samples[rank] <= most:
                self._proved[rank] = max(int(samples[rank]), self._proved.get(rank, 0))
        if tuple(most_samples) == self.most_samples:
            return False
        self.most_samples = tuple(most_samples)
        self._hold()
        return True

    def alike(self) -> Allocation:
        """Returns the split for ranks that are equally fast."""
        cost = AffineCost(fixed_s=0.0, per_sample_s=1.0)
        return minimax_none_or_least(
            [cost] * len(self.lower), self.total // self.quantum * self.quantum, least=self.least,
            lower=self.lower, upper=self.upper, quantum=self.quantum,
        )  # fmt: skip

    def known(self) -> list[int | None]:
        """Returns what ranks are known to hold, without what they would try next."""
        if not self.most_samples:
            return list(self._restored)
        told = enumerate(self.most_samples)
        return [None if most is None else min(most, self._proved.get(rank, most)) for rank, most in told]

    def restore(self, known: Sequence[int | None]) -> None:
        """Takes over, at the next `start`, what the ranks of another run could hold."""
        self._restored = tuple(known)

    def _hold(self) -> None:
        lower, upper = self._wanted
        self.lower, self.upper, self.fit = held_bounds(
            lower, upper, self.most_samples, total=self.total, quantum=self.quantum, least=self.least
        )
        if not self.alike().ok:  # e.g. none or two per rank for BatchNorm
            self.lower, self.upper, self.fit = lower, upper, False
