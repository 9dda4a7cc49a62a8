"""Which policy decides, and what it cannot be combined with, refused with the reason (layer L)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from lightning_hetero.balanced.decide.controlled import ControlledPolicy
from lightning_hetero.balanced.decide.tuning import TuningPolicy
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.predictors import Predictor, PredictorName
from lightning_hetero.shares.policy import BalancePolicy

__all__ = ["PolicyName", "chosen_policy", "controlled_policy"]

PolicyName: TypeAlias = Literal["predictive", "tuning"]


def chosen_policy(
    policy: PolicyName | BalancePolicy | None,
    predictor: PredictorName | Predictor,
    dead_band: float,
    cooldown: int,
) -> BalancePolicy:
    """Returns the policy of these arguments of `LoadBalancedStrategy`.

    Raises:
        TypeError: the policy is neither one nor a name.
        ValueError: the policy has no use for an argument that was given.
    """
    if not (policy in (None, "predictive", "tuning") or isinstance(policy, BalancePolicy)):
        raise TypeError(
            f"policy={policy!r} must be a BalancePolicy, 'predictive', 'tuning' or None; names of models are for"
            " predictor="
        )
    if policy in (None, "predictive"):
        return BalancePolicy(predictor=predictor, dead_band=dead_band, cooldown=cooldown)
    idle = {"predictor": predictor != "kalman", "dead_band": dead_band != 0.02, "cooldown": cooldown != 0}
    given = [name for name, is_given in idle.items() if is_given]
    if isinstance(policy, BalancePolicy):
        if given:
            raise ValueError("give either a whole policy, or predictor, dead_band and cooldown, not both")
        return policy
    if given:
        raise ValueError(
            f"policy='tuning' decides without a model and has no use for {', '.join(given)}: drop"
            f" {'it' if len(given) == 1 else 'them'}, or choose policy='predictive'. TuningPolicy(tolerance=...,"
            " window=...) has settings of its own"
        )
    return TuningPolicy()


def controlled_policy(controller: Any, idle: Sequence[str]) -> ControlledPolicy:
    """Returns the policy that asks a controller.

    Args:
        controller: ``"lyapunov"``, a `LyapunovController`, or what starts one.
        idle: arguments given that it would ignore.

    Raises:
        ValueError: there are some, or a budget of traffic, which nothing here can keep.
    """
    if idle:
        raise ValueError(
            f"controller= decides the shares by rules of its own, so {', '.join(idle)} would be ignored: drop"
            f" {'it' if len(idle) == 1 else 'them'}, or the controller. LyapunovController(dead_band=...,"
            " share_band=...) has its own; max_samples and quantum hold under it"
        )
    settings = LyapunovController() if controller == "lyapunov" else controller
    limits = getattr(settings, "budget", None) or {}
    if traffic := sorted(name for name in limits if name.startswith("traffic")):
        raise ValueError(
            f"budget={{{', '.join(traffic)}}} cannot be kept by LoadBalancedStrategy: its exchange of gradients takes"
            " in all ranks, also those that rest, so no decision changes the traffic. Drop it, or use"
            " strategy='hetero_pipeline'"
        )
    return ControlledPolicy(settings)
