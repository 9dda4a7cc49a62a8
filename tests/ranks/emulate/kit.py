"""A clock that only moves when told to, for `Throttle`, and a scenario."""

from __future__ import annotations

from typing import Any

from lightning_hetero.emulate import Scenario
from lightning_hetero.emulate.throttle import Pacer, Throttle


class Time:
    """A clock and a sleep that may take longer than asked."""

    def __init__(self, late_s: list[float] | None = None) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self.late_s = list(late_s or [])

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds + (self.late_s.pop(0) if self.late_s else 0.0)

    def pacer(self) -> Pacer:
        return Pacer(clock=self.clock, sleep=self.sleep)

    def throttle(self, scenario: Scenario, rank: int, **more: Any) -> Throttle:
        return Throttle(scenario, rank, clock=self.clock, sleep=self.sleep, **more)


EMULATED = Scenario(speeds=[1.0, 0.25], sample_s=0.01, step_s=0.1)
