"""Turns measurements into shares at the right time: which record may decide which batch (layer P).

The rule, and why it needs no message: the shares of batch ``i`` may use the records exchanged at steps
``<= i - 1 - lag`` of the same epoch, and all of earlier epochs. ``lag`` is how far the data loader reads ahead. It is a
pure function of data every rank has, so all ranks cut each global batch in the same way, whatever their workers do.
A digest of the shares travels with the next exchange: a disagreement is an error, not a silently wrong gradient.

The newest record is the only one whose evaluation every rank would wait for, so it is evaluated at once only if it is
*urgent* (some rank's time is not what was expected); otherwise with the next one, and meanwhile `catch_up` evaluates it
where the time is free: while the gradients travel. Which records a batch has used stays a function of the records.

A rank that was not measured since the exchange before, e.g. because torch compiled in its step, sends a time of 0. The
others' times of such a record are learned, and nothing is decided before a record has all ranks' times. A rank that was
not because its own stream ends counts with its last speed, so that the others are still balanced.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy, Learned, ShareDecision
from lightning_hetero.types import SpeedSample, StepReport

T = TypeVar("T")

Tag = tuple[int, int]
"""(epoch, step) an exchange belongs to; ordered."""

_Wait = Callable[[], Sequence[Sequence[float]]]  # for all ranks' rows of an exchange
_MOST_NEWS = 64  # kept for a trace that may not be written


class Row(NamedTuple):
    """One rank's numbers, as they travel: float64, in this order, the same number from every rank.

    Attributes:
        epoch, step: the batch.
        samples, compute_s, wait_s: means of its steps since the row before, of those on its latest share.
        digest: of the shares it ran on.
        batches: since the row before.
        work: of ``samples`` samples, as the user's ``batch_cost`` counts it.
        free_cpu: part of its processors' time that others left free since it told last, in [0, 1]; NaN: not told.
        free_mem: part of its host's memory that is free, in [0, 1]; NaN: not told.
        most_samples: the most samples it can hold, as far as it has learned; NaN: it has not.
    """

    epoch: float
    step: float
    samples: float
    compute_s: float
    wait_s: float
    digest: float
    batches: float
    work: float
    free_cpu: float = math.nan
    free_mem: float = math.nan
    most_samples: float = math.nan

    def record(self, rank: int) -> SpeedSample:
        """Returns what a policy knows of this rank."""
        return SpeedSample(
            rank=rank, step=int(self.step), samples=int(self.samples), compute_s=self.compute_s,
            wait_s=self.wait_s, work=self.work, free_cpu=self.free_cpu, free_mem=self.free_mem,
            most_samples=None if math.isnan(self.most_samples) else int(self.most_samples),
        )  # fmt: skip


class Rows:
    """All ranks' rows of one exchange, by column: quick to look at, because every rank waits for it in every step.

    Attributes:
        epoch, step, samples, compute_s, digest, batches, work, free_cpu, free_mem: see `Row`; one per rank.
        most_samples: see `SpeedSample`; one per rank.
        numbers: as they came.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        columns = [tuple(column) for column in zip(*rows, strict=True)]
        self.epoch, self.step, self.samples, self.compute_s, _, self.digest, self.batches = columns[:7]
        self.work, self.free_cpu, self.free_mem, most_samples = columns[7:]
        self.most_samples = tuple(None if math.isnan(most) else int(most) for most in most_samples)
        self.numbers = rows

    @cached_property
    def records(self) -> tuple[SpeedSample, ...]:
        """What a policy knows of all ranks; made when it is first asked for."""
        return tuple(Row(*numbers).record(rank) for rank, numbers in enumerate(self.numbers))


def slowest(members: Sequence[Sequence[float]]) -> Row:
    """Returns one row for ranks that train on the same part: the slowest one's, which the others wait for.

    Its time is 0 if one of them was not measured, its memory that of the rank that has least.
    """
    rows = [Row(*numbers) for numbers in members]
    row = (min if any(not r.compute_s > 0 for r in rows) else max)(rows, key=lambda r: r.compute_s)
    known = [r.most_samples for r in rows if not math.isnan(r.most_samples)]
    return row._replace(most_samples=min(known, default=math.nan))


class _Step(NamedTuple):
    """One local step."""

    samples: int
    compute_s: float
    wait_s: float
    work: float


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


