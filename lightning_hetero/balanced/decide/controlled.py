"""Shares by the online controller: who rests, and what the others get, under a budget (layer P).

To the controller (`lightning_hetero.controller`) plain data parallelism is a model of one layer, which nobody can
divide: each rank is a pipeline of its own, or rests. What is left to decide is who rests, and the shares.

    first records    shares as `BalancePolicy` decides them: that tells a step's fixed time from that of a sample
    then             the controller, from the same records; all ranks come to the same decision, without a message

All ranks hold all parameters, so nothing moves when one rests or wakes, and all take part in the exchange of gradients,
so its time and its bytes stay what they are. A rank at rest computes a dummy of weight 0: a batch never ends before
it, so rest saves what is due for a rank, never time. The dummy is all that is measured of it. Were it believed as it
stands, a device that is slow in its samples and not in a step's fixed part would seem fast; so only a change of that
time counts: `Observation.probed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning_hetero.controller.messages import Decision as PlanDecision
from lightning_hetero.controller.messages import Observation
from lightning_hetero.controller.replans import Replan, ReplanLog
from lightning_hetero.controller.resting import Resting
from lightning_hetero.controller.settings import ControllerSettings
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy, Decision
from lightning_hetero.solvers.plans import plan_to_plain, replicas
from lightning_hetero.types import (
    AffineCost,
    Allocation,
    Cluster,
    Device,
    LayerCost,
    Link,
    ModelCost,
    PipelinePlan,
    SpeedSample,
)

__all__ = ["ControlledPolicy", "Started", "Starts"]

_LEARNED = 8  # records from which the first costs are known
_LEAST_S = 1e-9
_FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
_AROUND = LayerCost(name="", forward=_FREE, backward=_FREE)


class Started(Protocol):
    """A controller of one run, see `lightning_hetero.controller.controller.Controller`."""

    def step(self, seen: Observation) -> PlanDecision: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> object: ...


class Starts(Protocol):
    """What makes one: `LyapunovController`."""

    def start(
        self,
        model: ModelCost,
        cluster: Cluster,
        plan: PipelinePlan,
        *,
        micro_batch_size: int | None,
        planned_batches: int | None,
        always: Iterable[int],
        rest_samples: float,
    ) -> Started: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Profile:
    """A step's time on a rank of speed 1, and the ranks' speeds, as known when the controller was started."""

    fixed_s: float
    per_unit_s: float
    speeds: tuple[float, ...]

    def seconds(self, rank: int, units: float) -> float:
        return (self.fixed_s + self.per_unit_s * units) / self.speeds[rank]


class ControlledPolicy(BalancePolicy):
    """Asks a controller for the shares.

    Args:
        controller: its settings.

    Attributes:
        replans: changes of shares, and of who rests, in this fit or the last one.
    """

    def __init__(self, controller: Starts) -> None:
        super().__init__()
        self.controller = controller
        self.replans: list[Replan] = []
        self._always: tuple[int, ...] = ()
        self._state: Mapping[str, Any] = {}  # of an earlier run, for the next `start`
        self._forget()

    def _forget(self) -> None:
        self._started: Started | None = None
        self._profile: _Profile | None = None
        self._plans: dict[int, tuple[int, ...]] = {}  # shares by generation, of those that may still be seen
        self._first_generation = 0  # of this controller, which counts from 0
        self._in_force, self._batch = -1, -1
        self._resting: dict[int, Resting] = {}
        self._factors: dict[int, float] = {}  # time over the profile's, of ranks at work
        self._log = ReplanLog(self.replans)
        self.generation = -1  # shares that the controller knows nothing of

    def settings(self) -> dict[str, str]:
        return {**super().settings(), "controller": repr(self.controller)}

    # ---- set-up -----------------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Another fit begins, and its list of changes."""
        self.replans.clear()

    def start(self, *, world_size: int, total: int, bounds: ShareBounds, quantum: int = 1) -> None:
        if self._started is not None:
            self._state = self._learned()
        self._forget()
        super().start(world_size=world_size, total=total, bounds=bounds, quantum=quantum)
        self._always = (0,) if bounds.least > 1 else ()  # BatchNorm's statistics are rank 0's, as in any DDP
        state, self._state = self._state, {}
        if state:
            self._go_on(state)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Takes over what an earlier run has learned, if it had as many ranks and the same batch."""
        units: list[int] = state["units"]
        if len(units) != len(self._shares) or sum(units) != self.limits.total // self.limits.quantum:
            return
        profile = _Profile(
            fixed_s=state["fixed_s"], per_unit_s=state["per_unit_s"], speeds=tuple(state["speeds"])
        )
        with suppress(ValueError):  # other limits now
            self._open(profile, replicas(1, units)).load_state_dict(state["controller"])
            self._batch = state["batch"]
            resting = {rank: Resting(factor, why) for rank, factor, why in state["resting"] if not units[rank]}
            self._resting |= resting

    def _open(self, profile: _Profile, plan: PipelinePlan) -> Started:
        """Starts the controller with a plan in units of the quantum."""
        units = self.limits.total // self.limits.quantum
        step = AffineCost(fixed_s=profile.fixed_s, per_sample_s=profile.per_unit_s)
        # One byte per unit, so that a device's memory is its most units; no state, which is everywhere.
        layer = LayerCost(name="model", forward=step, backward=_FREE, activation_bytes=1.0)
        most = [upper // self.limits.quantum for upper in self.limits.upper]
        devices = tuple(
            Device(name=f"rank {rank}", speed=speed, mem_bytes=math.inf if n >= units else max(float(n), 0.5))
            for rank, (speed, n) in enumerate(zip(profile.speeds, most, strict=True))
        )
        started = self._settings_per_unit().start(
            ModelCost(layers=(layer,), before=_AROUND, head=_AROUND),
            Cluster(devices=devices, links=((Link(),) * len(devices),) * len(devices)),
            plan,
            micro_batch_size=units,
            planned_batches=self.planned_batches,
            always=self._always,
            rest_samples=self.limits.least / self.limits.quantum,
        )
        self._started, self._profile = started, profile
        self._shares = self._shares_of(plan)
        self._first_generation = self.generation = self.generation + 1
        self._plans = {self.generation: self._shares}
        self._resting = {rank: Resting(1.0, "") for rank, n in enumerate(self._shares) if not n}
        return started

    def _settings_per_unit(self) -> Starts:
        """Returns the settings for samples that are units."""
        settings = self.controller
        if not isinstance(settings, ControllerSettings) or self.limits.quantum == 1 or not settings.budget:
            return settings
        limits = {
            name: limit * self.limits.quantum if limit is not None and name.endswith("_per_sample") else limit
            for name, limit in settings.budget.items()
        }
        return replace(settings, budget=limits)

    def _first_profile(self) -> _Profile:
        """Returns the mean rank's costs by the predictors, and the ranks' speeds that meet their present times."""
        costs = [predictor.cost() for predictor in self._predictors]
        fixed_s = math.fsum(cost.fixed_s for cost in costs) / len(costs)
        per_sample_s = max(math.fsum(cost.per_sample_s for cost in costs) / len(costs), _LEAST_S)
        speeds = tuple(
            (fixed_s + per_sample_s * n) / max(cost.seconds(n), _LEAST_S)
            for cost, n in zip(costs, self._shares, strict=True)
        )
        return _Profile(fixed_s=fixed_s, per_unit_s=per_sample_s * self.limits.quantum, speeds=speeds)

    def _shares_of(self, plan: PipelinePlan) -> tuple[int, ...]:
        units = {group.ranks[0]: group.samples for group in plan.groups}
        return tuple(units.get(rank, 0) * self.limits.quantum for rank in range(len(self.limits.lower)))

    # ---- one record -------------------------------------------------------------------------------------------

    def take(self, records: Sequence[SpeedSample], *, generation: int, batches: int) -> Decision:
        self._batch += batches
        if self._started is None:
            decision = self.observe(records)
            if self._seen >= self.warmup + _LEARNED and all(p.ready for p in self._predictors):
                units = [n // self.limits.quantum for n in self._shares]
                self._open(self._first_profile(), replicas(1, units))
            return decision
        shares = self._plans.get(generation)
        if shares is None:  # drawn before the controller was started
            self._learn(records)
            return Decision(shares=self._shares, changed=False, reason="begins")
        # A dummy says little of a full share, and predictors would believe it.
        self._learn([record if shares[record.rank] else replace(record, compute_s=0.0) for record in records])
        self._enter(generation, batches)
        seen = self._observation(records, generation, batches)
        found = self._log.batch(generation, seen.batch_s)
        return self._carried_out(self._asked(seen), found)

    def _asked(self, seen: Observation) -> PlanDecision:
        """Returns what the controller decides, with generations as we count them."""
        assert self._started is not None
        first = self._first_generation
        decided = self._started.step(replace(seen, generation=seen.generation - first))
        outcome = decided.outcome
        if outcome is not None:
            outcome = replace(outcome, generation=outcome.generation + first)
        return replace(decided, generation=decided.generation + first, outcome=outcome)

    def limit(
        self, most_samples: Sequence[int | None], samples: Sequence[float], compute_s: Sequence[float]
    ) -> Decision | None:
        """As `BalancePolicy.limit`; a controller that runs goes on with what it has learned, within the new bounds."""
        before = self.limits.lower, self.limits.upper
        decision = super().limit(most_samples, samples, compute_s)
        if self._started is not None and before != (self.limits.lower, self.limits.upper):
            state, plan = self._learned(), replicas(1, [n // self.limits.quantum for n in self._shares])
            self._go_on({**state, "controller": {**state["controller"], "plan": plan_to_plain(plan)}})
        return decision

    def _within_limits(self) -> Allocation:
        if self._started is None:
            return super()._within_limits()
        at_work = self._best([b if n else 0 for b, n in zip(self.limits.upper, self._shares, strict=True)])
        return at_work if at_work.ok else super()._within_limits()

    def take_incomplete(self, records: Sequence[SpeedSample], *, generation: int) -> None:
        shares = self._plans.get(generation)
        self._learn([r if shares is None or shares[r.rank] else replace(r, compute_s=0.0) for r in records])

    def urgent(self, samples: Sequence[float], compute_s: Sequence[float]) -> bool:
        expected = zip(samples, compute_s, self._predictors, self._shares, strict=True)
        return super().urgent(samples, [s if n or not p.ready else p.predict(b) for b, s, p, n in expected])

    def _enter(self, generation: int, batches: int) -> None:
        if generation == self._in_force:
            return
        self._plans = {g: shares for g, shares in self._plans.items() if g >= generation}
        self._in_force = generation
        if generation > self._first_generation:
            self._log.in_force()
            self._log.amend(generation, step=self._batch + 1 - batches)

    def _observation(self, records: Sequence[SpeedSample], generation: int, batches: int) -> Observation:
        assert self._profile is not None
        shares = self._plans[generation]
        work_s: dict[int, float] = {}
        probed: dict[int, float] = {}
        sizes: list[tuple[int]] = []
        for record, work in zip(records, self.work_in_samples(records), strict=True):
            rank = record.rank
            units = max(1, round(record.samples / self.limits.quantum))
            if shares[rank]:
                work_s[rank] = record.compute_s
                predictor = self._predictors[rank]
                if work != record.samples and predictor.ready:  # as if of mean work: the controller counts samples
                    work_s[rank] *= predictor.predict(record.samples) / predictor.predict(work)
                sizes.append((units,))
                self._factors[rank] = work_s[rank] / self._profile.seconds(rank, units)
            elif rank in self._resting and (speed := self._resting[rank].add(record.compute_s)) is not None:
                probed[rank] = speed
        return Observation(
            batch=self._batch,
            generation=generation,
            # The slowest rank's: what it waits is the exchange alone. (A record's wait is of the step before.)
            batch_s=max(record.compute_s for record in records) + min(record.wait_s for record in records),
            work_s=work_s,
            probed=probed,
            micro_batches=sizes,
            batches=batches,
        )

    def _carried_out(self, decided: PlanDecision, found: Mapping[str, Any]) -> Decision:
        """Returns what is decided, with what has become known of an earlier decision."""
        outcome = found if decided.outcome is None else self._log.settle(decided.outcome)
        if decided.kind == "keep":
            queues = {"queues": dict(decided.queues)} if decided.queues else {}
            return Decision(shares=self._shares, changed=False, reason=decided.reason, data=queues, outcome=outcome)
        note = Replan.of(decided, self._batch + 1)
        self.replans.append(note)
        self._shares, self.generation = self._shares_of(decided.plan), decided.generation
        self._plans[decided.generation] = self._shares
        why = _gains(note.predicted_gain, decided.cost_gain)
        self._resting = {
            rank: self._resting.get(rank) or Resting(self._factors.get(rank, 1.0), why)
            for rank, n in enumerate(self._shares)
            if not n
        }
        return Decision(
            shares=self._shares,
            changed=True,
            reason=decided.reason,
            predicted_s=decided.predicted_s,
            gain_s=decided.gain_s,
            data={
                "kind": decided.kind,
                "generation": decided.generation,
                "predicted_gain": note.predicted_gain,
                "resting": sorted(self._resting),
                "queues": dict(decided.queues),
            },
            outcome=outcome,
        )

    def metrics(self) -> dict[str, float]:
        """Returns what has become of changes so far; nothing moves for them, and nothing stands still."""
        found = self._log.metrics()
        return {name: value for name, value in found.items() if name not in ("moved_bytes", "pause_s")}

    @property
    def at_rest(self) -> Mapping[int, str]:
        """Ranks that rest by now, and what that brings, in words; empty words: it was so from the start."""
        return {rank: resting.why for rank, resting in self._resting.items()}

    # ---- checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        learned = self._state if self._started is None else self._learned()
        return {**super().state_dict(), **({"controller": learned} if learned else {})}

    def _learned(self) -> dict[str, Any]:
        assert self._started is not None and self._profile is not None
        return {
            "units": [n // self.limits.quantum for n in self._shares],
            "batch": self._batch,
            "resting": [[rank, resting.factor, resting.why] for rank, resting in self._resting.items()],
            "fixed_s": self._profile.fixed_s,
            "per_unit_s": self._profile.per_unit_s,
            "speeds": list(self._profile.speeds),
            "controller": self._started.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._state = state.get("controller") or {}


def _gains(time: float, budgets: Mapping[str, float]) -> str:
    """Returns in words what is saved per batch: part of its time, and parts of its budgets."""
    if not math.isfinite(time):
        return ""
    words = [f"{abs(time):.1%} {'less' if time > 0.0 else 'more'} time"]
    words += [f"{abs(part):.1%} of {name} {'less' if part > 0.0 else 'more'}" for name, part in budgets.items()]
    return f"a batch takes {' and '.join(words)}"
