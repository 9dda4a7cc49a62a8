"""Emulated devices for a benchmark, with a look at whether they were what the scenario says."""

from __future__ import annotations

from typing import Any

from lightning_hetero import Scenario, ThrottleCallback
from lightning_hetero.emulate.throttle import Pacer, Throttle


class Emulated(ThrottleCallback):
    """A `ThrottleCallback` that keeps what emulated work was to take and took on this rank."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        super().__init__(scenario, throttle=self._made, **options)
        self.pacer: Pacer | None = None

    def _made(self, *args: Any, **kwargs: Any) -> Throttle:
        throttle = Throttle(*args, **kwargs)
        self.pacer = throttle.pacer
        return throttle

    def taken(self) -> float:
        """What work took, as part of what it was to take; 1 if there was none."""
        return self.pacer.taken_s / self.pacer.wanted_s if self.pacer is not None and self.pacer.wanted_s else 1.0
