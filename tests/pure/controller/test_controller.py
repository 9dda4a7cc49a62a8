"""The online controller as a whole: answers changes, keeps budgets, takes back what disappoints."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.joint.machine import Machine, Phase
from lightning_hetero import LyapunovController
from lightning_hetero.controller import triggers
from lightning_hetero.controller.controller import Controller
from lightning_hetero.controller.messages import Decision, Observation, Outcome
from lightning_hetero.pipeline.decide.plans import best_plan, check_plan
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan
from tests.pure.controller.kit import cluster_of, model_of
from tests.pure.controller.simulated import Rates, Run, Trace, Unchanged, simulate

BATCH = 32
BUDGETED = 600  # batches
ROOMY = cluster_of([1.0, 1.0, 0.5, 0.5])
MODEL = model_of([1e-3] * 16, state_bytes=1e6, output_bytes=1e4)
CAPPED = replace(ROOMY, devices=tuple(replace(d, mem_bytes=7e6) for d in ROOMY.devices))


def started(
    settings: LyapunovController | None = None, cluster: Cluster = CAPPED, model: ModelCost = MODEL, **more: Any
) -> Controller:
    plan = best_plan(model, cluster, BATCH, micro_batch_size=2)
    return (settings or LyapunovController()).start(model, cluster, plan, micro_batch_size=2, **more)


def trained(
    controller: Controller, phases: list[Phase], batches: int, cluster: Cluster = CAPPED, **more: Any
) -> Run:
    return simulate(controller, Machine(MODEL, cluster), Trace(phases), controller.plan, batches=batches, **more)


def calm(ranks: int = 4) -> Phase:
    return Phase(start=0, slowness=(1.0,) * ranks)


def slow(start: int, *slowness: float) -> Phase:
    return Phase(start=start, slowness=slowness)


def ideal_s(cluster: Cluster, phase: Phase) -> float:
    machine = Machine(MODEL, cluster)
    return machine.batch(best_plan(MODEL, machine.cluster_in(phase), BATCH, micro_batch_size=2), phase).seconds


# ---- when nothing changes, and when something does --------------------------------------------------------------


@pytest.mark.parametrize("cluster", [ROOMY, CAPPED], ids=["roomy", "capped"])
def test_nothing_changes_where_nothing_changes(cluster: Cluster) -> None:
    controller = started(cluster=cluster)
    run = trained(controller, [calm()], 200, cluster)
    assert [d.kind for d in run.decisions] == [] and controller.generation == 0


@pytest.mark.parametrize("cluster", [ROOMY, CAPPED], ids=["roomy", "capped"])
def test_a_change_is_answered_by_the_second_batch_that_shows_it(cluster: Cluster) -> None:
    controller = started(cluster=cluster)
    run = trained(controller, [calm(), slow(30, 4.0, 1.0, 1.0, 1.0)], 60, cluster)
    first = run.decisions[0]
    assert first.batch == 31
    assert first.kind == ("plan" if cluster is CAPPED else "shares")
    assert run.batch_s[-10:].mean() < 0.7 * run.batch_s[30:32].mean()
    assert run.batch_s[-10:].mean() <= 1.1 * ideal_s(cluster, slow(0, 4.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("jump", [False, True])
def test_layers_do_not_move_for_half_of_what_has_happened(jump: bool) -> None:
    """A price changes in the batch in which a rank is first seen to be slower: one batch later that is believed."""
    controller = started(LyapunovController(budget={"money_per_sample": 1e-7}, v=1.0))
    plan, batch = controller.plan, 0
    machine = Machine(MODEL, CAPPED)

    def seen(phase: Phase, **more: Any) -> Decision:
        nonlocal batch
        took = machine.batch(plan, phase)
        batch += 1
        work = {rank: work_s for rank, work_s in enumerate(took.work_s) if work_s > 0.0}
        return controller.step(
            Observation(batch=batch, generation=0, batch_s=took.seconds, work_s=work, **more)
        )

    for _ in range(4):  # fewer than it looks at queues after
        assert seen(calm()).kind == "keep"
    phase = slow(0, 1.0, 4.0, 1.0, 1.0) if jump else calm()
    first = seen(phase, prices={0: 50.0})
    assert controller.triggers.at == (0 if jump else 5)
    if jump:
        assert first.kind != "plan"
        found = seen(phase)
        assert controller.triggers.at == 6 and found.kind == "plan"
        assert "price of rank 0" in found.reason and "rank 1 takes 4.00 times" in found.reason


def test_a_change_is_named_with_its_reason_and_gain() -> None:
    controller = started()
    run = trained(controller, [calm(), slow(30, 4.0, 1.0, 1.0, 1.0)], 60)
    decision = run.decisions[0]
    assert decision.reason == "rank 0 takes 4.00 times as long as before"
    assert decision.gain_s > 0.0
    check_plan(decision.plan, layers=16, ranks=4, global_batch=BATCH)
    later = [d for d in run.decisions if d.outcome]
    outcome = later[0].outcome if later else None
    if outcome is not None:
        assert outcome.generation == decision.generation and outcome.kept


def test_a_plan_from_a_wrong_profile_heals_within_ten_batches_twice() -> None:
    """Nobody was told that ranks 0 and 1 are four times slower; later it is ranks 2 and 3, and by more."""
    wrong, reversed_ = slow(0, 4.0, 4.0, 1.0, 1.0), slow(40, 1.0, 1.0, 4.0, 4.0)
    for cluster in (ROOMY, CAPPED):
        run = trained(started(cluster=cluster), [wrong, reversed_], 80, cluster)
        assert run.batch_s[10:40].max() <= 1.25 * ideal_s(cluster, wrong)
        assert run.batch_s[50:].max() <= 1.25 * ideal_s(cluster, reversed_)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_device_that_rests_because_it_is_slow_is_woken_when_it_is_fast_again(noise: float) -> None:
    """Nothing is measured of a rank at rest but what it can do; without that it would wait for 200 batches."""
    controller = started(cluster=ROOMY)
    phases = [calm(), slow(20, 1.0, 1.0, 1.0, 60.0), slow(80, 1.0, 1.0, 1.0, 1.0)]
    run = trained(controller, phases, 120, ROOMY, noise=noise, rng=np.random.default_rng(4))
    rests, wakes = [
        next(d.batch for d in run.decisions if d.batch >= start and (3 in ranks_of(d.plan)) == works)
        for start, works in ((20, False), (80, True))
    ]
    assert rests <= 25 and wakes <= 85
    assert run.batch_s[90:].mean() <= 1.1 * ideal_s(ROOMY, calm())


def ranks_of(plan: PipelinePlan) -> set[int]:
    return {rank for group in plan.groups for rank in group.ranks}


def test_slow_links_count_also_between_groups_where_nobody_measures_them() -> None:
    """Two groups of three, and rank 4's links are slow: most of the loss is the gradients' synchronisation."""
    cluster = replace(
        cluster_of([1.0] * 6), devices=tuple(replace(d, mem_bytes=7e6) for d in cluster_of([1.0] * 6).devices)
    )
    links = {(a, b): 200.0 for a in range(6) for b in range(6) if a != b and 4 in (a, b)}
    phase = Phase(start=30, slowness=(1.0,) * 6, links=links)
    controller = started(cluster=cluster)
    assert [len(group.ranks) for group in controller.plan.groups] == [3, 3]
    run = trained(controller, [calm(6), phase], 80, cluster)
    assert run.batch_s[-10:].mean() <= 1.1 * ideal_s(cluster, phase) < 0.5 * run.batch_s[30]


def test_only_shares_if_structure_is_off() -> None:
    controller = started(LyapunovController(structure=False))
    run = trained(controller, [calm(), slow(30, 4.0, 1.0, 1.0, 1.0)], 90)
    assert {d.kind for d in run.decisions} <= {"shares"}
    shapes = {tuple((g.ranks, g.cuts) for g in d.plan.groups) for d in run.decisions}
    assert shapes <= {tuple((g.ranks, g.cuts) for g in controller.plan.groups)}


def test_tied_layers_are_never_torn() -> None:
    spans = [(0, 3), (9, 11)]
    plan = best_plan(MODEL, CAPPED, BATCH, micro_batch_size=2, spans=spans)
    controller = LyapunovController().start(MODEL, CAPPED, plan, micro_batch_size=2, spans=spans)
    run = trained(controller, [calm(), slow(20, 4.0, 1.0, 1.0, 1.0), slow(50, 1.0, 1.0, 1.0, 3.0)], 90)
    plans = [d.plan for d in run.decisions]
    assert any(d.kind == "plan" for d in run.decisions)
    assert not {1, 2, 3, 10, 11} & {cut for p in plans for g in p.groups for cut in g.cuts}
    torn = best_plan(MODEL, CAPPED, BATCH, micro_batch_size=2)
    if {1, 2, 3, 10, 11} & {cut for g in torn.groups for cut in g.cuts}:
        with pytest.raises(ValueError, match="divide tied layers"):
            LyapunovController().start(MODEL, CAPPED, torn, spans=spans)


def test_a_device_that_costs_more_than_it_brings_rests() -> None:
    """Data parallelism with one layer, as the balanced engine has it: rank 3 takes its share, and costs a fortune."""
    model, cluster = model_of([1e-2], state_bytes=1.0), cluster_of([1.0, 1.0, 1.0, 0.2])
    plan = best_plan(model, cluster, BATCH)
    settings = LyapunovController(prices=[1, 1, 1, 20], budget={"money_per_sample": 4e-6}, v=10, bank=5)
    controller = settings.start(model, cluster, plan)
    rates = Rates(prices=[1, 1, 1, 20])
    run = simulate(controller, Machine(model, cluster), Trace([calm()]), plan, batches=120, rates=rates)
    assert any(rank == 3 for g in plan.groups for rank in g.ranks)
    assert not any(rank == 3 for g in controller.plan.groups for rank in g.ranks)
    assert any("queue of money_per_sample" in d.reason for d in run.decisions)


# ---- budgets ---------------------------------------------------------------------------------------------------


@cache
def budgeted(part: float, **settings: Any) -> tuple[Run, float]:
    """Prices that change every 25 batches; the budget is ``part`` of what the fastest plan costs."""
    rng, phases = np.random.default_rng(2), list[Phase]()
    for start in range(0, BUDGETED, 25):
        prices = tuple(float(p) for p in rng.choice([0.5, 1.0, 3.0], 4))
        phases.append(Phase(start=start, slowness=(1.0,) * 4, prices=prices))
    rates = Rates(prices=[1.0] * 4)
    held = simulate(Unchanged(started(cluster=ROOMY).plan), Machine(MODEL, ROOMY), Trace(phases),
                    started(cluster=ROOMY).plan, batches=BUDGETED, rates=rates)  # fmt: skip
    limit = part * held.money.mean() / BATCH
    controller = started(
        LyapunovController(budget={"money_per_sample": limit}, **settings), ROOMY, planned_batches=BUDGETED
    )
    run = trained(controller, phases, BUDGETED, ROOMY, rates=rates)
    return run, limit * BATCH


def test_the_budget_is_kept_and_used() -> None:
    run, limit = budgeted(0.85)
    spent = run.money.mean() / limit
    assert spent <= 1.02 and spent >= 0.95
    queue = run.queues["money_per_sample"]
    assert spent <= 1.0 + queue[-1] / len(queue) + 1e-9  # Neely's bound, as measured


def test_savings_in_the_bank_are_spent() -> None:
    (without, limit), (with_bank, _) = budgeted(0.85, v=30, bank=0), budgeted(0.85, v=30, bank=50)
    assert without.money.mean() < with_bank.money.mean() <= 1.05 * limit
    assert with_bank.mean_s < without.mean_s


def test_per_hour_never_dawdles() -> None:
    """A budget per hour rewards slow cheap plans: none is taken that is slower and no cheaper per batch."""
    controller = started(LyapunovController(budget={"money_per_hour": 2.0}, v=1, bank=0), ROOMY)  # of 4 devices
    plans = [controller.plan, *(d.plan for d in trained(controller, [calm()], 400, ROOMY).decisions)]
    assert len(plans) > 2
    for old, new in pairwise(plans):
        money = [p.total_s * sum(len(g.ranks) for g in p.groups) for p in (old, new)]
        assert new.total_s <= old.total_s * 1.0001 or money[1] < money[0]


# ---- the runtime's side ----------------------------------------------------------------------------------------


def observation(batch: int, generation: int, plan: PipelinePlan, cluster: Cluster, **more: Any) -> Observation:
    batch_ = Machine(MODEL, cluster).batch(plan, Phase(start=0, slowness=more.pop("slowness", (1.0,) * 4)))
    work = {rank: seconds for rank, seconds in enumerate(batch_.work_s) if seconds}
    return Observation(
        **{"batch": batch, "generation": generation, "batch_s": batch_.seconds, "work_s": work, **more}
    )


def until_moved(controller: Controller) -> tuple[int, Decision]:
    plan = controller.plan
    for t in range(40):
        slowness = (4.0, 1.0, 1.0, 1.0) if t >= 20 else (1.0,) * 4
        decision = controller.step(observation(t, 0, plan, CAPPED, slowness=slowness))
        if decision.kind == "plan":
            return t, decision
    raise AssertionError("nothing moved")


def test_nothing_else_is_decided_while_layers_move() -> None:
    controller = started()
    before = controller.plan
    t, decision = until_moved(controller)
    for k in range(1, 4):
        waiting = controller.step(observation(t + k, 0, before, CAPPED, slowness=(1.0, 4.0, 1.0, 1.0)))
        assert (waiting.kind, waiting.reason) == ("keep", "a change of structure is under way")
        assert waiting.plan == decision.plan


def test_a_move_that_cannot_be_carried_out_is_taken_back_and_barred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "_LOOK_EVERY", 10)
    controller = started()
    before = controller.plan
    t, decision = until_moved(controller)
    with pytest.raises(ValueError, match="generation=7 must be the one under way, 1"):
        controller.withdraw(7)
    controller.withdraw(decision.generation)
    assert (controller.plan, controller.generation) == (before, 0)
    numbers = {decision.generation}
    for k in range(1, 49):
        after = controller.step(
            observation(t + k, controller.generation, controller.plan, CAPPED, slowness=(4.0, 1.0, 1.0, 1.0))
        )
        assert [(g.ranks, g.cuts) for g in after.plan.groups] != [(g.ranks, g.cuts) for g in decision.plan.groups]
        assert after.kind == "keep" or after.generation not in numbers  # never used twice
        numbers.add(after.generation)


def test_a_structure_measured_worse_than_promised_is_rolled_back_and_barred_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triggers, "_LOOK_EVERY", 10)
    controller = started()
    before, truth = controller.plan, (4.0, 1.0, 1.0, 1.0)
    shape = [(g.ranks, g.cuts) for g in before.groups]
    plan, generation = before, 0
    outcomes, kinds = list[Outcome](), list[str]()
    for t in range(150):
        slowness = truth if t >= 20 else (1.0,) * 4
        seen = observation(t, generation, plan, CAPPED, slowness=slowness)
        if [(g.ranks, g.cuts) for g in plan.groups] != shape:
            seen = replace(seen, batch_s=3.0 * seen.batch_s)  # whatever the model thinks of it
        decision = controller.step(seen)
        plan, generation = decision.plan, decision.generation
        if decision.kind in ("plan", "rollback"):
            kinds.append(decision.kind)
        if decision.outcome is not None:
            outcomes.append(decision.outcome)
    assert kinds[:2] == ["plan", "rollback"] and kinds.count("rollback") >= 2
    assert all(not o.kept and o.realised_gain_s < 0.0 for o in outcomes)
    assert shape == [(g.ranks, g.cuts) for g in controller.plan.groups] or kinds[-1] == "plan"


def test_a_checkpoint_goes_on_where_it_was() -> None:
    settings = LyapunovController(budget={"money_per_sample": 1e-6})
    one = started(settings)
    trained(one, [calm(), slow(20, 4.0, 1.0, 1.0, 1.0)], 60)
    two = started(settings)
    state = json.loads(json.dumps(one.state_dict()))
    two.load_state_dict(state)
    assert two.plan.groups == one.plan.groups and two.generation == 0
    assert two.state_dict()["queues"] == one.state_dict()["queues"]
    assert trained(two, [slow(0, 4.0, 1.0, 1.0, 1.0)], 40).decisions == []
    other = started(settings, cluster_of([1.0, 1.0]))
    with pytest.raises(ValueError, match="state is of 4 ranks and a global batch of 32, not of 2 and 32"):
        other.load_state_dict(state)


def test_observations_out_of_turn_are_refused() -> None:
    controller = started()
    controller.step(observation(3, 0, controller.plan, CAPPED))
    with pytest.raises(ValueError, match=r"Observation.batch=3 must be above 3"):
        controller.step(observation(3, 0, controller.plan, CAPPED))
    with pytest.raises(ValueError, match=r"Observation.generation=9 must be one of \[0\]"):
        controller.step(observation(4, 9, controller.plan, CAPPED))


def test_a_plan_that_does_not_fit_is_refused_at_the_start() -> None:
    plan = best_plan(MODEL, ROOMY, BATCH)
    with pytest.raises(ValueError, match="the plan in force does not fit the devices: group 0: stage 0"):
        LyapunovController().start(MODEL, CAPPED, plan)
