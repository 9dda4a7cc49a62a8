"""Policies of the stale engine: who waits, who computes what, what counts. Layer P.

| name | class | updates | staleness | waits |
|---|---|---|---|---|
| ``flexible`` | `Flexible` | one per batch | <= 2 versions | at most 10 % of a step |
| ``bsp`` | `Bsp` | one per batch | 0 | for everybody |
| ``backup`` | `Backup` | one per batch, of fewer samples | 0 | for all but the spares |
| ``quorum`` | `Quorum` | one per batch, of more or fewer samples | <= 2 versions | for more than half, and 10 % more |
| ``asp`` | `Asp` | one per push, worth n/B | any | never |
| ``dynsgd`` | `DynSgd` | one per push, worth n/B, damped by age | any | never |
| ``dc_asgd`` | `DcAsgd` | one per push, worth n/B, corrected for age | any | never |
| ``drop`` | `Drop` | one per push, worth n/B | <= 8 versions | never |
| ``saps`` | `Saps` | one per push, worth n/B | <= max(N + 2, 2 (N - 1)) versions | never |
| ``buffered`` | `Buffered` | one per 3 pushes, worth n/B | <= 2 versions | never |
| ``ssp`` | `Ssp` | one per push, worth n/B | any; clocks at most 3 apart | for the slowest |

`Policy` is the interface; any instance of it may be passed where a name is accepted. "Never" has one exception, which
no policy can change: when every sample that may be given out is being computed on, an idle worker waits until one of
these chunks is overdue, and then computes it a second time.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, TypeAlias

from lightning_hetero.stale.decide.policy.asynchronous import (
    Asp,
    Asynchronous,
    Buffered,
    DcAsgd,
    Drop,
    DynSgd,
    Saps,
    Ssp,
)
from lightning_hetero.stale.decide.policy.barriers import Backup, Bsp, Quorum
from lightning_hetero.stale.decide.policy.base import (
    Apply,
    Claim,
    Due,
    Grant,
    Hold,
    Policy,
    Pool,
    Pooled,
    Wait,
)
from lightning_hetero.stale.decide.policy.flexible import Flexible

__all__ = [
    "Apply",
    "Asp",
    "Asynchronous",
    "Backup",
    "Bsp",
    "Buffered",
    "Claim",
    "DcAsgd",
    "Drop",
    "Due",
    "DynSgd",
    "Flexible",
    "Grant",
    "Hold",
    "Policy",
    "PolicyName",
    "Pool",
    "Pooled",
    "Quorum",
    "Saps",
    "Ssp",
    "Wait",
    "by_name",
]

PolicyName: TypeAlias = Literal[
    "flexible", "saps", "asp", "bsp", "ssp", "drop", "buffered", "backup", "dynsgd", "dc_asgd", "quorum"
]

_KNOWN: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Flexible, Saps, Asp, Bsp, Ssp, Drop, Buffered, Backup, DynSgd, DcAsgd, Quorum)
}


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
    if strange := [setting for setting in settings if setting not in takes[name]]:
        others = [known for known in _KNOWN if all(setting in takes[known] for setting in strange)]
        said = " and ".join(f"{setting}={settings[setting]!r}" for setting in strange)
        raise ValueError(
            f"policy={name!r} has no use for {said}; drop it, or choose a policy that has: {', '.join(others)}"
        )
    return _KNOWN[name](**settings)
