"""Policies of the stale engine: which worker waits, which computes what, what counts. Layer P.

| name | class | updates | staleness | waits |
|---|---|---|---|---|
| ``flexible`` | `Flexible` | one per batch | <= 2 versions | at most 10 % of a step |
| ``saps`` | `Saps` | one per push, worth n/B | <= max(N + 2, 2 (N - 1)) versions | never |
| ``asp`` | `Asp` | one per push, worth n/B | any | never |
| ``bsp`` | `Bsp` | one per batch | 0 | for all workers |
| ``ssp`` | `Ssp` | one per push, worth n/B | any; clocks at most 3 apart | for the slowest |

`Policy` is the interface; any instance of it may be passed where a name is accepted. "Never" has one exception, which
no policy can change: when every sample that may be given out is being computed on, an idle worker waits until one of
these chunks is overdue, and then computes it a second time. Other rules of the literature are written on this
interface in ``benchmarks/stale/policies``.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, TypeAlias

from lightning_hetero.stale.decide.policy.base import (
    Apply,
    Claim,
    Due,
    Grant,
    Hold,
    Policy,
    Pool,
    Pooled,
    part,
    whole,
)  # fmt: skip
from lightning_hetero.stale.decide.policy.rules import Asp, Asynchronous, Bsp, Flexible, Saps, Ssp, own_part

__all__ = [
    "Apply",
    "Asp",
    "Asynchronous",
    "Bsp",
    "Claim",
    "Due",
    "Flexible",
    "Grant",
    "Hold",
    "Policy",
    "PolicyName",
    "Pool",
    "Pooled",
    "Saps",
    "Ssp",
    "by_name",
    "own_part",
    "part",
    "whole",
]

PolicyName: TypeAlias = Literal["flexible", "saps", "asp", "bsp", "ssp"]

_KNOWN: dict[str, type[Policy]] = {policy.name: policy for policy in (Flexible, Saps, Asp, Bsp, Ssp)}


def by_name(name: str, **settings: Any) -> Policy:
    """Returns a new policy, by a name of the table above, with ``settings`` for its constructor.

    Raises:
        ValueError: the name is unknown, the policy has no such setting, or it is out of range.
    """
    if name not in _KNOWN:
        raise ValueError(
            f"unknown policy {name!r}: choose one of {', '.join(_KNOWN)}, or pass any Policy instance"
            " (for example Flexible(bound=1))"
        )
    takes = {known: inspect.signature(policy).parameters for known, policy in _KNOWN.items()}
    if strange := [f"{setting}={value!r}" for setting, value in settings.items() if setting not in takes[name]]:
        others = [known for known in _KNOWN if settings.keys() <= takes[known].keys()]
        choose = f", or choose a policy that has: {', '.join(others)}" if others else ""
        raise ValueError(f"policy={name!r} has no use for {' and '.join(strange)}; drop it{choose}")
    return _KNOWN[name](**settings)