class ShareController:
    """Owns the policy of one run on one rank.

    Args:
        policy: started by the caller.
        rank: of the part that this rank trains on.
        world_size: number of parts; a row comes from each of their ranks, neighbours having the same part.
        lag: batches the loader reads ahead; the largest of all ranks and loaders.
        exchange: when to exchange.

    Attributes:
        report: the latest exchanged step that was evaluated, the same on every rank.
        news: decisions that changed something, or have something to tell; until they are taken.
        reports: as `report`, the latest of them; until they are taken.
        bounds: of all ranks, where one may be lost, which then has a row of NaN and gets no samples; else None.
        present: ranks that were there when the newest record that counts was exchanged.
    """

    def __init__(
        self, policy: BalancePolicy, *, rank: int, world_size: int, lag: int = 0, exchange: ExchangeClock | None = None
    ) -> None:
        self.policy, self.rank, self.world_size = policy, rank, world_size
        self.bounds: ShareBounds | None = None
        self.lag = policy.lag = lag
        self.exchange = exchange or ExchangeClock()
        self.report: StepReport | None = None
        self.news: deque[ShareDecision] = deque(maxlen=_MOST_NEWS)
        self.reports: deque[StepReport] = deque(maxlen=_MOST_NEWS)
        self.present = tuple(range(world_size))
        self._known: dict[int, Learned | None] = {}  # of ranks that are not there
        self._pending: deque[tuple[Tag, _Wait, Sequence[bool]]] = deque()
        self._late: tuple[Tag, Rows, bool] | None = None  # were all ranks measured?
        self._decided: dict[Tag, tuple[tuple[int, ...], Sequence[int]]] = {}  # shares, and the most that ranks may get
        self._local: list[_Step] = []  # since the last exchange
        self._last_exchange: Tag | None = None

    def full_shares(self, epoch: int, step: int) -> tuple[int, ...]:
        """Returns the shares of a full global batch drawn as batch ``step``, decided once per step."""
        tag = (epoch, step)
        if tag not in self._decided:
            if self._last_exchange is not None and tag <= self._last_exchange:
                self._start_over()
            self.consume((epoch, step - 1 - self.lag))
            self._decided[tag] = self.shares, self._of_all(self.policy.limits.upper, 0)
            horizon = (epoch, step - 2 * self.lag - 2)
            for old in [t for t in self._decided if t < horizon]:
                del self._decided[old]
        return self._decided[tag][0]

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full global batch, as last decided; 0 of one that is not there."""
        return self._of_all(self.policy.shares, 0)

    def _of_all(self, values: Sequence[T], other: T) -> tuple[T, ...]:
        """Returns values by rank as the run began, the other one for those that are not there."""
        if len(self.present) == self.world_size:
            return tuple(values)
        of = dict(zip(self.present, values, strict=True))
        return tuple(of.get(rank, other) for rank in range(self.world_size))

    def most(self, epoch: int, step: int) -> Sequence[int]:
        """Returns the most samples of each rank in a full global batch drawn as batch ``step``; after `full_shares`."""
        return self._decided[epoch, step][1]

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
            if self._late is not None and (limit[1] < 0 or self._is_urgent(self._late[1])):
                self.catch_up()
        if self._late is not None and self._late[0] < limit:
            self.catch_up()

    def _is_urgent(self, rows: Rows) -> bool:
        if not min(rows.compute_s) > 0:
            return False
        samples = self.policy.work.in_samples(rows.samples, rows.work)
        loads = zip(rows.free_cpu, rows.free_mem, strict=True)
        return self.policy.urgent(samples, rows.compute_s) or self.policy.load_changed(loads)

    def _receive(self) -> None:
        tag, wait, short = self._pending.popleft()
        everyone = wait()
        present = tuple(rank for rank, row in enumerate(everyone) if not math.isnan(row[0]))
        everyone = [everyone[rank] for rank in present] if self.bounds is not None else everyone
        rows = Rows(everyone)
        self._check(tag, rows)
        if self.bounds is not None and present != self.present:
            self.divide_among(present)
            return
        if (members := len(everyone) // self.world_size) > 1:
            rows = Rows([slowest(everyone[i : i + members]) for i in range(0, len(everyone), members)])
        self._late = (tag, self._stood_in(rows, short) if any(short) else rows, not any(short))
        # At once, and also if the times of this step say nothing.
        limited = self.policy.limit(rows.most_samples, rows.samples, rows.compute_s)
        if limited is not None:
            self.news.append(limited)

    def divide_among(self, ranks: tuple[int, ...]) -> None:
        """Other ranks are there: divides among these, with what was learned of each, also of one that was away."""
        self.join({"decided": self._decided, "known": self._learned()}, ranks)
        self._late = None
        self.news.append(ShareDecision(shares=self.shares, changed=True, reason="other ranks are there"))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a rank needs that joins now, as plain types; after `drain`."""
        return {"decided": dict(self._decided), "known": self._learned()}

    def _learned(self) -> dict[int, Learned | None]:
        return self._known | {rank: self.policy.learned(i) for i, rank in enumerate(self.present)}

    def join(self, state: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        """Goes on, in a rank that joins, as the others do with `divide_among`.

        Args:
            state: theirs, see `state_dict`.
            ranks: with this one.
        """
        self._decided, self._known = dict(state["decided"]), dict(state["known"])
        self.present = ranks
        assert self.bounds is not None
        self.policy.go_on_among(ranks, [self._known.get(rank) for rank in ranks], self.bounds)

    def _stood_in(self, rows: Rows, short: Sequence[bool]) -> Rows:
        """Returns rows in which ranks whose streams end have their share in the expected time.

        One of which nothing is known is as the slowest of the others.
        """
        everyone, shares = [Row(*numbers) for numbers in rows.numbers], self.policy.shares
        other = max(everyone, key=lambda row: row.compute_s)
        for rank, seconds in enumerate(self.policy.predict_s(shares)):
            if short[rank] and not everyone[rank].compute_s > 0:
                known = {"samples": float(shares[rank]), "compute_s": seconds, "work": math.nan}
                known = known if seconds > 0 else {name: getattr(other, name) for name in known}
                everyone[rank] = everyone[rank]._replace(**known)
        return Rows(everyone)

    def catch_up(self) -> None:
        """Evaluates the record that was put off, if there is one."""
        if self._late is not None:
            late, self._late = self._late, None
            self._observe(*late)

    def _observe(self, tag: Tag, rows: Rows, measured: bool) -> None:
        self.exchange.observe(tag, max(rows.compute_s))
        records = rows.records
        if not min(rows.compute_s) > 0:
            if max(rows.compute_s) > 0:
                self.policy.take_incomplete(records)
            return
        predicted = tuple(self.policy.predict_s(self.policy.work_in_samples(records)))
        decision = self.policy.take(records, batches=int(rows.batches[0]))
        if decision.changed:
            self.news.append(decision)
        if measured:
            if len(self.present) < self.world_size:
                away = SpeedSample(rank=0, step=tag[1], samples=0, compute_s=0.0, wait_s=0.0)
                records = tuple(replace(one, rank=rank) for rank, one in enumerate(self._of_all(records, away)))
                predicted = self._of_all(predicted, math.nan)
            self.report = StepReport(epoch=tag[0], step=tag[1], records=records, predicted_s=predicted)
            self.reports.append(self.report)

    def _check(self, tag: Tag, rows: Rows) -> None:
        everyone = list(zip(rows.epoch, rows.step, rows.digest, strict=True))
        mine = everyone[self.rank * (len(everyone) // self.world_size)] if self.bounds is None else everyone[0]
        if everyone.count(mine) != len(everyone):
            r, other = next((r, ran) for r, ran in enumerate(everyone) if ran != mine)
            ours, theirs = ("({:.0f}, {:.0f}, {:#x})".format(*ran[:2], int(ran[2])) for ran in (mine, other))
            raise RuntimeError(
                f"ranks disagree on the shares of epoch {tag[0]}, step {tag[1]}: rank {self.rank} ran"
                f" (epoch, step, digest) = {ours}, rank {r} ran {theirs}. The ranks do not run the same program: check"
                " that data, loader arguments and library versions are equal on all machines"
            )

    def measured(self, samples: int, compute_s: float, wait_s: float, work: float = math.nan) -> None:
        """Notes one local step; ``work``: see `Row`."""
        self._local.append(_Step(samples, compute_s, wait_s, work))

    def wants_exchange(self, epoch: int, step: int) -> bool:
        """Returns whether this step exchanges; the same answer on every rank."""
        if self.world_size == 1:
            return False
        last = self._last_exchange
        if last is None or last[0] != epoch:
            return True
        return step - last[1] >= self.exchange.interval((epoch, step - 2 - self.lag))

    def row(self, epoch: int, step: int, **told: float) -> Row:
        """Returns what this rank sends for this step: the mean over the steps measured with its latest share.

        Args:
            epoch, step: of the batch.
            told: what it tells besides, see `Row`.
        """
        latest = self._local[-1].samples if self._local else 0
        same = [m for m in self._local if m.samples == latest]
        n = max(1, len(same))
        return Row(
            epoch=float(epoch), step=float(step), samples=float(latest),
            compute_s=math.fsum(m.compute_s for m in same) / n, wait_s=math.fsum(m.wait_s for m in same) / n,
            digest=float(shares_digest(epoch, step, self._decided[epoch, step][0])),
            batches=float(max(1, len(self._local))), work=math.fsum(m.work for m in same) / n, **told,
        )  # fmt: skip

    def sent(self, epoch: int, step: int, wait: _Wait, short: Sequence[bool] = ()) -> None:
        """Notes an exchange under way; ``wait()`` returns every rank's row.

        Args:
            epoch, step: of the batch.
            wait: as above.
            short: which parts had fewer samples than their share, because streams of the ranks' own end.
        """
        self._pending.append(((epoch, step), wait, short))
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
