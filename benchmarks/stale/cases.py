"""The emulated clusters, the policies with their tuned settings, and the seeds, fixed in one place.

Time is counted in milliseconds of simulated time: a sample takes 1 ms on a worker of speed 1, as does the start of a
chunk; a chunk of n samples on a worker of speed v takes (1 + n) / v. A step of 64 samples on four equal workers is 17
ms of compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.stale.policies import WRITTEN
from benchmarks.stale.simulator import Costs
from benchmarks.stale.speeds import SimulatedSpeeds
from lightning_hetero.stale.decide import policy as policies

SAMPLE_S = 0.001
LAUNCH_S = 0.001
# Parameters to the worker: as long as a sample. Gradients go to the server beside the backward pass, bucket by bucket,
# so only the last of five buckets is waited for. The barrier engines are charged the same for their all-reduce, which
# is generous: it moves the parameters twice, and measured 2.5 times as long as a push and a pull through memory.
COSTS = Costs(pull_s=0.001, push_s=0.0002)

SEEDS = tuple(range(100, 124))  # that chose nothing
FEW = 5  # of them, for the policies that are not the default


@dataclass(frozen=True, kw_only=True)
class Case:
    """One emulated cluster.

    Attributes:
        name: as in the tables.
        speeds: by worker.
        spells: every worker becomes 4-10 times slower for exp(100 ms) every exp(400 ms).
        jitter: relative standard deviation of each chunk's time, log-normal with mean 1.
        swap_s: when the speeds are reversed.
        held_out: kept for the end: a kind of cluster that no choice has seen.
    """

    name: str
    speeds: tuple[float, ...]
    spells: bool = False
    jitter: float = 0.0
    swap_s: float | None = None
    held_out: bool = False

    @property
    def calm(self) -> bool:
        """Whether speeds do not vary at random, so that the goals for calm clusters apply."""
        return not self.spells and self.jitter == 0.0

    def build(self, seed: int, horizon_s: float = 120.0) -> SimulatedSpeeds:
        """Returns the speeds of one run; after ``horizon_s`` there are no more spells."""
        ranks = range(len(self.speeds))
        pieces = [self._pieces(rank, np.random.default_rng([seed, rank, 1]), horizon_s) for rank in ranks]
        return SimulatedSpeeds(pieces, sample_work=SAMPLE_S, launch_work=LAUNCH_S)

    def _pieces(self, rank: int, rng: np.random.Generator, horizon_s: float) -> list[tuple[float, float]]:
        base = self.speeds[rank]
        if self.swap_s is not None:
            return [(0.0, base), (self.swap_s, self.speeds[::-1][rank])]
        pieces = [(0.0, base)]
        while self.spells and pieces[-1][0] < horizon_s:
            begin_s = pieces[-1][0] + float(rng.exponential(0.4))
            end_s = begin_s + float(rng.exponential(0.1))
            pieces += [(begin_s, base / float(rng.uniform(4.0, 10.0))), (end_s, base)]
        return pieces


class JitteredWork:
    """`SimulatedSpeeds.work_s` times log-normal noise of mean 1; every worker draws from its own stream, in order."""

    def __init__(self, speeds: SimulatedSpeeds, workers: int, jitter: float, seed: int) -> None:
        self.speeds = speeds
        self._sigma = float(np.sqrt(np.log1p(jitter**2)))
        self._rngs = [np.random.default_rng([seed, rank, 2]) for rank in range(workers)]

    def __call__(self, rank: int, step: int, now_s: float, samples: int) -> float:
        noise = np.exp(self._sigma * self._rngs[rank].standard_normal() - self._sigma**2 / 2) if self._sigma else 1.0
        work = self.speeds.launch_work + self.speeds.sample_work * samples
        return self.speeds.seconds(rank, now_s, work * float(noise))


FOUR = (1.0, 1.0, 0.5, 0.25)
STRAGGLER = (1.0, 1.0, 1.0, 0.125)

CASES = (
    Case(name="equal", speeds=(1.0,) * 4),
    Case(name="1:1:1/2:1/4", speeds=FOUR),
    Case(name="1:1:1:1/8", speeds=STRAGGLER),
    Case(name="spells", speeds=(1.0,) * 4, spells=True),
    Case(name="1:1:1/2:1/4 reversed half-way", speeds=FOUR, swap_s=8.2),
    Case(name="8 workers, spells", speeds=(1.0,) * 8, spells=True),
    Case(name="spells on 1:1:1/2:1/4", speeds=FOUR, spells=True, held_out=True),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy with its settings, or the balanced engine's barrier (``kind="balanced"``)."""

    name: str
    kind: str
    settings: dict[str, Any]

    @property
    def synchronous(self) -> bool:
        """Whether it does the mathematics of one process, so that only its times are of interest."""
        return self.kind in ("bsp", "balanced")

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs: all of the default's, and of what it is compared with."""
        return SEEDS if self.synchronous or self.name == "flexible" else SEEDS[:FEW]

    def policy(self) -> policies.Policy:
        """Returns the policy, fresh."""
        made = WRITTEN.get(self.kind)
        return policies.by_name(self.kind, **self.settings) if made is None else made(**self.settings)


def contender(kind: str, name: str | None = None, **settings: Any) -> Contender:
    words = ", ".join(f"{k}={v}" for k, v in settings.items())
    return Contender(name=name or " ".join(filter(None, (kind, words))), kind=kind, settings=settings)


# Settings are the best of a grid, on other seeds and on three of the cases; of backup both settings, since the faster
# one costs half as much loss again. DynSGD is there as published; the quorum has its defaults.
CONTENDERS = (
    contender("flexible"),
    contender("joining"),
    contender("aged"),
    contender("bsp", "bsp (stock DDP)"),
    contender("balanced", "balanced (>= 1 sample)", min_samples=1),
    contender("balanced", "balanced (0 samples allowed)", min_samples=0),
    contender("saps", micro=16),
    contender("asp"),
    contender("dynsgd"),
    contender("quorum"),
    contender("ssp", bound=8),
    contender("drop", bound=16),
    contender("buffered", k=2, bound=4),
    contender("backup", spares=1),
    contender("backup", spares=2),
)
