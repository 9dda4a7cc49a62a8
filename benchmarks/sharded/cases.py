"""The clusters, fixed in one place, and what the best division of each could do; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.balanced.cases import best_static
from lightning_hetero.emulate import Scenario

PATTERN = (1.0, 1.0, 0.5, 0.25)
SAMPLE_S, STEP_S = 0.005, 0.02  # models that need several devices have long steps: 0.18 s with equal parts


@dataclass(frozen=True, kw_only=True)
class Case:
    """One emulated cluster of four ranks.

    Attributes:
        name: as in the tables.
        scenario: speeds, costs and memory.
        slow_link_s: what every gathering and scattering of a layer takes on the slowest link [s].
        steps: optimizer steps per run.
        swap_at: step at which the speeds are reversed, or ``None``.
        pipeline: whether the pipeline engine is tried.
    """

    name: str
    scenario: Scenario
    slow_link_s: float = 0.0
    steps: int = 30
    swap_at: int | None = None
    pipeline: bool = False
    per_rank: int = 32

    @property
    def global_batch(self) -> int:
        return self.per_rank * len(self.scenario.speeds)

    @property
    def equal(self) -> bool:
        return len(set(self.scenario.speeds)) == 1

    def caps(self) -> list[int]:
        """The most samples that ranks hold at once."""
        held = [self.scenario.mem_cap(rank) for rank in range(len(self.scenario.speeds))]
        return [self.global_batch if most is None else most for most in held]

    def work_s(self, shares: Sequence[float], step: int) -> float:
        """What a step's slowest rank works, without links and all that is no work [s]."""
        return max(
            STEP_S / (speed := self.scenario.speed(rank, step)) + n * SAMPLE_S / speed for rank, n in enumerate(shares)
        )

    def ideal_s(self, step: int) -> float:
        """The least that a step can take: fractions of samples that end together, within the ranks' memory [s]."""
        low, high = 0.0, self.work_s([self.global_batch] * len(self.caps()), step)
        for _ in range(60):
            middle = (low + high) / 2
            speeds = [self.scenario.speed(rank, step) for rank in range(len(self.caps()))]
            held = [min(c, max(0.0, middle * v - STEP_S) / SAMPLE_S) for c, v in zip(self.caps(), speeds, strict=True)]
            low, high = (low, middle) if sum(held) >= self.global_batch else (middle, high)
        return high

    def best_static(self) -> tuple[int, ...]:
        """The constant shares that make the whole run shortest, in hindsight."""
        return best_static(self.scenario, self.per_rank, self.steps, self.caps())

    def quick(self) -> Case:
        """The same case with fewer steps."""
        if self.swap_at is None:
            return replace(self, steps=20)
        return replace(self, steps=30, swap_at=12, scenario=_scenario().change(PATTERN[::-1], at_step=12))


def _scenario(speeds: Sequence[float] = PATTERN, **more: object) -> Scenario:
    return Scenario(speeds=speeds, sample_s=SAMPLE_S, step_s=STEP_S, **more)  # type: ignore[arg-type]


def cases() -> list[Case]:
    """1:1:1/2:1/4, as it is, with two sizes of memory, with a slow link, and with the speeds reversed in the middle."""
    return [
        Case(name="1:1:1/2:1/4", scenario=_scenario(), pipeline=True),
        Case(name="two memory sizes", scenario=_scenario(mem_samples=[40, None, None, None])),
        Case(name="one slow link", scenario=_scenario(), slow_link_s=0.002),
        Case(name="speeds reversed", scenario=_scenario().change(PATTERN[::-1], at_step=30), steps=60, swap_at=30),
        Case(name="equal ranks", scenario=_scenario((1.0,) * 4), steps=40),
    ]
