"""Generated series of speeds, and what a policy makes of them in a closed loop: pure, without a clock.

A rank's step takes ``slow * noise * (fixed_s + per_sample_s * samples)``: ``slow`` is what a policy may hope to learn,
``noise`` is not. The ideal shares know ``slow`` of each step, and nobody's noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from lightning_hetero.balanced.decide.controller import ExchangeClock, Row, ShareController, shares_digest
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost

PATTERN = (1.0, 1.0, 2.0, 4.0)  # the benchmark's unequal cluster; repeated cyclically
NOISE = 0.02  # of a calm machine, relative
_SEEN = ("contention",)  # scenarios whose cause is seen in the processor time that others leave free
_COARSE = 0.03  # standard deviation of what is told of it
Rows = list[tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """How slow each rank is in each step.

    Attributes:
        name: of the scenario.
        slow: by step and rank, 1 is a rank at full speed.
        noise: by step and rank, what else its time is multiplied by.
        free_cpu: by step and rank, the part of its processors that a rank tells to be free; None: no rank tells.
    """

    name: str
    slow: Sequence[tuple[float, ...]]
    noise: Sequence[tuple[float, ...]]
    free_cpu: Sequence[tuple[float, ...]] | None = None

    @property
    def steps(self) -> int:
        return len(self.slow)

    @property
    def ranks(self) -> int:
        return len(self.slow[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a closed loop came to, over the whole series.

    Attributes:
        total_s: slowest rank's time, summed over the steps [s].
        equal_s: the same of equal shares [s].
        ideal_s: the same of the best shares for each step's speeds [s].
        shares: of each step.
        reasons: of the decisions that changed something.
    """

    total_s: float
    equal_s: float
    ideal_s: float
    shares: Sequence[tuple[int, ...]]
    reasons: Sequence[str]

    @property
    def to_equal(self) -> float:
        return self.total_s / self.equal_s

    @property
    def to_ideal(self) -> float:
        return self.total_s / self.ideal_s

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.shares, self.shares[1:], strict=False))


# ---- series -----------------------------------------------------------------------------------------------------


def _cluster(ranks: int) -> tuple[float, ...]:
    return tuple(PATTERN[rank % len(PATTERN)] for rank in range(ranks))


def _equal(rng: Random, ranks: int, steps: int) -> Rows:
    return [(1.0,) * ranks] * steps


def _stationary(rng: Random, ranks: int, steps: int) -> Rows:
    return [_cluster(ranks)] * steps


def _drift(rng: Random, ranks: int, steps: int) -> Rows:
    """Speeds move smoothly from the pattern to its reverse."""
    first, last = _cluster(ranks), _cluster(ranks)[::-1]
    return [
        tuple(a + (b - a) * step / max(1, steps - 1) for a, b in zip(first, last, strict=True)) for step in range(steps)
    ]


