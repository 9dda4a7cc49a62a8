"""Never slower than equal shares: others are played only as far as what they have saved covers the risk (layer P).

Whatever the ranks' speeds turn out to be, a batch takes at most ``1 + a`` times as long as with equal shares if no rank
has more than ``1 + a`` times its equal share. So ``a`` is a *stake*, known before the speeds are. What the batch would
have taken with equal shares is known after it, from each rank's measured time and its cost model. The difference goes
into an account, and stakes stay within it, those of batches under way included. So unequal shares cost at most what
they have saved before, what the account starts with, and a small income from which trust recovers.

That is the idea of conservative bandits (Wu, Shariff, Lattimore and Szepesvari, ICML 2016): leave a default only if
even the worst outcome keeps a promised total. Stakes in proportion to the account are those of D-Prod (Even-Dar,
Kearns, Mansour and Wortman, 2008) and (A, B)-Prod (Sani, Neu and Lazaric, 2014): they lose ever less, and win
exponentially. Ours: the stake as upper bounds of the min-max split, so that the split is the best one of that risk;
batches under way; trials of changes.

All is in + - * / of IEEE 754, so that every rank comes to the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_hetero.types import Cost, SpeedSample

# In steps of mean time with equal shares; at most 2.5 + 0.005 * 200 = 3.5 in 200 steps, of which 2 % are 4.
_START, _START_EACH, _START_MOST = 0.1, 0.55, 2.5  # and so much for each batch that a decision comes late
_INCOME = 0.005  # per batch
_BELIEVED = 0.8  # of what was saved: a model may be wrong about a step's fixed part
_MOST = 2.0  # and one more per batch that a decision comes late: what good times leave to lose in bad ones
_MEAN_BATCHES = 50  # of the mean time
_SLACK = 1.25  # so that shares at the limit do not change with every record
_TRIAL = 3  # records after which a change must have paid ...
_WORSE = 0.02  # ... or at least have cost no more than this part of their time

Shares: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class _Trial:
    """A change whose worth is not known yet."""

    new: Shares
    old: Shares
    records: int = 0
    took_s: float = 0.0
    old_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.records >= _TRIAL and self.took_s > (1.0 + _WORSE) * self.old_s


class RegretGuard:
    """The account of one run, and what it allows.

    Attributes:
        lag: batches that are drawn before a decision can count.
        batches: that the next record stands for.
    """

    def __init__(self) -> None:
        self.lag = 0
        self.batches = 1
        self.load_state_dict({})
        self.start((), least=1)

    def start(self, equal: Shares, *, least: int, quantum: int = 1) -> None:
        """Opens a run; the account stays what it is.

        Args:
            equal: equal shares within the bounds, in force until the first decision.
            least: samples of a dummy, which a rank without any computes.
            quantum: shares are multiples of it; a rank without any may get one for a stake of 1.
        """
        self._least, self._quantum = least, quantum
        self._latest = equal
        self.rebase(equal)
        self._under_way: list[Shares] = []  # drawn, not measured
        self._batches = 1  # per record, lately
        self._trial: _Trial | None = None

    def rebase(self, equal: Shares) -> None:
        """Measures from now on against other equal shares: what ranks can hold has changed."""
        self._equal = equal
        self._units = tuple(max(n, self._least, 0.5 * self._quantum) for n in equal)

    def _computed(self, shares: Shares) -> Shares:
        return tuple(max(n, self._least) for n in shares)

    # ---- what is allowed --------------------------------------------------------------------------------------

    def stake(self, shares: Shares) -> float:
        """Returns how much longer than with equal shares a batch can take at most, relative."""
        return max(0.0, max(n / e for n, e in zip(shares, self._units, strict=True)) - 1.0)

    @property
    def allowed(self) -> float:
        """The stake that the account covers."""
        under_way = sum(map(self.stake, self._under_way))
        # A decision counts for all batches until the first of them is measured: the account covers so many.
        lasting = self._credit / (self.lag + self._batches)
        return max(0.0, min(lasting, (self._credit - under_way) / self._batches))

    def covers(self, shares: Shares) -> bool:
        """Whether these may stay in force: a little more than what may be chosen now."""
        return self.stake(shares) <= _SLACK * self.allowed

    def upper(self, upper: Sequence[int], *, part: float = 1.0) -> list[int]:
        """Returns the most samples per rank, within ``upper``, for this part of the stake that the account covers."""
        most, quantum = 1.0 + part * self.allowed, self._quantum
        return [
            max(equal, int(min(most * unit, float(limit))) // quantum * quantum)
            for equal, unit, limit in zip(self._equal, self._units, upper, strict=True)
        ]

    def why(self, shares: Shares) -> str:
        """Returns in words why shares had to come back to these."""
        stake = self.stake(shares)
        most = f"no rank gets more than {1.0 + stake:.2f} times its equal share" if stake else "back to equal shares"
        return f"prediction does not pay: {most}"

    # ---- what has come of it ----------------------------------------------------------------------------------

    def decided(self, shares: Shares, *, on_trial: bool = False) -> None:
        """Notes the shares of all batches that are drawn from now on; ``on_trial``: a change that must pay off."""
        if on_trial:
            self._trial = _Trial(new=shares, old=self._latest)
        self._latest = shares

    def before_failure(self) -> Shares | None:
        """Returns the shares before the last change if that has failed; once."""
        trial = self._trial
        if trial is None or trial.records < _TRIAL:
            return None
        self._trial = None
        return trial.old if trial.failed and trial.new == self._latest else None

    def learn(self, records: Sequence[SpeedSample], costs: Sequence[Cost], batches: int) -> None:
        """Settles the account.

        Args:
            records: one per rank, of the latest batch.
            costs: the ranks' models; of them only the proportion of two times counts.
            batches: that the records stand for; of the others the shares are known, and the speeds taken to be these.
        """
        drawn = self._under_way + [self._latest] * max(0, batches + self.lag - len(self._under_way))
        measured, self._under_way = drawn[:batches], drawn[batches : batches + self.lag]
        played = tuple(record.samples for record in records)
        part = min(1.0, sum(played) / sum(self._equal))  # the last batch of an epoch may be smaller

        def batch_s(shares: Shares) -> float:
            """What a batch would have taken with these shares, at the measured speeds."""
            return max(
                record.compute_s * _ratio(cost, n * part, record.samples)
                for record, cost, n in zip(records, costs, self._computed(shares), strict=True)
            )

        took_s, equal_s = max(record.compute_s for record in records), batch_s(self._equal)
        saved_s = 0.0
        for shares in dict.fromkeys(measured):
            each_s = took_s if shares == measured[-1] else batch_s(shares)
            saved_s += measured.count(shares) * (equal_s - each_s)
        self._batches = batches
        if not self._seen:
            self._credit = min(_START + _START_EACH * (self.lag + batches), _START_MOST)
        self._seen = min(self._seen + batches, _MEAN_BATCHES)
        self._mean_s += (equal_s - self._mean_s) * min(1.0, batches / self._seen)
        earned_s = batches * _INCOME * equal_s + (_BELIEVED * saved_s if saved_s > 0.0 else saved_s)
        most = _MOST + self.lag + batches
        self._credit = min(max(self._credit + earned_s / self._mean_s, 0.0), most)
        trial = self._trial
        if trial is not None and trial.records < _TRIAL and played == self._computed(trial.new):
            trial.records += 1
            trial.took_s += took_s
            trial.old_s += batch_s(trial.old)

    def state_dict(self) -> dict[str, float]:
        """Returns plain numbers."""
        return {"credit": self._credit, "mean_s": self._mean_s, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over another run's account; of an empty state: opens one."""
        self._credit = float(state.get("credit", _START + _START_EACH))
        self._mean_s = float(state.get("mean_s", 0.0))
        self._seen = int(state.get("seen", 0))


def _ratio(cost: Cost, samples: float, measured: int) -> float:
    """Returns the time of ``samples`` over that of the samples that were measured."""
    measured_s = cost.seconds(measured)
    return cost.seconds(samples) / measured_s if measured_s > 0.0 else samples / max(1, measured)
