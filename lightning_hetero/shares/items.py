"""Work counted in items, e.g. tokens, and the samples that it is worth (layer P).

A step with long sequences takes long on any device. So predictors get a rank's work, not its samples: in samples
of mean work, so that they, their solvers and bounds go on speaking of samples.

    x_r = work_r / m      instead of n_r;   m = sum work / sum samples, over all ranks and about the last 100 records

m is the same for all ranks, so it cancels out between them: only their common scale follows it. A mean per rank would
be noise in the shares where samples are dealt out at random, and where a part of more samples is padded to a longer
one, it made steps no shorter (simulated: lognormal lengths of sigma 0.3 and 0.8). Without counted work m is exactly 1.

All ranks must come to the same numbers: + - * / and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.types import SpeedSample

_MEMORY = 100  # records


class WorkPerSample:
    """The mean work of a sample.

    Attributes:
        mean: over all ranks; 1 before any is known.
    """

    def __init__(self) -> None:
        self.mean = 1.0
        self._records = 0
        self._work = self._samples = 0.0  # of a record of all ranks, means

    def add(self, records: Sequence[SpeedSample]) -> None:
        """Takes in one record per rank; those whose work is not known tell nothing."""
        known = [r for r in records if r.work > 0 and r.samples > 0]
        if not known:
            return
        self._records = min(self._records + 1, _MEMORY)
        self._work += (sum(r.work for r in known) - self._work) / self._records
        self._samples += (sum(r.samples for r in known) - self._samples) / self._records
        self.mean = self._work / self._samples

    def in_samples(self, samples: Sequence[float], work: Sequence[float]) -> list[float]:
        """Returns each rank's work in samples of mean work; as many as it has, if its work is not known (NaN)."""
        mean = self.mean
        return [w / mean if w > 0 else float(n) for n, w in zip(samples, work, strict=True)]