def _swap(rng: Random, ranks: int, steps: int) -> Rows:
    """The pattern is reversed every 100 steps."""
    both = _cluster(ranks), _cluster(ranks)[::-1]
    return [both[step // 100 % 2] for step in range(steps)]


def spells(
    rng: Random,
    ranks: int,
    steps: int,
    *,
    probability: float = 1 / 30,
    factor: float = 6.0,
    mean_steps: float = 8.0,
    slow: Sequence[float] = (1.0,),
) -> Rows:
    """Each rank by itself is slow for a while, as a Markov chain of two states has it.

    Args:
        rng: source of chance.
        ranks, steps: of the series.
        probability: that a spell begins in a step.
        factor: how many times slower a rank is in it.
        mean_steps: mean length.
        slow: the ranks' own speeds, repeated cyclically.
    """
    rows: Rows = []
    ill = [False] * ranks
    for _ in range(steps):
        ill = [rng.random() >= 1.0 / mean_steps if one else rng.random() < probability for one in ill]
        rows.append(tuple(slow[rank % len(slow)] * (factor if one else 1.0) for rank, one in enumerate(ill)))
    return rows


def _contention(rng: Random, ranks: int, steps: int) -> Rows:
    """A load that comes and goes on one core after another: its rank has a third of the core."""
    rows: Rows = []
    while len(rows) < steps:
        victim = rng.randrange(ranks)
        calm, busy = (1 + int(rng.expovariate(1 / 40.0)) for _ in range(2))
        rows += [(1.0,) * ranks] * calm
        rows += [tuple(3.0 if rank == victim else 1.0 for rank in range(ranks))] * busy
    return rows[:steps]


_MADE: Mapping[str, tuple[Callable[[Random, int, int], Rows], float]] = {  # and the noise
    "equal": (_equal, NOISE),
    "stationary": (_stationary, NOISE),
    "drift": (_drift, NOISE),
    "swap": (_swap, NOISE),
    "spells": (spells, NOISE),
    "spells, unequal": (partial(spells, slow=PATTERN), NOISE),
    "jitter": (_equal, 0.2),
    "contention": (_contention, 0.1),
}
SCENARIOS: tuple[str, ...] = tuple(_MADE)
"""Names of the scenarios."""


def series(name: str, *, ranks: int = 4, steps: int = 400, seed: int = 0) -> Series:
    """Makes the series of a scenario; the same for the same arguments on every machine.

    Raises:
        KeyError: there is no scenario of this name.
    """
    make, noise = _MADE[name]
    rng = Random(f"{name} {ranks} {seed}")
    slow = make(rng, ranks, steps)
    noisy = lognormal(rng, ranks, steps, noise)
    free = [tuple(_told(rng, 1.0 / k) for k in row) for row in slow] if name in _SEEN else None
    return Series(name=name, slow=slow, noise=noisy, free_cpu=free)


def _told(rng: Random, free: float) -> float:
    """What the system's counters say of a free part: they are coarse."""
    return min(max(free + _COARSE * rng.gauss(0.0, 1.0), 0.0), 1.0)


def lognormal(rng: Random, ranks: int, steps: int, relative: float) -> Rows:
    """Makes noise of mean 1 and this standard deviation."""
    sigma = math.sqrt(math.log1p(relative * relative))
    return [
        tuple(rng.lognormvariate(-0.5 * sigma * sigma, sigma) if sigma else 1.0 for _ in range(ranks))
        for _ in range(steps)
    ]


# ---- closed loop ------------------------------------------------------------------------------------------------


def closed_loop(
    policy: BalancePolicy,
    speeds: Series,
    *,
    total: int = 64,
    lag: int = 0,
    every: int = 1,
    fixed_s: float = 0.009,
    per_sample_s: float = 0.003,
    bounds: ShareBounds | None = None,
    quantum: int = 1,
) -> Outcome:
    """Trains a series: what is measured decides what is drawn, as in a fit.

    Args:
        policy: is started here.
        speeds: the series.
        total: samples of a global batch.
        lag: batches that the loader reads ahead.
        every: steps between two records.
        fixed_s, per_sample_s: cost of a rank at full speed [s].
        bounds: limits per rank; ``None``: the defaults.
        quantum: shares are multiples of it.
    """
    bounds = bounds or ShareBounds()
    ranks = range(speeds.ranks)
    policy.start(world_size=speeds.ranks, total=total, bounds=bounds, quantum=quantum)
    equal = policy.shares
    controller = ShareController(policy, rank=0, world_size=speeds.ranks, lag=lag, exchange=ExchangeClock(every=every))
    low, up = bounds.resolve(speeds.ranks, total, quantum)
    best: dict[tuple[float, ...], tuple[int, ...]] = {}
    total_s = equal_s = ideal_s = 0.0
    drawn: list[tuple[int, ...]] = []
    silent = (math.nan,) * speeds.ranks
    since: list[tuple[tuple[int, ...], list[float]]] = []  # shares and times of each step since the last record
    reasons: list[str] = []

    def seconds(step: int, shares: Sequence[int]) -> list[float]:
        slow, noise = speeds.slow[step], speeds.noise[step]
        return [slow[r] * noise[r] * (fixed_s + per_sample_s * max(1, shares[r])) for r in ranks]

    for step in range(speeds.steps):
        while len(drawn) < min(speeds.steps, step + lag + 1):
            drawn.append(controller.full_shares(0, len(drawn)))
        shares, slow = drawn[step], speeds.slow[step]
        if slow not in best:
            costs = [AffineCost(fixed_s=k * fixed_s, per_sample_s=k * per_sample_s) for k in slow]
            best[slow] = minimax(costs, total, lower=low, upper=up, quantum=quantum).shares
        times = seconds(step, shares)
        total_s += max(times)
        equal_s += max(seconds(step, equal))
        ideal_s += max(seconds(step, best[slow]))
        since.append((shares, times))
        if controller.wants_exchange(0, step):
            free = speeds.free_cpu[step] if speeds.free_cpu else silent
            rows = [_row(rank, step, since, free[rank]) for rank in ranks]
            since.clear()
            controller.sent(0, step, lambda rows=rows: rows)
        controller.catch_up()
        while controller.news:
            reasons.append(controller.news.popleft().reason)
    return Outcome(total_s=total_s, equal_s=equal_s, ideal_s=ideal_s, shares=drawn, reasons=reasons)


def _row(rank: int, step: int, since: Sequence[tuple[tuple[int, ...], list[float]]], free_cpu: float) -> Row:
    """What a rank sends: the mean over the steps with its latest share, see `ShareController.row`."""
    shares = since[-1][0]
    same = [times[rank] for played, times in since if played[rank] == shares[rank]]
    return Row(
        epoch=0.0,
        step=float(step),
        samples=float(max(1, shares[rank])),
        compute_s=math.fsum(same) / len(same),
        wait_s=0.0,
        digest=float(shares_digest(0, step, shares)),
        batches=float(len(since)),
        work=math.nan,
        free_cpu=free_cpu,
        free_mem=math.nan,
        most_samples=math.nan,
    )
