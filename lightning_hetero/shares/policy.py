"""Decides how many samples each rank gets: predict, solve, and change only when it pays (layer P).

The policy is after LB-BSP (Chen et al., SoCC'20): at an iteration boundary re-size the batches so that all ranks
finish together while the global batch stays what it was. The paper's worker speeds come from a NARX network, which
is ``predictor="narx"``; the affine model ``T = a + b x`` per rank, which is the default, the dead band and the
noise guard are ours.

Every rank holds the same policy and feeds it the same records, so every rank decides the same, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from lightning_hetero.checked import real, whole
from lightning_hetero.predictors import Kalman, Predictor, PredictorName, by_name
from lightning_hetero.shares.alone import fastest_alone
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.caps import ShareLimits
from lightning_hetero.shares.decision import ShareDecision
from lightning_hetero.shares.guard import RegretGuard
from lightning_hetero.shares.items import WorkPerSample
from lightning_hetero.solvers import minimax_none_or_least
from lightning_hetero.types import AffineCost, Allocation, SpeedSample

__all__ = ["BalancePolicy", "ShareDecision"]

_MIN_GAIN_S = 0.0005  # shares move only if the slowest rank's predicted time falls by more than this [s] ...
_NOISE_GUARD = 4.0  # ... and by more than this many standard deviations of the prediction
_SURPRISE = 0.1  # relative deviation of a time from the expected one, or of loads, above which a record is urgent
_TIGHT = 0.8  # of what the guard allows, when shares must come back, so that they need not at the next record


Learned: TypeAlias = tuple[str, Mapping[str, Any], Mapping[str, float]]
"""What was learned of one rank: the predictor's class and state, and the guard's account."""


class BalancePolicy:
    """Predict, solve, dead band.

    Args:
        predictor: how a rank's time is modelled: ``"kalman"``, ``"narx"``, ``"ewma"``, ``"last"`` or a
            `Predictor` whose settings are copied for every rank.
        dead_band: shares move only if the slowest rank's predicted time falls by more than this fraction, and by more
            than the noise of the prediction.
        warmup: first records to ignore (lazy initialisation, compilation, bucket rebuild).
        guard: keep the run from being slower than with equal shares, see `guard`; ``False`` for comparisons only.

    Attributes:
        shares: samples per rank of a full global batch, in force for the next batch to be drawn.
        limits: least and most samples per rank.
        work: what a sample's is, where work is counted.
        lag: batches that are drawn before a decision can count; set by the `Controller`.

    Raises:
        ValueError: a setting is out of range, or the predictor's name is unknown.
    """

    def __init__(
        self, *, predictor: PredictorName | Predictor = "kalman", dead_band: float = 0.02,
        warmup: int = 1, guard: bool = True,
    ) -> None:  # fmt: skip
        self.dead_band, self._warmup, self._guarded = real("dead_band", dead_band), whole("warmup", warmup), guard
        self.prototype = by_name(predictor) if isinstance(predictor, str) else predictor
        if not callable(getattr(self.prototype, "fresh", None)):
            raise ValueError(f"predictor={predictor!r} must be a name or a lightning_hetero.predictors.Predictor")
        self._guard = RegretGuard()
        self._predictors: list[Predictor] = []
        self._meters: list[Kalman] = []  # tell the guard a step's fixed part where predictors know none
        self._restored: tuple[list[Predictor], int, Mapping[str, float]] | None = None  # for the next start
        self.shares: tuple[int, ...] = ()
        self._equal: tuple[int, ...] = ()
        self.limits = ShareLimits()
        self.work = WorkPerSample()
        self._seen = 0
        self._expected: tuple[tuple[float, ...], list[float]] = (), []  # samples, and times of these [s]
        self._loads: list[tuple[float, float]] = []  # told with the last record

    @property
    def lag(self) -> int:
        return self._guard.lag

    @lag.setter
    def lag(self, batches: int) -> None:
        self._guard.lag = batches

    def settings(self) -> dict[str, str]:
        """Returns what decides besides the records, in words: ranks where it differs would part ways."""
        predictor: dict[str, object] = {
            name: value
            for name, value in vars(self.prototype).items()
            if name not in self.prototype.MEMORY and isinstance(value, int | float | str | tuple)
        }
        return {
            "policy": type(self).__name__,
            "predictor": f"{type(self.prototype).__name__}({', '.join(f'{n}={v!r}' for n, v in predictor.items())})",
            "thresholds": f"dead_band={self.dead_band!r}, warmup={self._warmup!r}, guard={self._guarded!r}",
        }

    def start(self, *, world_size: int, total: int, bounds: ShareBounds, quantum: int = 1) -> None:
        """Opens a run: equal shares, or the speeds that `load_state_dict` has brought.

        Args:
            world_size: number of ranks.
            total: samples of a full global batch.
            bounds: limits per rank.
            quantum: shares are multiples of this many samples.

        Raises:
            ValueError: the bounds admit no split.
        """
        self.limits.start(*bounds.resolve(world_size, total, quantum), total=total, quantum=quantum, least=bounds.least)
        self._expected = (), []
        self.work = WorkPerSample()
        if self._restored is not None:
            (self._predictors, self._seen, account), self._restored = self._restored, None
            self._guard.load_state_dict(account)
        known = len(self._predictors) == world_size and all(p.ready for p in self._predictors)
        if not known:
            self._predictors = [self.prototype.fresh() for _ in range(world_size)]
            self._seen = 0
            self._guard.load_state_dict({})
        self._meters = [] if isinstance(self.prototype, Kalman) else [Kalman() for _ in range(world_size)]
        equal = self.limits.alike()
        if not equal.ok:
            raise ValueError(equal.reason)
        self.shares = self._equal = equal.shares
        self._guard.start(equal.shares, least=bounds.least, quantum=quantum)
        if known:
            self.shares = self._best(self._most()).shares or self.shares
            self._guard.decided(self.shares)

    def go_on_among(self, ranks: Sequence[int], known: Sequence[Learned | None], bounds: ShareBounds) -> None:
        """Divides among some of the ranks, ascending, of which this is known; see `recall`.

        ``bounds`` are those of all ranks, which hold unless they admit no split.
        """
        total, quantum = self.limits.total, self.limits.quantum
        self._predictors, self._restored, self.limits = [], None, ShareLimits()
        self.recall(known)
        try:
            self.start(world_size=len(ranks), total=total, bounds=bounds.among(ranks), quantum=quantum)
        except ValueError:
            few = replace(bounds, lower=None, upper=None)
            self.start(world_size=len(ranks), total=total, bounds=few, quantum=quantum)

    def work_in_samples(self, records: Sequence[SpeedSample]) -> list[float]:
        """Returns each rank's work in samples, for `predict_s`; its samples, if all cost the same."""
        return self.work.in_samples([r.samples for r in records], [r.work for r in records])

    @property
    def wants_load(self) -> bool:
        """Whether ranks report what others leave free on their hosts."""
        return bool(getattr(self.prototype, "WANTS_LOAD", False))

    def learned(self, rank: int) -> Learned | None:
        """Returns what `recall` takes in a later run, of this rank; None: nothing was learned."""
        known = self.state_dict()["predictors"]
        return (type(self.prototype).__name__, known[rank], self._guard.state_dict()) if known else None

    def recall(self, known: Sequence[Learned | None]) -> None:
        """Takes over, at the next `start`, what an earlier run has learned, unless this one has or was given some.

        Args:
            known: of each rank, see `learned`; None: nothing is known of it.
        """
        name = type(self.prototype).__name__
        found = [one for one in known if one is not None and one[0] == name]
        if len(found) == len(known) and not (self._predictors or self._restored):
            account = min((guard for _, _, guard in found), key=lambda guard: guard.get("credit", 0.0))
            state = {"predictor": name, "predictors": [one for _, one, _ in found], "guard": account}
            with suppress(ValueError):  # of a version with other predictors
                self.load_state_dict(state)

    def predict_s(self, samples: Sequence[float]) -> list[float]:
        """Returns the predicted compute time [s] of each rank for ``samples``; NaN before the first measurement."""
        return [p.predict(n) if p.ready else math.nan for p, n in zip(self._predictors, samples, strict=True)]

    def fastest_alone(self) -> tuple[tuple[int, ...], float]:
        """Returns who is fastest without the others, and a batch's time then [s], see `fastest_alone`.

        By the work alone: what fewer ranks save in exchanging gradients is not known. A rank must have been measured.
        """
        limits = self.limits
        costs = [p.cost() for p in self._predictors]
        return fastest_alone(costs, limits.total, upper=limits.upper, least=limits.least, quantum=limits.quantum)

    def limit(
        self, most_samples: Sequence[int | None], samples: Sequence[float], compute_s: Sequence[float]
    ) -> ShareDecision | None:
        """Takes in what each rank says that it can hold, also if its time says nothing; before `take`.

        Args:
            most_samples: see `SpeedSample`, one per rank.
            samples, compute_s: what it has computed on, and how long, which shows that so many fit; 0 s: not known.

        Returns:
            What was decided at once, if a rank has more samples than that; else None.
        """
        if not self.limits.take(most_samples, samples, compute_s):
            return None
        self._expected = (), []
        equal = self.limits.alike()
        self._equal = equal.shares if equal.ok else self._equal
        self._guard.rebase(self._equal)
        if all(n <= b for n, b in zip(self.shares, self.limits.upper, strict=True)):
            return None
        best = self._best(self._most()) if all(p.ready for p in self._predictors) else equal
        held = best if best.ok else equal
        if not held.ok or held.shares == self.shares:
            return None
        self.shares = held.shares
        self._guard.decided(held.shares)
        reason = "memory" if self.limits.fit else "memory: together the ranks hold less than the global batch"
        return ShareDecision(shares=self.shares, changed=True, reason=reason)

    def urgent(self, samples: Sequence[float], compute_s: Sequence[float]) -> bool:
        """Returns whether a record must be evaluated before the next batch: some rank's time was not as expected.

        Cheap, because it is asked on the critical path of every step; the same on every rank.

        Args:
            samples: each rank's, or what its work is worth in them, see `work`.
            compute_s: each rank's time [s].
        """
        if tuple(samples) != self._expected[0]:
            if self._seen <= self._warmup or not all(p.ready for p in self._predictors):
                return True
            self._expect(samples)
        return any(abs(s - e) > _SURPRISE * e for s, e in zip(compute_s, self._expected[1], strict=True))

    def _expect(self, samples: Sequence[float]) -> None:
        self._expected = tuple(samples), [p.predict(n) for p, n in zip(self._predictors, samples, strict=True)]

    def load_changed(self, loads: Iterable[tuple[float, float]]) -> bool:
        """Returns whether a rank's load differs from the one reported before, which makes its record urgent, too.

        Args:
            loads: ``free_cpu`` and ``free_mem`` of each rank, see `SpeedSample`; NaN changes nothing.
        """
        if not self.wants_load:
            return False
        pairs = zip(loads, self._loads, strict=False)  # none before the first record
        return any(abs(now - then) > _SURPRISE for new, old in pairs for now, then in zip(new, old, strict=True))

    def take(self, records: Sequence[SpeedSample], *, batches: int) -> ShareDecision:
        """Takes in one record per rank, in rank order, and decides the shares from now on.

        Args:
            records: of one batch.
            batches: how many batches the records are means of.
        """
        self._guard.batches = batches
        return self.observe(records)

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        """`take`, for a policy that decides by the times alone."""
        if (reason := self._learn(records)) is not None:
            return ShareDecision(shares=self.shares, changed=False, reason=reason)
        costs = [p.cost() for p in self._predictors]
        self._guard.learn(records, [m.cost() for m in self._meters] or costs, self._guard.batches)
        decision = self._decide(costs)
        self._expect(self.shares)  # likely the next record's, which every rank waits for, unlike for this one
        return decision

    def take_incomplete(self, records: Sequence[SpeedSample]) -> None:
        """Takes in what was measured where some ranks' times are unknown (0): learns, and decides nothing.

        A decision waits for a record of all ranks: a time of 0 says nothing of the step, nor of other shares.
        """
        self._learn(records)

    def _learn(self, records: Sequence[SpeedSample]) -> str | None:
        """Hands the records to the predictors; returns why nothing can be decided yet."""
        self._seen += 1
        self._expected = (), []
        self.work.add(records)
        if self._seen <= self._warmup:
            return "warm-up"
        work = self.work_in_samples(records)
        if wants_load := self.wants_load:
            self._loads = [(record.free_cpu, record.free_mem) for record in records]
        for predictor, record, samples in zip(self._predictors, records, work, strict=True):
            if record.compute_s > 0 and samples > 0:
                if wants_load:
                    predictor.told(free_cpu=record.free_cpu, free_mem=record.free_mem)
                predictor.update(samples, record.compute_s)
        for meter, record, samples in zip(self._meters, records, work, strict=False):
            if record.compute_s > 0 and samples > 0:
                meter.update(samples, record.compute_s)
        ready = all(p.ready for p in (*self._predictors, *self._meters))
        return None if ready else "not every rank was measured yet"

    def _decide(self, costs: Sequence[AffineCost]) -> ShareDecision:
        now_s = [cost.seconds(n) for cost, n in zip(costs, self.shares, strict=True)]
        slowest = max(range(len(now_s)), key=now_s.__getitem__)
        current_s = now_s[slowest]
        # Leaving equal shares takes more evidence than improving unequal ones: on equal devices nothing is to be won.
        caution = _NOISE_GUARD * (1.0 if self.shares == self._equal else 0.25)
        threshold_s = max(
            self.dead_band * current_s,
            _MIN_GAIN_S,
            caution * self._predictors[slowest].std_s(self.shares[slowest]),
        )

        def keep(reason: str, gain_s: float = 0.0) -> ShareDecision:
            self._guard.decided(self.shares)
            return ShareDecision(
                shares=self.shares, changed=False, reason=reason, predicted_s=current_s, gain_s=gain_s
            )

        def change(shares: tuple[int, ...], reason: str, *, on_trial: bool = False) -> ShareDecision:
            self._guard.decided(shares, on_trial=on_trial)
            self.shares = shares
            predicted_s = _batch_s(costs, shares)
            return ShareDecision(
                shares=shares, changed=True, reason=reason, predicted_s=predicted_s, gain_s=current_s - predicted_s
            )

        if self._guarded and not self._guard.covers(self.shares):
            upper = self._guard.upper(self.limits.upper, part=_TIGHT)
            shares = self._best(upper).shares or self._equal
            return change(shares, self._guard.why(shares))
        before = self._guard.before_failure()
        reason, gain_s = "balanced", 0.0
        if current_s - min(now_s) > threshold_s:  # no split gains more than the spread: skip the solver
            best = self._best(self._most())
            if not best.ok:
                return keep(best.reason)
            reason, gain_s = "dead band", current_s - best.makespan_s
            if gain_s > threshold_s and best.shares != self.shares:
                return change(best.shares, "rebalanced", on_trial=True)
        fits = before is not None and all(n <= most for n, most in zip(before, self.limits.upper, strict=True))
        if self._guarded and before is not None and fits and self._guard.covers(before):
            return change(before, "the last change made batches longer: taken back")
        lost_s = _batch_s(costs, self._equal) - current_s
        if self._guarded and self.shares != self._equal and lost_s < 0.5 * threshold_s:
            return change(self._equal, "equal shares are as good")
        return keep(reason, gain_s)

    def _most(self) -> list[int]:
        """Returns the most samples per rank that are allowed now."""
        return self._guard.upper(self.limits.upper) if self._guarded else self.limits.upper

    def _best(self, upper: Sequence[int] | None = None) -> Allocation:
        upper = self.limits.upper if upper is None else upper
        return minimax_none_or_least(
            [p.cost() for p in self._predictors], self.limits.total, least=self.limits.least,
            lower=[min(a, b) for a, b in zip(self.limits.lower, upper, strict=True)], upper=upper,
            quantum=self.limits.quantum,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types only: predictors, shares, records seen, what ranks can hold, the guard's account."""
        predictors, seen, account = self._restored or (self._predictors, self._seen, self._guard.state_dict())
        return {
            "predictor": type(self.prototype).__name__,
            "predictors": [p.state_dict() for p in predictors],
            "shares": list(self.shares),
            "seen": seen,
            "most_samples": self.limits.known(),
            "guard": dict(account),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over, at the next `start`, the speeds another run has learned, and what its ranks could hold.

        Speeds of another predictor class are ignored. A run under way goes on with its own: the learning-rate finder
        restores a checkpoint from before the first measurement while it still trains.
        """
        self.limits.restore(state.get("most_samples", ()))
        learned = state.get("predictors", [])
        if not learned or state.get("predictor") != type(self.prototype).__name__:
            return
        predictors = [self.prototype.fresh() for _ in learned]
        for predictor, one in zip(predictors, learned, strict=True):
            predictor.load_state_dict(one)
        self._restored = (predictors, int(state.get("seen", 0)), state.get("guard", {}))


def _batch_s(costs: Sequence[AffineCost], shares: Sequence[int]) -> float:
    """Returns the predicted time of a batch [s]."""
    return max(cost.seconds(n) for cost, n in zip(costs, shares, strict=True))
