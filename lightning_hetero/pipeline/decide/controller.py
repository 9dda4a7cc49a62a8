"""The online controller: shares and stages decided again while training, under a long-term budget (layer P).

"Joint dynamic data and model parallelism" (TPDS 36(2), 2025), known to us by its abstract, names the ingredients:
uneven data, communication-aware partitions, groups, time-averaged constraints, Lyapunov's method, tentative search. The
derivation and all formulas here are ours:

    measured      stages free of waiting, links, prices                    `online.estimates`
    overspent     a virtual queue per constraint, with a bank              `online.queues`
    minimised     V T + sum of queues times use, migrations amortised      `online.objective`
    each batch    samples per group, exact, free                           `online.shares`, `solvers.placement.shares`
    on a change   structure, by tentative search                           `online.search`, `online.neighbours`
    afterwards    rolled back if measured worse than promised              `online.memory`

A change is what triggers, never a fixed slot: how late a change is answered costs more than how well. Pure: the same
object decides in training, in `pipeline.decide.simulate` and in planners.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np

from lightning_hetero.pipeline.decide.online.estimates import Estimates, State
from lightning_hetero.pipeline.decide.online.memory import Bars, Library, Trial
from lightning_hetero.pipeline.decide.online.messages import (
    Decision,
    DecisionKind,
    Move,
    Observation,
    Outcome,
)
from lightning_hetero.pipeline.decide.online.migration import MigrationModel, moves_between
from lightning_hetero.pipeline.decide.online.objective import Judged, Objective, Prices, Weight
from lightning_hetero.pipeline.decide.online.queues import VirtualQueue
from lightning_hetero.pipeline.decide.online.search import better_structure
from lightning_hetero.pipeline.decide.online.settings import ControllerSettings
from lightning_hetero.pipeline.decide.plans import evened, plan_from_plain, plan_to_plain
from lightning_hetero.pipeline.decide.tied_layers import Span, join_layers
from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.place import sizes_to_try
from lightning_hetero.types import Cluster, GroupPlan, ModelCost, PipelinePlan

__all__ = ["Controller", "LyapunovController"]

Pipes = tuple[Pipe, ...]

_STALE = 0.005  # relative change of an estimate from which the costs are computed anew
_BIAS_OF = 9  # batches that measured over modelled is the median of
_QUEUE_STEP, _QUEUE_EVERY = 0.1, 5  # of V: a change of a queue's weight that is worth a look; so many batches apart
_PART = 0.02  # of all batches: V and bank; an overspending of about that part is left at the end at most
_LEAST_V, _V, _MOST_V = 10.0, 50.0, 100.0
_LEAST_LIFE, _LIFE, _MOST_LIFE = 20.0, 80.0, 400.0  # batches that a state is taken to last


@dataclass(frozen=True, kw_only=True, slots=True)
class LyapunovController(ControllerSettings):
    """Settings of the online controller: pass it as ``HeteroPipelineStrategy(controller=...)``.

    Args:
        v: V, weight of time against overspending [batches' budgets]: large is faster now and overspends longer. None:
            by the number of batches planned, so that the mean is within about 2% of the budget at the end.
        budget: long-term means to keep: ``money_per_sample``, ``energy_per_sample`` [J], ``traffic_per_sample``
            [bytes], ``money_per_hour``, ``energy_per_hour`` [J], ``traffic_per_hour`` [bytes]. One that is None is no
            limit, and with no limit at all time alone counts.
        bank: savings that are kept for later, at most [batches' budgets]; None: by the number of batches planned.
        prices: money per hour, of all ranks or by rank. 1.0: money is device hours.
        power_w: of a rank that computes [W], of all or by rank.
        idle_power_w: of a rank that is held and does not compute [W], of all or by rank.
        rest_cost: part of price and idle power that is due for ranks at rest, 0 to 1.
        structure: layers may move; False: only samples per group are decided again.
        dead_band: least relative gain for which layers move, and least change of a time that is looked at.
        share_band: least relative gain for which samples per group change.
        look_every: batches after which the structure is looked at without a change.
        horizon: batches by which a migration should have paid; None: as long as states lasted so far.
        candidates: structures to judge per round.
        rounds: of the search.
        library: good structures that are remembered.
        trial_batches: of a new structure that are compared with what was promised.
        margin: relative excess over the promise from which it is rolled back, if it is also slower than the old one.
        bar_batches: a structure that was rolled back is not tried for so long, twice as long each time.
        recheck: batches after which a device or a link that is not used is taken for as good as in the beginning, twice
            as long each time; None: never.
        warmup: first batches to ignore.

    Raises:
        TypeError, ValueError: a value of a wrong type or out of its range; says which is allowed.

    >>> LyapunovController(budget={"money_per_sample": 1e-6}).budget
    {'money_per_sample': 1e-06}
    """

    def start(
        self,
        model: ModelCost,
        cluster: Cluster,
        plan: PipelinePlan,
        *,
        spans: Sequence[Span] = (),
        micro_batch_size: int | None = None,
        max_groups: int | None = None,
        overlap: bool = True,
        depth: Literal["auto"] | DepthRule = "auto",
        planned_batches: int | None = None,
    ) -> Controller:
        """Returns a controller for a run that begins with ``plan``.

        Args:
            model, cluster: what the plan was made from.
            plan: in force, generation 0.
            spans, micro_batch_size, max_groups, overlap, depth: as in `best_plan`.
            planned_batches: of the whole run, if known.

        Raises:
            ValueError: numbers by rank of another length than the cluster, or a plan that does not fit it.
        """
        return Controller(
            self,
            model,
            cluster,
            plan,
            spans=spans,
            micro_batch_size=micro_batch_size,
            max_groups=max_groups,
            overlap=overlap,
            depth=depth,
            planned_batches=planned_batches,
        )


class Controller:
    """Decides for one run; made by `LyapunovController.start`, whose arguments these are.

    Attributes:
        plan: in force, or decided last.
        generation: its number.
        queues: by constraint.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        model: ModelCost,
        cluster: Cluster,
        plan: PipelinePlan,
        *,
        spans: Sequence[Span],
        micro_batch_size: int | None,
        max_groups: int | None,
        overlap: bool,
        depth: Literal["auto"] | DepthRule,
        planned_batches: int | None,
    ) -> None:
        ranks = len(cluster.devices)
        self.settings, self._layers = settings, model
        self._model, self._bounds = join_layers(model, spans)
        self._sizes_bytes = [layer.state_bytes for layer in model.layers]
        self._samples = sum(group.samples for group in plan.groups)
        self._micro_sizes = sizes_to_try(None if micro_batch_size is None else [micro_batch_size], self._samples)
        self._most_groups = min(ranks if max_groups is None else max_groups, self._samples)
        capped = any(math.isfinite(device.mem_bytes) for device in cluster.devices)
        self._depth: DepthRule = ("low_memory" if capped else "per_link") if depth == "auto" else depth
        self._overlap, self._ranks = overlap, ranks
        self._budgets = settings.budgets()
        self._v, bank = _weights(settings, planned_batches)
        self.queues = {budget.name: VirtualQueue(bank=bank) for budget in self._budgets}
        self._prices = Prices(
            per_s=np.array(settings.each("prices", ranks)) / 3600.0,
            power_w=np.array(settings.each("power_w", ranks)),
            idle_power_w=np.array(settings.each("idle_power_w", ranks)),
            rest_cost=settings.rest_cost,
        )
        self._estimates = Estimates(self._model, cluster, recheck=settings.recheck)
        self._migration = MigrationModel()
        self._library, self._bars = Library(settings.library), Bars(batches=settings.bar_batches)
        self.plan = plan
        self.generation: int = 0
        self._numbered: int = 0  # numbers are never used twice
        self._plans: dict[int, tuple[Pipes, PipelinePlan]] = {0: (self._pipes_of(plan), plan)}
        self._in_force, self._pending, self._seen = 0, -1, -1
        self._trial: Trial | None = None
        self._next_trial: Trial | None = None
        self._outcome: Outcome | None = None  # to be told with the next decision
        self._promised_pause_s = 0.0
        self._bias: deque[float] = deque(maxlen=_BIAS_OF)
        self._lives: deque[float] = deque(maxlen=8)
        self._reference_s = 1.0
        self._set_state(self._estimates.state)
        self._looked, self._looked_at, self._looked_queues = self._state, 0, dict.fromkeys(self.queues, 0.0)
        self._changed_at = 0
        first = self._objective(self._pipes_of(plan)).at(self._pipes_of(plan), self._shares_of(plan))
        if first is None:
            raise ValueError(f"the plan in force does not fit the devices: {self._reason(plan)}")
        self._reference_s = first.time_s
        self._library.add(first.pipes)

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
        repriced = self._reprice(seen.prices)
        if seen.batch >= self.settings.warmup:
            sizes = seen.micro_batches or [group.micro_batches for group in plan.groups]
            self._estimates.update(seen, pipes, sizes)
        forgotten = self._estimates.forget(seen.batch)
        if self._estimates.furthest(self._state) > _STALE:
            self._set_state(self._estimates.state)
        self._spend(seen, pipes, plan)
        self._compare(seen, pipes, plan)
        if self._pending >= 0:
            return self._keep(seen, "a change of structure is under way")
        if self._trial is not None and len(self._trial.measured) >= self.settings.trial_batches:
            settled = self._settle(seen)
            if settled is not None:
                return settled
        return self._decide(seen, repriced, forgotten)

    def withdraw(self, generation: int) -> None:
        """Takes back a change of structure that could not be carried out: the plan before stays, and it is barred."""
        if generation != self._pending:
            raise ValueError(f"generation={generation} must be the one under way, {self._pending}")
        pipes, _ = self._plans.pop(generation)
        self._bars.add(pipes, self._seen)
        self._pending, self._next_trial = -1, None
        self.generation = max(self._plans)
        self.plan = self._plans[self.generation][1]

    # ---- what was measured ----

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
            self._trial, self._next_trial = self._next_trial, None

    def _reprice(self, prices: Mapping[int, float]) -> list[str]:
        changed: list[str] = []
        for rank, per_hour in prices.items():
            before = float(self._prices.per_s[rank]) * 3600.0
            if per_hour != before:
                self._prices.per_s[rank] = per_hour / 3600.0
                if self._budgets:
                    changed.append(f"price of rank {rank} {before:g} -> {per_hour:g}")
        return changed

    def _spend(self, seen: Observation, pipes: Pipes, plan: PipelinePlan) -> None:
        """Adds what the batch took to the queues."""
        if not self._budgets:
            return
        shares = [sum(sizes) for sizes in seen.micro_batches or [group.micro_batches for group in plan.groups]]
        objective, seconds = self._objective(pipes), seen.batch_s + seen.pause_s
        if not seconds > 0.0:
            return
        samples = sum(shares)
        for budget in self._budgets:
            use = objective.use(budget.resource, pipes)
            amount = use.amount(seconds, shares)
            if budget.resource == "energy" and seen.work_s:
                amount = use.per_s * seconds + self._work_energy(seen.work_s)
            if budget.resource == "traffic":
                amount += seen.moved_bytes
            if budget.per_hour:
                self.queues[budget.name].add(
                    amount / (budget.limit / 3600.0 * seconds), seconds / self._reference_s
                )
            else:
                self.queues[budget.name].add(amount / (budget.limit * samples), samples / self._samples)

    def _work_energy(self, work_s: Mapping[int, float]) -> float:
        more = self._prices.power_w - self._prices.idle_power_w
        return sum(float(more[rank]) * seconds for rank, seconds in work_s.items())

    def _compare(self, seen: Observation, pipes: Pipes, plan: PipelinePlan) -> None:
        """Compares the batch with what the model says of it now."""
        whole = seen.micro_batches is None or sum(map(sum, seen.micro_batches)) == self._samples
        if not (seen.batch_s > 0.0 and whole and seen.batch >= self.settings.warmup):
            return
        if self._trial is not None:
            self._trial.measured.append(seen.batch_s)
        modelled = self._objective(pipes).at(pipes, self._shares_of(plan))
        if modelled is not None and self._trial is None:
            self._bias.append(seen.batch_s / modelled.time_s)

    def _settle(self, seen: Observation) -> Decision | None:
        """Judges the structure on trial; returns the way back if it failed."""
        trial, self._trial = self._trial, None
        assert trial is not None
        bias, measured_s = self._bias_now, trial.measured_s
        pipes, _ = self._plans[self._in_force]
        objective = self._objective(pipes)
        old = objective.judge(trial.old)
        old_s = bias * old.time_s if old is not None else math.inf
        failed = (
            trial.for_time and measured_s > (1.0 + self.settings.margin) * trial.predicted_s and measured_s > old_s
        )
        outcome = Outcome(
            generation=trial.generation,
            predicted_s=trial.predicted_s,
            measured_s=measured_s,
            predicted_gain_s=trial.gain_s,
            realised_gain_s=old_s - measured_s,
            kept=not failed,
        )
        if not failed or old is None:
            self._outcome = outcome
            return None
        self._bars.add(pipes, seen.batch)
        reason = (
            f"rolled back: {measured_s:.4g} s per batch measured, {trial.predicted_s:.4g} s promised,"
            f" {old_s:.4g} s expected of the structure before"
        )
        now = objective.at(pipes, self._shares_of(self.plan))
        return self._adopt(seen, "rollback", now, old, reason, outcome)

    # ---- decisions ----

    def _decide(self, seen: Observation, repriced: list[str], forgotten: list[str]) -> Decision:
        pipes, plan = self._plans[self.generation]
        objective = self._objective(pipes)
        now, best = objective.at(pipes, self._shares_of(plan)), objective.judge(pipes)
        if best is None:
            return self._keep(seen, "the plan in force does not fit the devices any more")
        if now is None:
            now = best
        if self.settings.structure and self._trial is None:
            reason, ranks = self._trigger(seen, repriced, forgotten)
            if reason:
                found = self._search(objective, best, ranks)
                gain = best.value - found.value
                if found.pipes != best.pipes and gain > self.settings.dead_band * objective.scale_at(best):
                    return self._adopt(seen, "plan", best, found, reason, None)
        gain = now.value - best.value
        if best.shares != now.shares and gain > self.settings.share_band * objective.scale_at(now):
            return self._adopt(seen, "shares", now, best, "samples per group", None)
        return self._keep(seen, "")

    def _trigger(self, seen: Observation, repriced: list[str], forgotten: list[str]) -> tuple[str, list[int]]:
        """Returns why to look at the structure, empty if there is no reason, and which ranks first."""
        changes = self._estimates.changes(self._looked, self.settings.dead_band)
        words = [text for _, text, _ in changes[:2]] + repriced[:2] + forgotten[:1]
        if seen.batch - self._looked_at >= _QUEUE_EVERY:
            step = _QUEUE_STEP * self._v
            moved = [name for name, q in self.queues.items() if abs(q.weight - self._looked_queues[name]) > step]
            words += [f"queue of {name} at {self.queues[name].value:.3g}" for name in moved]
        if changes:
            self._lives.append(float(seen.batch - self._changed_at))
            self._changed_at = seen.batch
        if not words and seen.batch - self._looked_at >= self.settings.look_every:
            words = [f"{self.settings.look_every} batches since the last look"]
        if words:
            self._looked, self._looked_at = self._state, seen.batch
            self._looked_queues = {name: queue.weight for name, queue in self.queues.items()}
        return "; ".join(words), list(dict.fromkeys(rank for _, _, ranks in changes for rank in ranks))

    def _search(self, objective: Objective, best: Judged, ranks: Sequence[int]) -> Judged:
        settings, batch = self.settings, self._seen
        return better_structure(
            objective,
            best,
            rounds=settings.rounds,
            candidates=settings.candidates,
            most_groups=self._most_groups,
            first=ranks,
            remembered=[s for s in reversed(self._library.structures) if s != best.pipes],
            barred=lambda pipes: self._bars.barred(pipes, batch),
        )

    def _adopt(
        self,
        seen: Observation,
        kind: DecisionKind,
        now: Judged | None,
        new: Judged,
        reason: str,
        outcome: Outcome | None,
    ) -> Decision:
        before, bias = self._plans[self.generation], self._bias_now
        now_s = now.time_s if now is not None else math.inf
        plan = self._plan_of(new)
        self._numbered += 1
        self.plan, self.generation = plan, self._numbered
        self._plans[self.generation] = (new.pipes, plan)
        moves: tuple[Move, ...] = ()
        predicted_s, gain_s = bias * new.time_s, bias * (now_s - new.time_s)
        if kind != "shares":
            moves = moves_between(self._problem, before[0], new.pipes, self._bounds, self._sizes_bytes)
            self._pending, self._promised_pause_s = self.generation, new.pause_s
            self._library.add(new.pipes)
        if kind == "plan":
            self._next_trial = Trial(
                generation=self.generation,
                old=before[0],
                old_shares=self._shares_of(before[1]),
                predicted_s=predicted_s,
                gain_s=gain_s,
                for_time=gain_s > 0.0,
            )
        saved = (
            {}
            if now is None
            else {
                b.name: _ratio(
                    b.per_hour, b.limit, now.amounts[b.resource] - new.amounts[b.resource], self._samples, now_s
                )
                for b in self._budgets
            }
        )
        outcome, self._outcome = outcome or self._outcome, None
        return Decision(
            batch=seen.batch,
            generation=self.generation,
            kind=kind,
            plan=plan,
            reason=reason,
            predicted_s=predicted_s,
            gain_s=gain_s,
            cost_gain=saved,
            moves=moves,
            pause_s=new.pause_s if kind != "shares" else 0.0,
            queues={name: queue.value for name, queue in self.queues.items()},
            outcome=outcome,
        )

    def _keep(self, seen: Observation, reason: str) -> Decision:
        outcome, self._outcome = self._outcome, None
        return Decision(
            batch=seen.batch,
            generation=self.generation,
            kind="keep",
            plan=self.plan,
            reason=reason,
            queues={name: queue.value for name, queue in self.queues.items()},
            outcome=outcome,
        )

    # ---- the model ----

    def _set_state(self, state: State) -> None:
        self._state = state
        model, self._cluster = self._estimates.costs(state)
        self._problem = Problem(
            model, self._cluster, self._samples, self._near_sizes(), overlap=self._overlap, depth=self._depth
        )
        self._now_model = model
        self._shared: dict[Pipes, tuple[list[int], float]] = {}

    def _near_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of micro-batches near those in use: all of them would take four times as long."""
        used = [max(group.micro_batches) for group in self.plan.groups]
        near = [n for n in self._micro_sizes if min(used) <= 2 * n and n <= 2 * max(used)]
        return tuple(near) or self._micro_sizes

    def _objective(self, present: Pipes) -> Objective:
        weights = [Weight(budget, self.queues[budget.name].weight) for budget in self._budgets]
        return Objective(
            self._problem,
            prices=self._prices,
            weights=weights,
            v=self._v,
            reference_s=self._reference_s,
            present=present,
            migration=self._migration,
            horizon=self._life,
            known=self._shared,
        )

    @property
    def _life(self) -> float:
        """Batches that the present state should last: as past ones did, or as long as it has lasted already."""
        if self.settings.horizon is not None:
            return float(self.settings.horizon)
        mean = sum(self._lives) / len(self._lives) if self._lives else _LIFE
        return min(max(mean, float(self._seen - self._changed_at), _LEAST_LIFE), _MOST_LIFE)

    @property
    def _bias_now(self) -> float:
        """What batches took over what the model said of them."""
        return median(self._bias) if self._bias else 1.0

    def _pipes_of(self, plan: PipelinePlan) -> Pipes:
        places = {bound: i for i, bound in enumerate(self._bounds)}
        for group in plan.groups:
            if torn := [cut for cut in group.cuts if cut not in places]:
                raise ValueError(f"cuts={group.cuts} of the plan divide tied layers at {torn}")
        return tuple(Pipe(group.ranks, tuple(places[cut] for cut in group.cuts)) for group in plan.groups)

    @staticmethod
    def _shares_of(plan: PipelinePlan) -> tuple[int, ...]:
        return tuple(group.samples for group in plan.groups)

    def _plan_of(self, judged: Judged) -> PipelinePlan:
        groups: list[GroupPlan] = []
        for pipe, samples in zip(judged.pipes, judged.shares, strict=True):
            sizes = evened(micro_batches_of(samples, self._problem.cost(pipe).size(samples)))
            groups.append(
                GroupPlan(ranks=pipe.ranks, cuts=pipe.cuts, samples=samples, micro_batches=sizes, depths=())
            )
        plan = evaluate_plan(self._now_model, self._cluster, groups, overlap=self._overlap, depth=self._depth)
        assert plan.ok, plan.reason
        whole = [replace(group, cuts=tuple(self._bounds[cut] for cut in group.cuts)) for group in plan.groups]
        return replace(plan, groups=tuple(whole))

    def _reason(self, plan: PipelinePlan) -> str:
        return evaluate_plan(
            self._layers, self._cluster, plan.groups, overlap=self._overlap, depth=self._depth
        ).reason

    # ---- checkpoint ----

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values for `load_state_dict`: plan, queues and what was learned."""
        return {
            "ranks": self._ranks,
            "samples": self._samples,
            "plan": plan_to_plain(self.plan),
            "queues": {name: queue.value for name, queue in self.queues.items()},
            "reference_s": self._reference_s,
            "estimates": self._estimates.to_plain(),
            "migration": self._migration.to_plain(),
            "prices_per_hour": (self._prices.per_s * 3600.0).tolist(),
            "bias": list(self._bias),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned; its plan becomes the one in force, generation 0, batch 0.

        Raises:
            ValueError: it is of another number of ranks or another global batch; nothing has been changed then.
        """
        if (state["ranks"], state["samples"]) != (self._ranks, self._samples):
            raise ValueError(
                f"the controller's state is of {state['ranks']} ranks and a global batch of {state['samples']}, not of"
                f" {self._ranks} and {self._samples}: start without it"
            )
        plan = plan_from_plain(state["plan"])
        pipes = self._pipes_of(plan)
        for name, value in state["queues"].items():
            if name in self.queues:
                self.queues[name].value = float(value)
        self._reference_s = float(state["reference_s"])
        self._estimates.load(state["estimates"])
        self._migration.load(state["migration"])
        self._prices.per_s[:] = np.array(state["prices_per_hour"]) / 3600.0
        self._bias.extend(state["bias"])
        self.plan, self.generation, self._numbered = plan, 0, 0
        self._plans = {0: (pipes, plan)}
        self._in_force, self._pending, self._seen = 0, -1, -1
        self._trial = self._next_trial = None
        self._set_state(self._estimates.state)
        self._looked, self._looked_at, self._changed_at = self._state, 0, 0
        self._library.add(pipes)


def _weights(settings: ControllerSettings, planned_batches: int | None) -> tuple[float, float]:
    """Returns V and the bank."""
    v, bank = settings.v, settings.bank
    if v is None:
        v = 1.0
        if settings.budget:
            v = _V if planned_batches is None else min(_MOST_V, max(_LEAST_V, _PART * planned_batches))
    if bank is None:
        bank = _V if planned_batches is None else max(1.0, _PART * planned_batches)
    return v, bank


def _ratio(per_hour: bool, limit: float, amount: float, samples: int, seconds: float) -> float:
    """Returns an amount per batch as a part of its budget."""
    return amount / (limit / 3600.0 * seconds) if per_hour else amount / (limit * samples)
