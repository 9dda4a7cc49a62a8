"""Buffered asynchronous updates (FedBuff, Nguyen et al. 2022)."""

from __future__ import annotations

from lightning_hetero.stale.policy import Apply, Asynchronous, Pool, whole


class Buffered(Asynchronous):
    """One update per ``k`` contributions, from any workers.

    Args:
        k: contributions per update, >= 1.
        bound: versions a contribution may be old, >= 0.
    """

    name = "buffered"

    def __init__(self, *, k: int = 3, bound: int = 2) -> None:
        self.k = whole("Buffered", "k", k, 1)
        self.bound = whole("Buffered", "bound", bound, 0)

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def update(self, pool: Pool) -> Apply | None:
        return self.every(self.k, pool)
