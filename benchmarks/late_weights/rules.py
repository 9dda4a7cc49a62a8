"""What the server makes of late contributions: rules, and a learner that follows one.

An update has a fresh part, F = sum of n g over contributions that are up to date, and late ones, n g each, s versions
old. Today's rule is (F + sum of n g) / (all samples). A rule says what a late one counts, what the sum is divided by,
and where its late part goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.stale.learning import BATCH, Learner, Recipe, Vector

__all__ = ["RULES", "LateLearner", "Rule"]

BETA = 0.9  # of momentum, as in `Learner`


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: as in the tables.
        age: a contribution that is s versions old counts age**s.
        divide: the sum is divided by what it counts (``"counts"``: a mean), or by the global batch if that is greater
            (``"greater"``: a small update makes a shorter step).
        into: the late part moves the momentum as a fresh one does, the weights once without momentum, or both by what
            it would have moved had it been in time (``"catch-up"``). The latter two are for momentum SGD.
        cap: greatest norm of the late part, in multiples of the fresh part's.
        agree: a late contribution counts in proportion to its cosine with the fresh part, 0 where that is negative.
    """

    name: str
    age: float = 1.0
    divide: Literal["counts", "greater"] = "counts"
    into: Literal["momentum", "weights", "catch-up"] = "momentum"
    cap: float = math.inf
    agree: bool = False


TODAY = Rule(name="today: mean over all samples")
RULES = (
    TODAY,
    Rule(name="shorter step if fewer samples", divide="greater"),
    Rule(name="age 0.25", age=0.25),
    Rule(name="age 0.5, shorter step", age=0.5, divide="greater"),
    Rule(name="age 0.25, shorter step", age=0.25, divide="greater"),
    Rule(name="dropped", age=0.0),
    Rule(name="dropped, shorter step", age=0.0, divide="greater"),
    Rule(name="without momentum", into="weights"),
    Rule(name="without momentum, shorter step", into="weights", divide="greater"),
    Rule(name="catch-up", into="catch-up"),
    Rule(name="catch-up, age 0.5, shorter step", into="catch-up", age=0.5, divide="greater"),
    Rule(name="late part at most 0.25 of the fresh", cap=0.25),
    Rule(name="by agreement, shorter step", agree=True, divide="greater"),
)


class LateLearner(Learner):
    """A learner whose server follows a rule.

    Attributes:
        cosines: of the fresh parts of consecutive updates: a cheap candidate for a measure of the edge.
    """

    def __init__(self, recipe: Recipe, seed: int, rule: Rule) -> None:
        super().__init__(recipe, seed)
        self.rule = rule
        self._parts: list[tuple[int, int, Vector]] = []
        self._fresh = 0
        self._last: Vector | None = None
        self.cosines: list[float] = []

    def give(self, lease: int, images: Vector, labels: NDArray[np.int64], scale: float) -> None:
        then, staleness = self._taken.pop(lease), self.steps - self._bases.pop(lease)
        loss, gradient = self.gradient(then, images, labels)
        total = np.float32(len(labels)) * gradient
        if staleness:
            self._parts.append((staleness, len(labels), total))
        else:
            self.pool += total
            self._fresh += len(labels)
        self.loss_sum += loss * len(labels)
        self.samples += len(labels)

    def step(self, samples: int, worth: float, ends_tick: bool) -> None:
        self._look()
        rule = self.rule
        late = [(s, self._counts(rule, s, total), n, total) for s, n, total in self._parts]
        counted = self._fresh + sum(weight * n for _, weight, n, _ in late)
        divisor = max(BATCH, counted) if rule.divide == "greater" else counted or 1.0
        fresh = self.pool / np.float32(divisor)
        parts = [(s, np.float32(weight / divisor) * total) for s, weight, _, total in late]
        if parts and math.isfinite(rule.cap):
            norm = float(np.linalg.norm(sum(part for _, part in parts)))
            factor = min(1.0, rule.cap * float(np.linalg.norm(fresh)) / max(norm, 1e-30))
            parts = [(s, np.float32(factor) * part) for s, part in parts]
        lr = np.float32(self.recipe.lr * 0.5 * (1 + math.cos(math.pi * self.tick / self.total)))
        for s, part in parts if not self.recipe.adam else ():
            if rule.into == "weights":
                self.weights = self.weights - lr * part
            elif rule.into == "catch-up":
                self.weights = self.weights - lr * np.float32((1 - BETA**s) / (1 - BETA)) * part
                fresh = fresh + np.float32(BETA**s) * part
        if rule.into == "momentum" or self.recipe.adam:
            fresh = sum((part for _, part in parts), fresh)
        self.pool = fresh.astype(np.float32)
        self._parts.clear()
        self._fresh = 0
        super().step(1, worth, ends_tick)

    def _counts(self, rule: Rule, staleness: int, total: Vector) -> float:
        agreement = max(0.0, _cosine(total, self.pool)) if rule.agree else 1.0
        return rule.age**staleness * agreement

    def _look(self) -> None:
        """Compares the fresh part with that of the update before."""
        if self._last is not None and self._fresh:
            self.cosines.append(_cosine(self.pool, self._last))
        if self._fresh:
            self._last = self.pool


def _cosine(a: Vector, b: Vector) -> float:
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30)
