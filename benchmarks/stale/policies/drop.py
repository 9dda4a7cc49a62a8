"""Ringmaster ASGD (Maranjyan et al. 2025)."""

from __future__ import annotations

from lightning_hetero.stale.policy import Asynchronous, whole


class Drop(Asynchronous):
    """Contributions more than ``bound`` versions old are thrown away.

    Their samples are issued again at once, not when the straggler arrives.

    Args:
        bound: versions a contribution may be old, >= 0.
    """

    name = "drop"

    def __init__(self, *, bound: int = 8) -> None:
        self.bound = whole("Drop", "bound", bound, 0)

    @property
    def claims_bound(self) -> int | None:
        return self.bound
