"""One run's controller: takes in each batch as it was measured, decides what holds from the next one on (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_hetero.controller.estimates import Estimates
from lightning_hetero.controller.forms import Forms, shares_of
from lightning_hetero.controller.messages import Decision, DecisionKind, Observation
from lightning_hetero.controller.migration import MigrationModel
from lightning_hetero.controller.objective import Objective
from lightning_hetero.controller.settings import ControllerSettings
from lightning_hetero.controller.spending import Spending
from lightning_hetero.controller.trials import Trial, Trials
from lightning_hetero.controller.triggers import Look, Triggers
from lightning_hetero.solvers.placement.neighbours import Pipes
from lightning_hetero.solvers.placement.search import Judged, better_structure
from lightning_hetero.solvers.plans import plan_from_plain, plan_to_plain
from lightning_hetero.types import Cluster, PipelinePlan

_STALE, _SURE = 0.01, 2.0  # relative change of an estimate, and in its standard deviations, that counts
_SHARE_BAND = 0.02  # least relative gain for which samples per group change
_WARM_UP = 1  # first batches to ignore
_ROUNDS, _CANDIDATES = 2, 60  # of the search for a structure


class Controller:
    """Decides for one run; made by `LyapunovController.start`.

    As long as no estimate leaves its noise and nothing is overspent, a batch is taken in and no solver is called.

    Args:
        settings: the user's.
        cluster: what the plan was made from.
        plan: in force, generation 0.
        forms: of this model's plans.
        spending: of this run.

    Attributes:
        triggers: when the structure is looked at.

    Raises:
        ValueError: the plan does not fit the devices.
    """

    def __init__(
        self, settings: ControllerSettings, cluster: Cluster, plan: PipelinePlan, *, forms: Forms, spending: Spending
    ) -> None:
        self.settings, self._forms, self._spending = settings, forms, spending
        self._costs = _Costs(forms, cluster)
        self._trials = Trials()
        self._put_off: list[str] | None = None  # what there was to look at, when it was put off by a batch
        self._start_with(plan)
        first = self._objective(self._plans.pipes).at(self._plans.pipes, shares_of(plan))
        if first is None:
            raise ValueError(f"the plan in force does not fit the devices: {forms.reason_against(plan, cluster)}")
        spending.reference_s = first.time_s

    def _start_with(self, plan: PipelinePlan) -> None:
        """Takes ``plan`` for generation 0, in force from batch 0 on."""
        self._plans = _Plans(self._forms.pipes_of(plan), plan)
        self._trials.start_with(self._plans.pipes)
        self._costs.renew(plan)
        self.triggers = Triggers(self.settings, self._costs.state)

    @property
    def plan(self) -> PipelinePlan:
        """In force, or decided last."""
        return self._plans.plan

    @property
    def generation(self) -> int:
        """The number of `plan`."""
        return self._plans.generation

    # ---- one batch ----

    def step(self, seen: Observation) -> Decision:
        """Takes in one measured batch and decides.

        Raises:
            ValueError: a batch that does not follow the ones before, or an unknown generation.
        """
        estimates = self._costs.estimates
        if self._plans.enter(seen):
            self._costs.migration.learn(self._plans.promised_pause_s, seen.pause_s)
            self._trials.enter()
        pipes, plan = self._plans.by_generation[seen.generation]
        told = self._spending.reprice(seen.prices)[:2]
        sizes = seen.micro_batches or [group.micro_batches for group in plan.groups]
        warm = seen.batch >= _WARM_UP
        estimates.guard.delay = self._plans.delay or estimates.guard.delay
        if warm:
            estimates.update(seen, pipes, sizes)
        told += estimates.forget(seen.batch)[:1]
        if estimates.furthest(self._costs.state, _SURE) > _STALE:
            self._costs.renew(self.plan)
        shares = [sum(of_group) for of_group in sizes]
        self._spending.add(seen, sum(shares), [rank for pipe in pipes for rank in pipe.ranks])
        if warm and seen.batch_s > 0.0 and sum(shares) == self._forms.samples:
            self._trials.add(seen.batch_s, self._modelled_s(seen.generation))
        if self._plans.pending >= 0:
            return self._decision("a change of structure is under way")
        if (trial := self._trials.over) is not None:
            if (way_back := self._settle(trial)) is not None:
                return way_back
            told.append("the last change of structure has paid off")  # from there the search may find more
        return self._decide(told)

    def withdraw(self, generation: int) -> None:
        """Takes back a change of structure that could not be carried out: the plan before stays, and it is barred."""
        self._trials.bar(self._plans.withdraw(generation), self._plans.seen)

    # ---- decisions ----

    def _settle(self, trial: Trial) -> Decision | None:
        """Judges the structure on trial; returns the way back if it failed."""
        pipes, bias = self._plans.pipes, self._trials.bias
        objective = self._objective(pipes)
        old = objective.judge(trial.old)
        old_s = bias * old.time_s if old is not None else math.inf
        outcome = self._trials.settle(trial, old_s)
        if outcome.kept or old is None:
            return None
        self._trials.bar(pipes, self._plans.seen)
        reason = (
            f"rolled back: {outcome.measured_s:.4g} s per batch measured, {trial.predicted_s:.4g} s promised,"
            f" {old_s:.4g} s expected of the structure before"
        )
        return self._adopt("rollback", objective.at(pipes, shares_of(self.plan)), old, reason)

    def _decide(self, told: list[str]) -> Decision:
        look = self._look(told)
        charged = any(weight.queue > 0.0 for weight in self._spending.weights)
        if not look.reason and not charged and self._costs.kept == self.generation:
            return self._decision("")  # as with the same costs before
        pipes = self._plans.pipes
        objective = self._objective(pipes)
        best = objective.judge(pipes)
        if best is None:
            return self._decision("the plan in force does not fit the devices any more")
        now = objective.at(pipes, shares_of(self.plan)) or best
        if look.reason:
            found = self._search(objective, best, look.ranks)
            gain = best.value - found.value
            if found.pipes != best.pipes and gain > self.settings.dead_band * objective.scale_at(best):
                return self._adopt("plan", best, found, look.reason)
        gain = now.value - best.value
        if best.shares != now.shares and gain > _SHARE_BAND * objective.scale_at(now):
            return self._adopt("shares", now, best, "samples per group")
        self._costs.kept = -1 if charged else self.generation
        return self._decision("")

    def _look(self, told: list[str]) -> Look:
        """Returns whether to look at the structure after this batch; not where a jump is still to be confirmed."""
        if not self.settings.structure or self._trials.present is not None:
            return Look("")
        if self._put_off is None and self._costs.estimates.unsure(self._plans.seen):
            self._put_off = told  # layers would move for half of what has happened
            return Look("")
        told, self._put_off = [*(self._put_off or ()), *told], None
        return self.triggers.look(self._plans.seen, self._costs.state, self._costs.estimates, self._spending, told)

    def _search(self, objective: Objective, best: Judged, ranks: tuple[int, ...]) -> Judged:
        return better_structure(
            objective, best, rounds=_ROUNDS, candidates=_CANDIDATES, most_groups=self._forms.most_groups,
            first=ranks, remembered=[pipes for pipes in reversed(self._trials.remembered) if pipes != best.pipes],
            barred=lambda pipes: self._trials.barred(pipes, self._plans.seen),
        )  # fmt: skip

    def _adopt(self, kind: DecisionKind, now: Judged | None, new: Judged, reason: str) -> Decision:
        old, bias, problem = self._plans.pipes, self._trials.bias, self._costs.problem
        self._plans.add(new.pipes, self._forms.plan_of(new, problem), moves=kind != "shares", pause_s=new.pause_s)
        predicted_s = bias * new.time_s
        gain_s = bias * now.time_s - predicted_s if now is not None else math.inf
        if kind != "shares":
            self._trials.remember(new.pipes)
        if kind == "plan":
            self._trials.next = Trial(
                generation=self.generation, old=old, predicted_s=predicted_s, for_time=gain_s > 0.0
            )
        return self._decision(
            reason, kind=kind, predicted_s=predicted_s, gain_s=gain_s, cost_gain=self._spending.saved(now, new),
        )  # fmt: skip

    def _decision(self, reason: str, *, kind: DecisionKind = "keep", **new: Any) -> Decision:
        return Decision(
            batch=self._plans.seen, generation=self.generation, kind=kind, plan=self.plan, reason=reason,
            queues=dict(self._spending.queues), outcome=self._trials.taken_outcome(), **new,
        )  # fmt: skip

    # ---- the model ----

    def _modelled_s(self, generation: int) -> float:
        """Returns the time of a batch under a plan by the present costs [s]; it depends on no queue."""
        modelled = self._costs.modelled
        if generation not in modelled:
            pipes, plan = self._plans.by_generation[generation]
            judged = self._objective(pipes).at(pipes, shares_of(plan))
            modelled[generation] = math.nan if judged is None else judged.time_s
        return modelled[generation]

    def _objective(self, present: Pipes) -> Objective:
        return Objective(
            self._costs.problem, self._spending, present=present, migration=self._costs.migration,
            horizon=self.triggers.life(self._plans.seen), known=self._costs.shared,
        )  # fmt: skip

    # ---- checkpoint ----

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values for `load_state_dict`: plan, queues and what was learned."""
        return {
            "ranks": self._costs.ranks,
            "samples": self._forms.samples,
            "plan": plan_to_plain(self.plan),
            "estimates": self._costs.estimates.to_plain(),
            "migration": list(self._costs.migration.ratios),
            "bias": list(self._trials.bias_of),
            **self._spending.to_plain(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned; its plan becomes the one in force, generation 0, batch 0.

        Raises:
            ValueError: it is of another number of ranks or another global batch; nothing has been changed then.
        """
        samples = self._forms.samples
        if (state["ranks"], state["samples"]) != (self._costs.ranks, samples):
            raise ValueError(
                f"the controller's state is of {state['ranks']} ranks and a global batch of {state['samples']}, not of"
                f" {self._costs.ranks} and {samples}: start without it"
            )
        plan = plan_from_plain(state["plan"])
        self._forms.pipes_of(plan)  # raises
        self._spending.load(state)
        self._costs.estimates.load(state["estimates"])
        self._costs.migration.ratios = list(state["migration"])
        self._trials.bias_of.extend(state["bias"])
        self._start_with(plan)


class _Plans:
    """The plans that batches may still run under, by generation.

    Attributes:
        by_generation: structure and plan.
        generation: of the last one.
        in_force: the generation that the last batch ran under.
        delay: batches from the decision on it until it held; 0: it is the first.
        pending: the generation whose layers are still on their way; -1: none.
        seen: the last batch.
        promised_pause_s: of the last change of structure.
    """

    def __init__(self, pipes: Pipes, plan: PipelinePlan) -> None:
        self.by_generation: dict[int, tuple[Pipes, PipelinePlan]] = {0: (pipes, plan)}
        self.in_force: int = 0
        self.generation = self._numbered = self.delay = 0  # numbers are never used twice
        self.pending = self.seen = -1
        self._decided: dict[int, int] = {}
        self.promised_pause_s = 0.0

    @property
    def pipes(self) -> Pipes:
        """The structure that was decided last."""
        return self.by_generation[self.generation][0]

    @property
    def plan(self) -> PipelinePlan:
        """The plan that was decided last."""
        return self.by_generation[self.generation][1]

    def enter(self, seen: Observation) -> bool:
        """Notes which plan is in force; returns whether a change of structure has come into force."""
        if seen.batch <= self.seen:
            raise ValueError(f"Observation.batch={seen.batch} must be above {self.seen}, the last one")
        if seen.generation not in self.by_generation:
            raise ValueError(f"Observation.generation={seen.generation} must be one of {sorted(self.by_generation)}")
        self.seen = seen.batch
        if seen.generation == self.in_force:
            return False
        for generation in [g for g in self.by_generation if g < seen.generation]:
            del self.by_generation[generation]
        self.in_force = seen.generation
        self.delay = seen.batch - self._decided[seen.generation]
        if not 0 <= self.pending <= seen.generation:
            return False
        self.pending = -1
        return True

    def add(self, pipes: Pipes, plan: PipelinePlan, *, moves: bool, pause_s: float) -> None:
        """Gives a plan the next number."""
        self._numbered += 1
        self.generation = self._numbered
        self.by_generation[self.generation] = pipes, plan
        self._decided[self.generation] = self.seen
        if moves:
            self.pending, self.promised_pause_s = self.generation, pause_s

    def withdraw(self, generation: int) -> Pipes:
        """Takes back the change that is under way; returns its structure."""
        if generation != self.pending:
            raise ValueError(f"generation={generation} must be the one under way, {self.pending}")
        pipes, _ = self.by_generation.pop(generation)
        self.pending, self.generation = -1, max(self.by_generation)
        return pipes


class _Costs:
    """What devices, links and migrations take by now, and what was computed from that.

    Attributes:
        estimates: what is measured.
        migration: how long layers travel.
        state: of the estimates when ``problem`` was made.
        problem: model and cluster by that state.
        shared: shares that are best for the time, by structure.
        modelled: time of a batch, by generation [s].
        kept: the generation for which no other shares are better, as long as no queue counts; -1: none.
        ranks: number of them.
    """

    def __init__(self, forms: Forms, cluster: Cluster) -> None:
        self._forms, self.ranks = forms, len(cluster.devices)
        self.estimates = Estimates(forms.model, cluster)
        self.migration = MigrationModel()

    def renew(self, plan: PipelinePlan) -> None:
        """Takes over what the estimates say by now, for plans near ``plan``."""
        self.state = self.estimates.state
        self.problem = self._forms.problem(*self.estimates.costs(self.state), plan)
        self.shared: dict[Pipes, tuple[list[int], float]] = {}
        self.modelled: dict[int, float] = {}
        self.kept = -1
