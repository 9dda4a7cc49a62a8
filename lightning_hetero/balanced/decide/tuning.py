"""Shares by trial: samples move from the slowest rank to the fastest, and no model is believed (layer P).

LB-BSP's way for GPU clusters (Chen et al., SoCC'20; its details are known from others' notes only): GPUs that nobody
else uses are steady, but their time is flat below saturation and then linear, so a straight line misleads. The paper
tunes instead:

    window      times of some steps on the same shares, so that jitter cancels
    move        a step of samples from the straggler, the slowest rank, to the leader, the fastest with room
    overshoot   samples would go back the way they came, or did: the step is halved

Ours: medians for means, the length of the first step, that a move is taken back which made its leader slower than the
straggler had been, when tuning ends, and when it begins anew.

**Tuning ends.** Between two halvings each rank's share moves in one direction, so there are finitely many moves. With
steady times that grow with samples the shares are then within `tolerance` of the best split, or the slowest rank takes
at most one quantum's time longer than there: what was refused, or taken back, was one quantum for a rank that had been
the fastest, and the fastest rank of any split is no slower than the slowest of the best one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy, Decision
from lightning_hetero.types import SpeedSample

__all__ = ["TuningPolicy"]

_MOST_WINDOWS = 4  # to tell leader and straggler apart under noise
_SURE = 2.0  # standard errors by which they must differ
_ERROR = 1.57  # standard error of a median of n normal values, in mean absolute deviations over the root of n


class TuningPolicy(BalancePolicy):
    """Moves samples from the straggler to the leader, in steps that shrink, until neither stands out.

    Only times on the shares in force count: records of batches that were drawn before a move, or are smaller, are not
    mistaken for what it brought. The predictions of reports are a Kalman filter's; nothing is decided by them. Where
    BatchNorm wants two samples or none, no rank gets its first or loses its last ones.

    Args:
        window: records on the same shares before a decision, >= 1.
        first_step: samples of the first move, in parts of the equal share, in (0, 1].
        shrink: by which a step shrinks when it overshoots, in (0, 1); never below one quantum.
        tolerance: the shares are balanced when the fastest rank needs at most this part less time than the slowest,
            in [0, 1).
        changed: tuning begins anew when all times of a window are off by more than this part, > 0.
        warmup: as in `BalancePolicy`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        window: int = 4,
        first_step: float = 0.35,
        shrink: float = 0.5,
        tolerance: float = 0.05,
        changed: float = 0.1,
        warmup: int = 1,
    ) -> None:
        if type(window) is not int or window < 1:
            raise ValueError(f"window={window!r} must be a whole number >= 1 (records)")
        for name, value, low, high in (
            ("first_step", first_step, math.nextafter(0.0, 1.0), 1.0),
            ("shrink", shrink, math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0)),
            ("tolerance", tolerance, 0.0, math.nextafter(1.0, 0.0)),
            ("changed", changed, math.nextafter(0.0, 1.0), math.inf),
        ):
            given: Any = value  # whatever a command line has made of it
            if not (isinstance(given, int | float) and math.isfinite(given) and low <= given <= high):
                raise ValueError(f"{name}={given!r} must be a finite number {_RANGES[name]}")
        super().__init__(warmup=warmup, guard=False)
        self.window = window
        self.first_step = first_step
        self.shrink = shrink
        self.tolerance = tolerance
        self.changed = changed
        self._tuned: Mapping[str, Any] = {}  # of an earlier run, for the next `start`
        self._quanta = 1  # of a move
        self._settled = False
        self._begin_anew()

    def settings(self) -> dict[str, str]:
        numbers = {name: getattr(self, name) for name in ("window", *_RANGES, "warmup")}
        return {
            "policy": type(self).__name__,
            "thresholds": ", ".join(f"{name}={value!r}" for name, value in numbers.items()),
        }

    def start(self, *, world_size: int, total: int, bounds: ShareBounds, quantum: int = 1) -> None:
        super().start(world_size=world_size, total=total, bounds=bounds, quantum=quantum)
        self._shares = self._equal
        self._begin_anew()
        state, self._tuned = self._tuned, {}
        shares = tuple(state.get("shares", ()))
        same = len(shares) == world_size and sum(shares) == sum(self._equal)
        if same and all(map(self._allows, range(world_size), shares)):
            self._shares = self._measured = shares
            self._quanta = state["quanta"]
            if state["settled_s"]:
                self._settled, self._known = True, (shares, state["settled_s"])

    def _allows(self, rank: int, share: int) -> bool:
        fits = self.limits.lower[rank] <= share <= self.limits.upper[rank] and share % self.limits.quantum == 0
        return fits and (share == 0 or share >= self.limits.least)

    def _begin_anew(self) -> None:
        """Speeds are others, or not known yet; the shares stay."""
        world = len(self._shares)
        equal = self.limits.total / self.limits.quantum / max(world, 1)
        self._quanta = max(1, round(self.first_step * equal))
        self._settled = False
        self._times: deque[list[float]] = deque(maxlen=_MOST_WINDOWS * self.window)  # by record, then rank
        self._measured = self._shares  # what those are of
        self._before: tuple[tuple[int, ...], list[float]] | None = None  # shares and times that the last move left
        self._taker = 0  # of that move
        self._known: tuple[tuple[int, ...], list[float]] | None = None  # shares and times that must still hold
        self._way = [0] * world  # per rank, since the step was halved: 1: it got samples, -1: it gave some

    # ---- one record -------------------------------------------------------------------------------------------

    def urgent(self, samples: Sequence[float], compute_s: Sequence[float]) -> bool:
        """No record decides by itself."""
        del samples, compute_s
        return False

    def observe(self, records: Sequence[SpeedSample]) -> Decision:
        if (reason := self._learn(records)) is not None:
            return self._keep(reason)
        if any(share and record.samples != share for record, share in zip(records, self._shares, strict=True)):
            return self._keep("a batch on other shares")
        if self._measured != self._shares:  # bounds have changed, and shares with them
            self._begin_anew()
        # As if samples were of mean work; without counted work as it is, to the bit.
        work = zip(records, self.work_in_samples(records), strict=True)
        self._times.append([r.compute_s if x == r.samples else r.compute_s * r.samples / x for r, x in work])
        if not self._settled and len(self._times) % self.window:
            return self._keep("measuring")
        if self._speeds_changed():
            self._restart()
        if self._settled:
            return self._keep("balanced")
        return self._tune()

    def _keep(self, reason: str) -> Decision:
        return Decision(shares=self._shares, changed=False, reason=reason, predicted_s=self._predicted_s())

    def _predicted_s(self) -> float:
        return max(self.predict_s(self._shares))

    def _speeds_changed(self) -> bool:
        """Whether a whole window of a rank's times is off what it took on as many samples, or more, or fewer."""
        if self._known is None or len(self._times) < self.window:
            return False
        latest = list(self._times)[-self.window :]
        for rank, (share, then, then_s) in enumerate(zip(self._shares, *self._known, strict=True)):
            times = [record[rank] for record in latest]
            slower_s = min(times) - then_s if share <= then else 0.0
            faster_s = then_s - max(times) if share >= then else 0.0
            off_s = max(slower_s, faster_s) - self.changed * then_s
            if off_s > 0.0 and off_s > _SURE * _error_s(times):
                return True
        return False

    def _restart(self) -> None:
        latest = list(self._times)[-self.window :]
        self._begin_anew()
        self._times.extend(latest)

    def _tune(self) -> Decision:
        times = [median(record[rank] for record in self._times) for rank in range(len(self._shares))]
        if self._before is not None and times[self._taker] > max(self._before[1]):
            before, _ = self._before
            if all(map(self._allows, range(len(before)), before)):
                return self._take_back()
        pair = self._pair(times)
        if pair is None:
            return self._settle(times)
        straggler, leader = pair
        gap_s = times[straggler] - times[leader]
        if gap_s <= self.tolerance * times[straggler]:
            return self._settle(times)
        error_s = math.fsum(_error_s([record[rank] for record in self._times]) for rank in pair)
        if gap_s <= _SURE * error_s:
            return self._settle(times) if len(self._times) == self._times.maxlen else self._keep("measuring")
        if (self._way[straggler] > 0 or self._way[leader] < 0) and not self._halve():
            return self._settle(times)
        return self._move(straggler, leader, times)

    def _pair(self, times: Sequence[float]) -> tuple[int, int] | None:
        """Returns straggler and leader; None: the slowest rank has nothing to give, or nobody may take it."""
        ranks = range(len(times))
        straggler = max(ranks, key=times.__getitem__)
        takers = [rank for rank in ranks if rank != straggler and self._room(rank) > 0]
        if not takers or self._spare(straggler) <= 0:
            return None
        return straggler, min(takers, key=times.__getitem__)

    def _spare(self, rank: int) -> int:
        share, least, quantum = self._shares[rank], self.limits.least, self.limits.quantum
        whole = -(-least // quantum) * quantum if least > quantum else 0
        return share - max(self.limits.lower[rank], min(whole, share))

    def _room(self, rank: int) -> int:
        # One without samples may not hold as few as a move may bring.
        alone = not self._shares[rank] and self.limits.least > self.limits.quantum
        return 0 if alone else self.limits.upper[rank] - self._shares[rank]

    # ---- what may follow --------------------------------------------------------------------------------------

    def _move(self, straggler: int, leader: int, times: list[float]) -> Decision:
        samples = min(self._quanta * self.limits.quantum, self._spare(straggler), self._room(leader))
        shares = list(self._shares)
        shares[straggler] -= samples
        shares[leader] += samples
        self._way[straggler], self._way[leader] = -1, 1
        self._before = self._known = self._shares, times
        self._taker = leader
        return self._change(shares, f"{samples} samples from rank {straggler} to rank {leader}")

    def _take_back(self) -> Decision:
        """The last move has made things worse."""
        assert self._before is not None
        self._known = self._before
        shares, _ = self._before
        self._before = None
        self._settled = not self._halve()
        return self._change(shares, "the last move made the slowest rank slower: taken back")

    def _change(self, shares: Sequence[int], reason: str) -> Decision:
        self._shares = self._measured = tuple(shares)
        self._times.clear()
        return Decision(shares=self._shares, changed=True, reason=reason, predicted_s=self._predicted_s())

    def _halve(self) -> bool:
        """Shrinks the step; returns whether there was a smaller one."""
        if self._quanta == 1:
            return False
        self._quanta = max(1, int(self._quanta * self.shrink))
        self._way = [0] * len(self._way)
        return True

    def _settle(self, times: list[float]) -> Decision:
        self._settled, self._before, self._known = True, None, (self._shares, times)
        return self._keep("balanced")

    # ---- checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        settled_s = list(self._known[1]) if self._settled and self._known is not None else []
        tuned = {"shares": list(self._shares), "quanta": self._quanta, "settled_s": settled_s}
        return {**super().state_dict(), "tuning": dict(self._tuned or tuned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._tuned = state.get("tuning") or {}


def _error_s(times: Sequence[float]) -> float:
    """Returns the standard error of the times' median [s]."""
    middle = median(times)
    return _ERROR * math.fsum(abs(t - middle) for t in times) / (len(times) * math.sqrt(len(times)))


_RANGES = {
    "first_step": "in (0, 1] (parts of the equal share)",
    "shrink": "in (0, 1)",
    "tolerance": "in [0, 1)",
    "changed": "> 0",
}
