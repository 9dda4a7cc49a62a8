"""Decides how many samples each rank gets: predict, solve, and change only when it pays (layer P).

The policy is after LB-BSP (Chen et al., SoCC'20): at an iteration boundary re-size the batches so that all ranks
finish together while the global batch stays what it was. The paper's worker speeds come from a NARX network; the
affine model ``T = a + b x`` per rank, the dead band, the cooldown and the noise guard are ours.

Every rank holds the same policy and feeds it the same records, so every rank decides the same, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lightning_hetero.predictors import Predictor, PredictorName, by_name
from lightning_hetero.solvers import minimax, minimax_none_or_least
from lightning_hetero.types import AffineCost, Allocation, SpeedSample

__all__ = ["BalancePolicy", "Decision", "ShareBounds"]

Bound = int | Sequence[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBounds:
    """Lower and upper number of samples per rank in a full global batch.

    Args:
        lower: least samples per rank, one number or one per rank; ``None``: a quarter of the equal share.
        upper: most samples per rank, one number or one per rank; ``None``: four times the equal share.
        least: a rank gets no sample or at least this many; 2 where BatchNorm cannot do with one.

    Raises:
        ValueError: a bound is no number of samples.
    """

    lower: Bound = None
    upper: Bound = None
    least: int = 1

    def __post_init__(self) -> None:
        _check_numbers("min_samples", self.lower)
        _check_numbers("max_samples", self.upper)

    def check_ranks(self, world_size: int) -> None:
        """Checks what can be known before the global batch is.

        Raises:
            ValueError: a list of the wrong length, or bounds that cross.
        """
        low = _per_rank("min_samples", self.lower, world_size, 0)
        _check_order(low, _per_rank("max_samples", self.upper, world_size, max(low)))

    def resolve(self, world_size: int, total: int, quantum: int = 1) -> tuple[list[int], list[int]]:
        """Returns bounds per rank as multiples of ``quantum``.

        Raises:
            ValueError: the bounds have the wrong length, cross, or admit no split of ``total``.
        """
        if total < self.least:
            raise ValueError(
                f"a global batch of {total} samples is less than the {self.least} that BatchNorm needs: raise it to at"
                f" least {self.least}"
            )
        equal = total / world_size
        least = -(-self.least // quantum) * quantum
        # At least one sample by default: a rank with none still runs a whole step on a dummy sample.
        default_low = max(quantum, least, _down(int(equal / 4), quantum))
        default_up = min(total, -(-math.ceil(4 * equal) // quantum) * quantum)
        low = _per_rank("min_samples", self.lower, world_size, default_low)
        up = _per_rank("max_samples", self.upper, world_size, default_up)
        if self.lower is None:  # a small explicit maximum also lowers the default minimum
            low = [min(a, b) if b >= least else 0 for a, b in zip(low, up, strict=True)]
            if sum(low) > total >= least > quantum:  # not enough for all: some ranks rest
                low = [0] * world_size
        if self.least > 1 and not low[0] and up[0] >= least and sum(low) + least <= total:
            low[0] = least  # BatchNorm's statistics are rank 0's, as in any DDP
        low = [max(-(-a // quantum) * quantum, least) if a else 0 for a in low]
        up = [_down(b, quantum) if b >= least else 0 for b in up]
        _check_order(low, up, f" (multiples of {quantum}{self._why()})")
        if sum(low) > total:
            raise ValueError(
                f"min_samples={self.lower!r} asks for {sum(low)} samples on {world_size} ranks{self._why()}, but the"
                f" global batch has {total}; lower min_samples or raise the global batch to at least {sum(low)}"
            )
        if sum(up) < total:
            raise ValueError(
                f"max_samples={self.upper!r} admits {sum(up)} samples on {world_size} ranks{self._why()}, but the"
                f" global batch has {total}; raise max_samples or lower the global batch to at most {sum(up)}"
            )
        return low, up

    def _why(self) -> str:
        return f", none or at least {self.least} per rank for BatchNorm" if self.least > 1 else ""


def _down(value: int, quantum: int) -> int:
    return value // quantum * quantum


def _per_rank(name: str, value: Bound, world_size: int, default: int) -> list[int]:
    values = [default if value is None else value] * world_size if not isinstance(value, Sequence) else list(value)
    if len(values) != world_size:
        raise ValueError(f"{name} lists {len(values)} ranks, but there are {world_size}: give one number per rank")
    return values


def _check_numbers(name: str, value: object) -> None:
    if value is None:
        return
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    values = cast("Sequence[object]", value) if listed else [cast("object", value)]
    for rank, number in enumerate(values):
        if type(number) is not int or number < 0:
            of = f" of rank {rank}" if listed else ""
            raise ValueError(
                f"{name}={number!r}{of} must be a whole number >= 0 (samples), or a list of one per rank"
            )


def _check_order(low: Sequence[int], up: Sequence[int], why: str = "") -> None:
    for rank, (a, b) in enumerate(zip(low, up, strict=True)):
        if a > b:
            raise ValueError(
                f"rank {rank} must get at least {a} and at most {b} samples, which no number meets{why}; lower"
                " min_samples or raise max_samples"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided on the last records, and why.

    Attributes:
        shares: samples per rank from now on.
        changed: whether they are others than before.
        reason: in words.
        predicted_s: time of a batch that is expected of them [s].
        gain_s: time per batch that is won, or would have been [s].
        data: what else a trace says of it, plain.
        outcome: what became of an earlier change, for a trace, plain; empty: nothing new.
    """

    shares: tuple[int, ...]
    changed: bool
    reason: str
    predicted_s: float = math.nan
    gain_s: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outcome: Mapping[str, Any] = field(default_factory=dict[str, Any])


