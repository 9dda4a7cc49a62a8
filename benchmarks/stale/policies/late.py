"""The engine's default with other rules of what a late contribution counts."""

from __future__ import annotations

from lightning_hetero.stale.policy import Flexible


class Joining(Flexible):
    """A late contribution joins the mean of the next update, each sample counting the same.

    Late gradients act as more momentum then, which a learning rate at the edge of stability has no room for.
    """

    name = "joining"
    completes = False


class Aged(Joining):
    """It joins, and counts a quarter per version that it is old."""

    name = "aged"

    def scale(self, staleness: int, workers: int) -> float:
        return 0.25**staleness
