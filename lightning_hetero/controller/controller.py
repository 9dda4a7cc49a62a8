"""One run's controller: takes in each batch as it was measured, decides what holds from the next one on (layer P)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_hetero.controller.estimates import Estimates, State
from lightning_hetero.controller.forms import Forms, Pipes, shares_of
from lightning_hetero.controller.messages import Decision, DecisionKind, Move, Observation, Outcome
from lightning_hetero.controller.settings import ControllerSettings
from lightning_hetero.controller.spending import Spending, VirtualQueue
from lightning_hetero.controller.structure.migration import MigrationModel, moves_between
from lightning_hetero.controller.structure.objective import Objective
from lightning_hetero.controller.trials import Bars, Library, Trial, Trials
from lightning_hetero.controller.triggers import Look, Triggers
from lightning_hetero.solvers.placement.search import Judged, better_structure
from lightning_hetero.solvers.plans import plan_from_plain, plan_to_plain
from lightning_hetero.types import Cluster, PipelinePlan

__all__ = ["Controller"]

_STALE = 0.005  # relative change of an estimate, beyond its noise, from which the costs are computed anew


class Controller:
    """Decides for one run; made by `LyapunovController.start`.

    Args:
        settings: the user's.
        cluster: what the plan was made from.
        plan: in force, generation 0.
        forms: of this model's plans.
        spending: of this run.
        always: ranks that never rest.
        rest_samples: that a rank at rest computes all the same.

    Attributes:
        plan: in force, or decided last.
        generation: its number.

    Raises:
        ValueError: the plan does not fit the devices.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        cluster: Cluster,
        plan: PipelinePlan,
        *,
        forms: Forms,
        spending: Spending,
        always: Iterable[int] = (),
        rest_samples: float = 0.0,
    ) -> None:
        self.settings, self._forms, self._spending = settings, forms, spending
        self._always, self._rest_samples = frozenset(always), rest_samples
        self._ranks = len(cluster.devices)
        self._estimates = Estimates(forms.model, cluster, recheck=settings.recheck)
        self._migration = MigrationModel()
        self._library, self._bars = Library(settings.library), Bars(batches=settings.bar_batches)
        self._trials = Trials(settings.trial_batches, settings.margin)
        self._outcome: Outcome | None = None  # to be told with the next decision
        self._put_off: list[str] | None = None  # what there was to look at, when it was put off by a batch
        self._start_with(plan)
        pipes = self._plans[0][0]
        first = self._objective(pipes).at(pipes, shares_of(plan))
        if first is None:
            raise ValueError(f"the plan in force does not fit the devices: {forms.reason_against(plan, cluster)}")
        spending.reference_s = first.time_s

    def _start_with(self, plan: PipelinePlan) -> None:
        """Takes ``plan`` for generation 0, in force from batch 0 on."""
        pipes = self._forms.pipes_of(plan)
        self.plan: PipelinePlan = plan
        self.generation: int = 0
        self._numbered: int = 0  # numbers are never used twice
        self._plans: dict[int, tuple[Pipes, PipelinePlan]] = {0: (pipes, plan)}
        self._in_force, self._pending, self._seen = 0, -1, -1
        self._trials.present = None
        self._next_trial: Trial | None = None
        self._promised_pause_s = 0.0
        self._set_state(self._estimates.state)
        self._triggers = Triggers(self.settings, self._state)
        self._library.add(pipes)

    @property
    def queues(self) -> Mapping[str, VirtualQueue]:
        """By constraint."""
        return self._spending.queues

    @property
    def looked_at(self) -> int:
        """The batch after which the structure was looked at last."""
        return self._triggers.at

    # ---- one batch ----

    def step(self, seen: Observation) -> Decision:
        """Takes in one measured batch and decides.

        Raises:
            ValueError: a batch that does not follow the ones before, or an unknown generation.
        """
        if seen.batch <= self._seen:
            raise ValueError(f"Observation.batch={seen.batch} must be above {self._seen}, the last one")
        if seen.generation not in self._plans:
            raise ValueError(f"Observation.generation={seen.generation} must be one of {sorted(self._plans)}")
        self._seen = seen.batch
        self._enter(seen)
        pipes, plan = self._plans[seen.generation]
        told = self._spending.reprice(seen.prices)[:2]
        sizes = seen.micro_batches or [group.micro_batches for group in plan.groups]
        if seen.batch >= self.settings.warmup:
            self._estimates.update(seen, pipes, sizes)
        told += self._estimates.forget(seen.batch)[:1]
        if self._estimates.furthest(self._state) > _STALE:
            self._set_state(self._estimates.state)
        shares = [sum(of_group) for of_group in sizes]
        self._spending.add(seen, shares, lambda resource: self._objective(pipes).use(resource, pipes))
        if seen.batch_s > 0.0 and sum(shares) == self._forms.samples and seen.batch >= self.settings.warmup:
            self._trials.add(seen.batch_s, self._modelled_s(seen.generation))
        if self._pending >= 0:
            return self._keep("a change of structure is under way")
        if (trial := self._trials.over) is not None:
            if (way_back := self._settle(trial)) is not None:
                return way_back
            told.append("the last change of structure has proved itself")  # from there the search may find more
        return self._decide(told)

    def withdraw(self, generation: int) -> None:
        """Takes back a change of structure that could not be carried out: the plan before stays, and it is barred."""
        if generation != self._pending:
            raise ValueError(f"generation={generation} must be the one under way, {self._pending}")
        pipes, _ = self._plans.pop(generation)
        self._bars.add(pipes, self._seen)
        self._pending, self._next_trial = -1, None
        self.generation = max(self._plans)
        self.plan = self._plans[self.generation][1]

    def _enter(self, seen: Observation) -> None:
        """Notes which plan is in force."""
        if seen.generation == self._in_force:
            return
        for generation in [g for g in self._plans if g < seen.generation]:
            del self._plans[generation]
        self._in_force = seen.generation
        if self._pending >= 0 and seen.generation >= self._pending:
            self._pending = -1
            self._migration.learn(self._promised_pause_s, seen.pause_s)
            self._trials.present, self._next_trial = self._next_trial, None

    # ---- decisions ----

    def _settle(self, trial: Trial) -> Decision | None:
        """Judges the structure on trial; returns the way back if it failed."""
        pipes, _ = self._plans[self._in_force]
        objective, bias = self._objective(pipes), self._trials.bias
        old = objective.judge(trial.old)
        outcome = self._trials.settle(trial, bias * old.time_s if old is not None else math.inf)
        self._outcome = outcome
        if outcome.kept or old is None:
            return None
        self._bars.add(pipes, self._seen)
        reason = (
            f"rolled back: {outcome.measured_s:.4g} s per batch measured, {trial.predicted_s:.4g} s promised,"
            f" {bias * old.time_s:.4g} s expected of the structure before"
        )
        return self._adopt("rollback", objective.at(pipes, shares_of(self.plan)), old, reason)

    def _decide(self, told: list[str]) -> Decision:
        look = self._look(told)
        charged = any(weight.queue > 0.0 for weight in self._spending.weights)
        if not look.reason and not charged and self._kept == self.generation:
            return self._keep("")  # as with the same costs before
        pipes, plan = self._plans[self.generation]
        objective = self._objective(pipes)
        now, best = objective.at(pipes, shares_of(plan)), objective.judge(pipes)
        if best is None:
            return self._keep("the plan in force does not fit the devices any more")
        if now is None:
            now = best
        if look.reason:
            found = self._search(objective, best, look.ranks)
            gain = best.value - found.value
            if found.pipes != best.pipes and gain > self.settings.dead_band * objective.scale_at(best):
                return self._adopt("plan", best, found, look.reason)
        gain = now.value - best.value
        if best.shares != now.shares and gain > self.settings.share_band * objective.scale_at(now):
            return self._adopt("shares", now, best, "samples per group")
        self._kept = -1 if charged else self.generation
        return self._keep("")

    def _look(self, told: list[str]) -> Look:
        """Returns whether to look at the structure after this batch; not where a jump is still to be confirmed."""
        if not self.settings.structure or self._trials.present is not None:
            return Look("")
        if self._put_off is None and self._estimates.unsure(self._seen):
            self._put_off = told  # layers would move for half of what has happened
            return Look("")
        told, self._put_off = [*(self._put_off or ()), *told], None
        return self._triggers.look(self._seen, self._state, self._estimates, self._spending, told)

    def _search(self, objective: Objective, best: Judged, ranks: tuple[int, ...]) -> Judged:
        settings, batch = self.settings, self._seen
        return better_structure(
            objective,
            best,
            rounds=settings.rounds,
            candidates=settings.candidates,
            most_groups=self._forms.most_groups,
            first=ranks,
            remembered=[s for s in reversed(self._library.structures) if s != best.pipes],
            barred=lambda pipes: self._bars.barred(pipes, batch) or self._rests_wrongly(pipes),
        )

    def _rests_wrongly(self, pipes: Pipes) -> bool:
        return bool(self._always) and not self._always.issubset(rank for pipe in pipes for rank in pipe.ranks)

    def _adopt(self, kind: DecisionKind, now: Judged | None, new: Judged, reason: str) -> Decision:
        old, bias = self._plans[self.generation][0], self._trials.bias
        plan = self._forms.plan_of(new, self._problem)
        self._numbered += 1
        self.plan, self.generation = plan, self._numbered
        self._plans[self.generation] = (new.pipes, plan)
        moves: tuple[Move, ...] = ()
        predicted_s = bias * new.time_s
        gain_s = bias * now.time_s - predicted_s if now is not None else math.inf
        if kind != "shares":
            moves = moves_between(self._problem, old, new.pipes, self._forms.bounds, self._forms.sizes_bytes)
            self._pending, self._promised_pause_s = self.generation, new.pause_s
            self._library.add(new.pipes)
        if kind == "plan":
            self._next_trial = Trial(
                generation=self.generation,
                old=old,
                predicted_s=predicted_s,
                gain_s=gain_s,
                for_time=gain_s > 0.0,
            )
        return Decision(
            batch=self._seen,
            generation=self.generation,
            kind=kind,
            plan=plan,
            reason=reason,
            predicted_s=predicted_s,
            gain_s=gain_s,
            cost_gain=self._spending.saved(now, new),
            moves=moves,
            pause_s=new.pause_s if kind != "shares" else 0.0,
            queues=self._spending.values,
            outcome=self._told_outcome(),
        )

    def _keep(self, reason: str) -> Decision:
        return Decision(
            batch=self._seen,
            generation=self.generation,
            kind="keep",
            plan=self.plan,
            reason=reason,
            queues=self._spending.values,
            outcome=self._told_outcome(),
        )

    def _told_outcome(self) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome

    # ---- the model ----

    def _set_state(self, state: State) -> None:
        self._state = state
        self._problem = self._forms.problem(*self._estimates.costs(state), self.plan)
        self._shared: dict[Pipes, tuple[list[int], float]] = {}
        self._modelled: dict[int, float] = {}
        self._kept = -1  # generation for which no other shares are better by these costs, as long as no queue counts

    def _modelled_s(self, generation: int) -> float:
        """Returns the time of a batch under a plan by the present costs [s]; it depends on no queue."""
        if generation not in self._modelled:
            pipes, plan = self._plans[generation]
            judged = self._objective(pipes).at(pipes, shares_of(plan))
            self._modelled[generation] = math.nan if judged is None else judged.time_s
        return self._modelled[generation]

    def _objective(self, present: Pipes) -> Objective:
        return Objective(
            self._problem,
            prices=self._spending.prices,
            weights=self._spending.weights,
            v=self._spending.v,
            reference_s=self._spending.reference_s,
            present=present,
            migration=self._migration,
            horizon=self._triggers.life(self._seen),
            rest_samples=self._rest_samples,
            known=self._shared,
        )

    # ---- checkpoint ----

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values for `load_state_dict`: plan, queues and what was learned."""
        return {
            "ranks": self._ranks,
            "samples": self._forms.samples,
            "plan": plan_to_plain(self.plan),
            "estimates": self._estimates.to_plain(),
            "migration": self._migration.to_plain(),
            "bias": list(self._trials.bias_of),
            **self._spending.to_plain(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned; its plan becomes the one in force, generation 0, batch 0.

        Raises:
            ValueError: it is of another number of ranks or another global batch; nothing has been changed then.
        """
        samples = self._forms.samples
        if (state["ranks"], state["samples"]) != (self._ranks, samples):
            raise ValueError(
                f"the controller's state is of {state['ranks']} ranks and a global batch of {state['samples']}, not of"
                f" {self._ranks} and {samples}: start without it"
            )
        plan = plan_from_plain(state["plan"])
        self._forms.pipes_of(plan)  # raises
        self._spending.load(state)
        self._estimates.load(state["estimates"])
        self._migration.load(state["migration"])
        self._trials.bias_of.extend(state["bias"])
        self._start_with(plan)
