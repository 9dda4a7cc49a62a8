"""What is compared: predictors and policies, as far as this version of the package has them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from lightning_hetero.predictors import by_name
from lightning_hetero.shares.policy import BalancePolicy

PREDICTORS = ("last", "ewma", "kalman", "curve", "narx")
NO_GUARD = ", no guard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way to decide.

    Attributes:
        name: as in the tables.
        policy: class of the policy.
        settings: its arguments.
    """

    name: str
    policy: type[BalancePolicy]
    settings: dict[str, Any]

    @property
    def offered(self) -> bool:
        """Whether it is for users, not for comparisons only."""
        return not self.name.endswith(NO_GUARD)

    def make(self) -> BalancePolicy:
        return self.policy(**self.settings)


def default_name() -> str:
    """Returns the predictor of a `BalancePolicy` that is told nothing; with the guard, if there is one."""
    return str(_arguments()["predictor"].default)


def available() -> tuple[list[Candidate], list[str]]:
    """Returns the candidates that this version has, and the names of those that it lacks."""
    found: list[Candidate] = []
    missing: list[str] = []
    guarded = "guard" in _arguments()
    for name in PREDICTORS:
        try:
            by_name(name)
        except ValueError:
            missing.append(name)
            continue
        found.append(Candidate(name=name, policy=BalancePolicy, settings={"predictor": name}))
        if guarded:
            settings = {"predictor": name, "guard": False}
            found.append(Candidate(name=name + NO_GUARD, policy=BalancePolicy, settings=settings))
    if not guarded:
        missing.append("guard: what is named without 'no guard' has none either")
    return sorted(found, key=lambda one: not one.offered), missing


def named(name: str) -> Candidate:
    """Returns the candidate of this name.

    Raises:
        KeyError: this version has none.
    """
    return {candidate.name: candidate for candidate in available()[0]}[name]


def _arguments() -> Any:
    return inspect.signature(BalancePolicy).parameters
