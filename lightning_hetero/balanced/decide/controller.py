"""Turns measurements into shares at the right time: which record may decide which batch (layer P).

The rule, and why it needs no message: the shares of batch ``i`` may use the records exchanged at steps
``<= i - 1 - lag`` of the same epoch, and all of earlier epochs. ``lag`` is how far the data loader reads ahead. It is a
pure function of data every rank has, so all ranks slice the same global batch alike, whatever their workers do.
A digest of the shares travels with the next exchange: a disagreement is an error, not a silently wrong gradient.

The newest record is the only one whose evaluation every rank would wait for, so it is evaluated at once only if it is
*urgent* (some rank's time is not what was expected); otherwise with the next one, and meanwhile `catch_up` evaluates it
where the time is free: while the gradients travel. Which records a batch has used stays a function of the records.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_hetero.balanced.decide.policy import BalancePolicy, Decision
from lightning_hetero.types import SpeedSample, StepReport

__all__ = ["Controller", "ExchangeClock", "Tag", "shares_digest"]

Tag = tuple[int, int]
"""(epoch, step) an exchange belongs to; ordered."""

Row = Sequence[float]
"""What one rank sends: epoch, step, samples, compute_s, wait_s, digest, batches."""


_MOST_NEWS = 64  # kept for a trace that nobody may write


def shares_digest(epoch: int, step: int, shares: Sequence[int]) -> int:
    """Returns a 32-bit digest of the shares one step ran on (exact in a float64)."""
    return zlib.crc32(repr((epoch, step, tuple(shares))).encode())


@dataclass(slots=True)
class ExchangeClock:
    """Exchanges every step, or every k-th when steps are short, so that the cost stays a small part of a step.

    Args:
        every: fixed k, or ``None`` to choose it: k = ceil(period_s / step time).
        period_s: aim at one exchange per this many seconds.
        most: largest k.
    """

    every: int | None = None
    period_s: float = 0.05
    most: int = 64
    _history: deque[tuple[Tag, int]] = field(default_factory=deque[tuple[Tag, int]])

    def observe(self, tag: Tag, step_s: float) -> None:
        """Notes the agreed step time of an exchange."""
        if self.every is not None:
            return
        k = 1 if step_s <= 0 else min(self.most, max(1, math.ceil(self.period_s / step_s)))
        self._history.append((tag, k))

    def forget(self) -> None:
        """Starts over: steps are counted from the beginning again."""
        self._history.clear()

    def interval(self, limit: Tag) -> int:
        """Returns k as known from exchanges up to ``limit``; the same on all ranks, unlike the latest known."""
        if self.every is not None:
            return self.every
        while len(self._history) > 1 and self._history[1][0] <= limit:
            self._history.popleft()
        return self._history[0][1] if self._history and self._history[0][0] <= limit else 1


class Controller:
    """Owns the policy of one run on one rank.

    Args:
        policy: started by the caller.
        rank: this rank.
        world_size: number of ranks.
        lag: batches the loader reads ahead; the largest of all ranks and loaders.
        exchange: when to exchange.

    Attributes:
        report: the latest exchanged step that was evaluated, the same on every rank.
        decision: what that step led to.
        news: decisions that changed something, or tell of an earlier change; for whoever takes them.
    """

    def __init__(
        self, policy: BalancePolicy, *, rank: int, world_size: int, lag: int = 0, exchange: ExchangeClock | None = None
    ) -> None:
        self.policy = policy
        self.rank = rank
        self.world_size = world_size
        self.lag = lag
        self.exchange = exchange or ExchangeClock()
        self.report: StepReport | None = None
        self.decision: Decision | None = None
        self.news: deque[Decision] = deque(maxlen=_MOST_NEWS)
        self._pending: deque[tuple[Tag, int, Callable[[], Sequence[Row]]]] = deque()  # generation of shares
        self._late: tuple[Tag, int, Sequence[Row]] | None = None
        self._decided: dict[Tag, tuple[tuple[int, ...], int]] = {}  # shares and their generation
        self._local: list[tuple[int, float, float]] = []  # samples, compute_s, wait_s since the last exchange
        self._last_exchange: Tag | None = None

    def full_shares(self, epoch: int, step: int) -> tuple[int, ...]:
        """Returns the shares of a full global batch drawn as batch ``step``, decided once per step."""
        tag = (epoch, step)
        if tag not in self._decided:
            if self._last_exchange is not None and tag <= self._last_exchange:
                self._start_over()
            self.consume((epoch, step - 1 - self.lag))
            self._decided[tag] = self.policy.shares, self.policy.generation
            horizon = (epoch, step - 2 * self.lag - 2)
            for old in [t for t in self._decided if t < horizon]:
                del self._decided[old]
        return self._decided[tag][0]

    def _start_over(self) -> None:
        """Steps that were exchanged are drawn again: all ranks were set back, e.g. by the learning-rate finder."""
        self.drain()
        self._decided.clear()
        self._last_exchange = None
        self.exchange.forget()

    def consume(self, limit: Tag) -> None:
        """Takes in every exchange up to ``limit``, in order; the last one is put off unless it is urgent."""
        while self._pending and self._pending[0][0] <= limit:
            self.catch_up()
            self._receive()
            assert self._late is not None
            rows = self._late[2]
            if limit[1] < 0 or self.policy.urgent([int(r[2]) for r in rows], [r[3] for r in rows]):
                self.catch_up()
        if self._late is not None and self._late[0] < limit:
            self.catch_up()

    def _receive(self) -> None:
        tag, generation, wait = self._pending.popleft()
        rows = wait()
        self._check(tag, rows)
        self._late = (tag, generation, rows)

    def catch_up(self) -> None:
        """Evaluates the record that was put off, if there is one."""
        if self._late is not None:
            (tag, generation, rows), self._late = self._late, None
            self._observe(tag, generation, rows)

    def _observe(self, tag: Tag, generation: int, rows: Sequence[Row]) -> None:
        records = tuple(
            SpeedSample(rank=r, step=int(row[1]), samples=int(row[2]), compute_s=row[3], wait_s=row[4])
            for r, row in enumerate(rows)
        )
        predicted = tuple(self.policy.predict_s([r.samples for r in records]))
        self.exchange.observe(tag, max(r.compute_s for r in records))
        measured = all(r.compute_s > 0 for r in records)
        if not measured:  # CUDA events of the very first step are not readable yet
            return
        self.decision = self.policy.take(records, generation=generation, batches=int(rows[0][6]))
        if self.decision.changed or self.decision.outcome:
            self.news.append(self.decision)
        self.report = StepReport(epoch=tag[0], step=tag[1], records=records, predicted_s=predicted)

    def _check(self, tag: Tag, rows: Sequence[Row]) -> None:
        mine = rows[self.rank]
        for r, row in enumerate(rows):
            if (row[0], row[1], row[5]) != (mine[0], mine[1], mine[5]):
                raise RuntimeError(
                    f"ranks disagree on the shares of epoch {tag[0]}, step {tag[1]}: rank {self.rank} ran"
                    f" (epoch, step, digest) = ({int(mine[0])}, {int(mine[1])}, {int(mine[5]):#x}), rank {r} ran"
                    f" ({int(row[0])}, {int(row[1])}, {int(row[5]):#x}). The ranks do not run the same program: check"
                    " that data, loader arguments and library versions are equal on all machines"
                )

    def measured(self, samples: int, compute_s: float | None, wait_s: float) -> None:
        """Notes one local step; ``None``: its time is not known yet."""
        if compute_s is not None:
            self._local.append((samples, compute_s, wait_s))

    def wants_exchange(self, epoch: int, step: int) -> bool:
        """Tells whether this step exchanges; the same answer on every rank."""
        if self.world_size == 1:
            return False
        last = self._last_exchange
        if last is None or last[0] != epoch:
            return True
        return step - last[1] >= self.exchange.interval((epoch, step - 2 - self.lag))

    def row(self, epoch: int, step: int) -> list[float]:
        """Returns what this rank sends for this step: the mean over the steps measured with its latest share."""
        digest = shares_digest(epoch, step, self._decided[epoch, step][0])
        latest = self._local[-1][0] if self._local else 0
        same = [m for m in self._local if m[0] == latest]
        n = max(1, len(same))
        compute_s = math.fsum(m[1] for m in same) / n
        wait_s = math.fsum(m[2] for m in same) / n
        batches = max(1, len(self._local))
        return [float(epoch), float(step), float(latest), compute_s, wait_s, float(digest), float(batches)]

    def sent(self, epoch: int, step: int, wait: Callable[[], Sequence[Row]]) -> None:
        """Notes an exchange under way; ``wait()`` returns every rank's row."""
        _, generation = self._decided.get((epoch, step), ((), self.policy.generation))
        self._pending.append(((epoch, step), generation, wait))
        self._last_exchange = (epoch, step)
        self._local.clear()

    def drain(self) -> None:
        """Takes in everything still under way (end of a run)."""
        while self._pending:
            self.catch_up()
            self._receive()
        self.catch_up()

    def abandon(self) -> None:
        """Forgets exchanges under way without waiting for them (after an error)."""
        self._pending.clear()
        self._late = None
