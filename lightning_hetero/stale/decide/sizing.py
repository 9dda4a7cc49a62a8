"""How a batch is cut: each worker's share by speed, its slice of the epoch's order, and what it may fetch early (P)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_hetero.stale.decide.effects import Span
from lightning_hetero.stale.decide.epoch import Epoch
from lightning_hetero.stale.decide.policy import Policy
from lightning_hetero.stale.decide.workers import Workers

__all__ = ["Sizing"]


class Sizing:
    """Shares follow speeds up to the moment of a claim; slices are fixed once, ``ahead`` ticks early.

    Args:
        policy: whether shares are equal or by speed.
        workers: who is live, and how fast.
        ahead: fix slices so many ticks early, so that workers can fetch them.
    """

    def __init__(self, policy: Policy, workers: Workers, *, ahead: int = 0) -> None:
        self._policy, self._workers, self._ahead = policy, workers, ahead

    def _split(self, total: int) -> Mapping[int, int]:
        workers = self._workers
        return workers.speeds.split(workers.ranks(), total, equal=self._policy.equal_shares)

    def shares(self, books: Epoch) -> tuple[int, ...]:
        """Returns samples per rank, from 0 to the highest, of the present batch; 0 for ranks that are not live."""
        split = self._split(books.batch)
        return tuple(split.get(rank, 0) for rank in range(max((w.rank for w in self._workers), default=-1) + 1))

    def share(self, books: Epoch, rank: int) -> int:
        """Returns the worker's part of the present batch [samples]."""
        planned = books.ledger.planned(rank, books.tick)
        if self._policy.equal_shares:
            return planned
        present = self._split(books.batch).get(rank, 0)
        # Slices fixed earlier are kept unless speeds have really changed: they may have been fetched already.
        return planned if abs(planned - present) <= max(1, present // 16) else present

    def step_s(self, books: Epoch) -> float:
        """Returns the predicted time of the present batch, its slowest share [s]; 0 while nothing is known."""
        times = [self._workers.speeds.predict_s(r, part) for r, part in self._split(books.batch).items() if part]
        return max((t for t in times if not math.isnan(t)), default=0.0)

    def lay_out(self, books: Epoch) -> None:
        """Fixes the slices of the present batch and of those ``ahead``, where they are not yet."""
        for batch in range(books.tick, min(books.tick + self._ahead, len(books.ends) - 1) + 1):
            if not books.ledger.laid_out(batch):
                books.ledger.lay_out(batch, self._split(books.size(batch)))

    def hint(self, books: Epoch, rank: int) -> Span:
        """Returns what the worker will probably be granted ``ahead`` ticks from now; (0, 0): nothing."""
        return books.ledger.slice(rank, books.tick + self._ahead) if self._ahead else (0, 0)

    def hints(self, books: Epoch, rank: int) -> list[Span]:
        """Returns what the worker will probably be granted in the next ``ahead`` ticks; (0, 0) where nothing."""
        if books.over:
            return []
        self.lay_out(books)
        return [books.ledger.slice(rank, books.tick + i) for i in range(self._ahead)]