class BalancePolicy:
    """Predict, solve, dead band, cooldown.

    Args:
        predictor: how a rank's time is modelled: ``"kalman"``, ``"ewma"``, ``"last"`` or a `Predictor` whose settings
            are copied for every rank.
        dead_band: shares move only if the slowest rank's predicted time falls by more than this fraction ...
        min_gain_s: ... and by more than this many seconds ...
        noise_guard: ... and by more than this many standard deviations of the prediction; a quarter of that once the
            shares are unequal anyway.
        cooldown: records to let pass after a change before the next one.
        surprise: relative deviation of a rank's time from the expected one above which the record is urgent: it
            decides the very next batch; others are evaluated while gradients travel, one step later.
        warmup: first records to ignore (lazy initialisation, compilation, bucket rebuild).
        solver: the min-max split; same signature as `lightning_hetero.solvers.minimax`.

    Attributes:
        planned_batches: of the run, if known; set before `start`.
        generation: number of the shares in force, told back with the records of the batches that ran on them, see
            `take`; a policy that wants to know counts it.

    Raises:
        ValueError: a setting is out of range, or the predictor's name is unknown.
    """

    def __init__(
        self,
        *,
        predictor: PredictorName | Predictor = "kalman",
        dead_band: float = 0.02,
        min_gain_s: float = 0.0005,
        noise_guard: float = 4.0,
        cooldown: int = 0,
        warmup: int = 1,
        surprise: float = 0.1,
        solver: Callable[..., Allocation] = minimax,
    ) -> None:
        numbers: dict[str, Any] = {  # whatever a command line has made of them
            "dead_band": dead_band,
            "min_gain_s": min_gain_s,
            "noise_guard": noise_guard,
            "surprise": surprise,
        }
        for name, value in numbers.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r} must be a finite number >= 0")
        for name, value in (("cooldown", cooldown), ("warmup", warmup)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r} must be a whole number >= 0 (records)")
        self.prototype = by_name(predictor) if isinstance(predictor, str) else predictor
        if not callable(getattr(self.prototype, "fresh", None)):
            raise ValueError(f"predictor={predictor!r} must be a name or a lightning_hetero.predictors.Predictor")
        self.dead_band = dead_band
        self.min_gain_s = min_gain_s
        self.noise_guard = noise_guard
        self.cooldown = cooldown
        self.warmup = warmup
        self.surprise = surprise
        self._solve = solver
        self._predictors: list[Predictor] = []
        self._restored: tuple[list[Predictor], int] | None = None  # predictors and records seen, for the next start
        self._shares: tuple[int, ...] = ()
        self._equal: tuple[int, ...] = ()
        self._lower: list[int] = []
        self._upper: list[int] = []
        self._least = 1
        self._quantum = 1
        self._total = 0
        self._seen = 0
        self._since_change = 0
        self._expected_for: tuple[int, ...] = ()
        self._expected_s: list[float] = []
        self.planned_batches: int | None = None
        self.generation = 0

    def settings(self) -> dict[str, str]:
        """Returns what decides besides the records, in words: ranks where it differs would part ways."""
        predictor = {
            name: value
            for name, value in vars(self.prototype).items()
            if name not in self.prototype.MEMORY and isinstance(value, int | float | str)
        }
        numbers = {
            name: getattr(self, name)
            for name in ("dead_band", "min_gain_s", "noise_guard", "cooldown", "warmup", "surprise")
        }
        return {
            "policy": type(self).__name__,
            "predictor": f"{type(self.prototype).__name__}({_arguments(predictor)})",
            "solver": getattr(self._solve, "__qualname__", type(self._solve).__name__),
            "thresholds": _arguments(numbers),
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
        self._lower, self._upper = bounds.resolve(world_size, total, quantum)
        self._quantum, self._total, self._least = quantum, total, bounds.least
        self._expected_for = ()
        if self._restored is not None:
            (self._predictors, self._seen), self._restored = self._restored, None
        known = len(self._predictors) == world_size and all(p.ready for p in self._predictors)
        if not known:
            self._predictors = [self.prototype.fresh() for _ in range(world_size)]
            self._seen = 0
        alike = [AffineCost(fixed_s=0.0, per_sample_s=1.0)] * world_size
        equal = minimax_none_or_least(
            alike, total // quantum * quantum, least=bounds.least, lower=self._lower, upper=self._upper, quantum=quantum
        )
        if not equal.ok:
            raise ValueError(equal.reason)
        self._shares = self._equal = equal.shares
        if known:
            self._shares = self._best().shares or self._shares
        self._since_change = self.cooldown

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full global batch, in force for the next batch to be drawn."""
        return self._shares

    def predict_s(self, samples: Sequence[int]) -> list[float]:
        """Returns the predicted compute time [s] of each rank for ``samples``; NaN before the first measurement."""
        return [p.predict(n) if p.ready else math.nan for p, n in zip(self._predictors, samples, strict=True)]

    def urgent(self, samples: Sequence[int], compute_s: Sequence[float]) -> bool:
        """Tells whether a record must be evaluated before the next batch: some rank's time was not as expected.

        Cheap, because it is asked on the critical path of every step; the same on every rank.
        """
        if tuple(samples) != self._expected_for:
            if self._seen <= self.warmup or not all(p.ready for p in self._predictors):
                return True
            self._expected_for = tuple(samples)
            self._expected_s = [p.predict(n) for p, n in zip(self._predictors, samples, strict=True)]
        limit = self.surprise
        return any(abs(s - e) > limit * e for s, e in zip(compute_s, self._expected_s, strict=True))

    def take(self, records: Sequence[SpeedSample], *, generation: int, batches: int) -> Decision:
        """Takes in one record per rank, in rank order, and decides the shares from now on.

        Args:
            records: of one batch.
            generation: `generation` when the shares of this batch were drawn.
            batches: how many batches the records are means of.
        """
        del generation, batches
        return self.observe(records)

    def observe(self, records: Sequence[SpeedSample]) -> Decision:
        """`take`, for a policy that decides by the times alone."""
        if (reason := self._learn(records)) is not None:
            return Decision(shares=self._shares, changed=False, reason=reason)
        return self._decide()

    def _learn(self, records: Sequence[SpeedSample]) -> str | None:
        """Hands the records to the predictors; returns why nothing can be decided yet."""
        self._seen += 1
        self._since_change += 1
        self._expected_for = ()
        if self._seen <= self.warmup:
            return "warm-up"
        for predictor, record in zip(self._predictors, records, strict=True):
            if record.compute_s > 0:
                predictor.update(record.samples, record.compute_s)
        return None if all(p.ready for p in self._predictors) else "not every rank was measured yet"

    def _decide(self) -> Decision:
        now_s = [p.predict(n) for p, n in zip(self._predictors, self._shares, strict=True)]
        slowest = max(range(len(now_s)), key=now_s.__getitem__)
        current_s = now_s[slowest]
        # Leaving equal shares takes more evidence than improving unequal ones: on equal devices nothing is to be won.
        guard = self.noise_guard * (1.0 if self._shares == self._equal else 0.25)
        threshold_s = max(
            self.dead_band * current_s,
            self.min_gain_s,
            guard * self._predictors[slowest].std_s(self._shares[slowest]),
        )

        def keep(reason: str, gain_s: float = 0.0) -> Decision:
            return Decision(shares=self._shares, changed=False, reason=reason, predicted_s=current_s, gain_s=gain_s)

        if self._since_change <= self.cooldown:
            return keep("cooldown")
        if current_s - min(now_s) <= threshold_s:  # no split gains more than the spread: skip the solver
            return keep("balanced")
        best = self._best()
        if not best.ok:
            return keep(best.reason)
        gain_s = current_s - best.makespan_s
        if gain_s <= threshold_s or best.shares == self._shares:
            return keep("dead band", gain_s)
        self._shares = best.shares
        self._since_change = 0
        return Decision(
            shares=best.shares, changed=True, reason="rebalanced", predicted_s=best.makespan_s, gain_s=gain_s
        )

    def _best(self) -> Allocation:
        costs = [p.cost() for p in self._predictors]
        return minimax_none_or_least(
            costs,
            self._total,
            least=self._least,
            lower=self._lower,
            upper=self._upper,
            quantum=self._quantum,
            solver=self._solve,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types only: predictors per rank, shares, number of records seen."""
        predictors, seen = self._restored or (self._predictors, self._seen)
        return {
            "predictor": type(self.prototype).__name__,
            "predictors": [p.state_dict() for p in predictors],
            "shares": list(self._shares),
            "seen": seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over, at the next `start`, the speeds another run has learned.

        Of another predictor class they are ignored. A run under way goes on with its own: the learning-rate finder
        restores a checkpoint from before the first measurement while it still trains.
        """
        learned = state.get("predictors", [])
        if not learned or state.get("predictor") != type(self.prototype).__name__:
            return
        predictors = [self.prototype.fresh() for _ in learned]
        for predictor, one in zip(predictors, learned, strict=True):
            predictor.load_state_dict(one)
        self._restored = (predictors, int(state.get("seen", 0)))


def _arguments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
