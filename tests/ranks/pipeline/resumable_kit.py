"""Steps that suspend themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hetero.pipeline.runtime.step.resumable import Carrier, ResumableStep, Suspended, current_step


def suspend(value: Any = None) -> Any:
    step = current_step()
    assert step is not None
    return step.suspend(value)


def begun(carrier: Carrier, body: Callable[[], Any], seed: int = 0) -> ResumableStep:
    step = ResumableStep(body, carrier=carrier, seed=seed)
    assert isinstance(step.start(), Suspended)
    return step


def whole(carrier: Carrier, body: Callable[[], Any]) -> Any:
    """Runs a body that suspends itself any number of times; returns what it returns."""
    step = ResumableStep(body, carrier=carrier, seed=0)
    outcome = step.start()
    while isinstance(outcome, Suspended):
        outcome = step.resume(outcome.value)
    return outcome.value
