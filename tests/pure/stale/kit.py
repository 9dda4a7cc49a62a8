"""A coordinator with an epoch begun, and looks at its effects."""

from __future__ import annotations

from typing import Any

from lightning_hetero.predictors import Ewma
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Assigned, Effect
from lightning_hetero.stale.decide.policy import Apply, Asynchronous, Claim, Flexible, Grant, Hold, Policy, Pool, Pooled


def started(
    policy: Policy | None = None, *, workers: int = 2, ends: tuple[int, ...] = (8, 16, 24), **kw: Any
) -> Coordinator:
    coordinator = Coordinator(policy or Flexible(), workers=range(workers), predictor=Ewma(weight=0.5), **kw)
    assert coordinator.begin(0, ends, now=0.0) == []
    return coordinator


def only(effects: list[Effect]) -> Effect:
    assert len(effects) == 1, effects
    return effects[0]


def assigned(effects: list[Effect]) -> Assigned:
    """The one grant among the effects."""
    assignments = [e for e in effects if isinstance(e, Assigned)]
    assert len(assignments) == 1, effects
    return assignments[0]


def over(coordinator: Coordinator) -> bool:
    return coordinator.global_step == len(coordinator.ends)


def assigned_samples(coordinator: Coordinator) -> int:
    ledger = coordinator.ledger
    return ledger.total - ledger.free - ledger.arrived


def kinds(effects: list[Effect]) -> list[str]:
    return [type(e).__name__ for e in effects]


class Chunks(Asynchronous):
    """Gives whoever asks so many samples."""

    name = "chunks"

    def __init__(self, samples: int, *, bound: int | None = None, halved: bool = False) -> None:
        self.samples, self.bound, self.halved = samples, bound, halved

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def claim(self, claim: Claim) -> Grant | Hold:
        return Grant(samples=self.samples)

    def scale(self, staleness: int, workers: int) -> float:
        return 0.5 if self.halved and staleness else 1.0


class Hasty(Pooled):
    """Gives a sample at a time to whoever asks; may insist on a verdict."""

    name, holds = "hasty", "never"

    def __init__(self, verdict: Apply | None = None) -> None:
        self.verdict = verdict

    def claim(self, claim: Claim) -> Grant | Hold:
        return Grant(samples=1)

    def update(self, pool: Pool) -> Apply | None:
        return super().update(pool) if self.verdict is None or not pool.pushes else self.verdict
