"""The engine's default, for a learning rate with momentum that is at the edge of stability."""

from __future__ import annotations

from lightning_hetero.stale.policy import Flexible

__all__ = ["Aged"]


class Aged(Flexible):
    """A late contribution counts a quarter per version that it is old.

    Late gradients act as more momentum, which such a recipe has no room for.
    """

    name = "aged"

    def scale(self, staleness: int, workers: int) -> float:
        return 0.25**staleness
