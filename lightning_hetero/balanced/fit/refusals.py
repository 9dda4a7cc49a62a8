"""What a controller of the balanced engine cannot be combined with, refused with the reason (layer L)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero.balanced.decide.controlled import ControlledPolicy
from lightning_hetero.controller.lyapunov import LyapunovController

__all__ = ["controlled_policy"]


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
