"""Steps that suspend themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_hetero.pipeline.runtime.step.resumable import ResumableStep, Suspended, current_step


def suspend(value: Any = None) -> Any:
    step = current_step()
    assert step is not None
    return step.suspend(value)


def resumable(carrier: ExitStack, body: Callable[[], Any], seed: int = 0) -> ResumableStep:
    step = ResumableStep(body, seed=seed)
    carrier.callback(step.close)
    return step


def begun(carrier: ExitStack, body: Callable[[], Any], seed: int = 0) -> ResumableStep:
    step = resumable(carrier, body, seed)
    assert isinstance(step.start(), Suspended)
    return step


def whole(carrier: ExitStack, body: Callable[[], Any]) -> Any:
    """Runs a body that suspends itself any number of times; returns what it returns."""
    step = resumable(carrier, body, 0)
    outcome = step.start()
    while isinstance(outcome, Suspended):
        outcome = step.resume(outcome.value)
    return outcome.value
