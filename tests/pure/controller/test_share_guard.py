"""`ShareGuard`: devices that are slow by turns cost no more than the account holds; lasting changes are answered."""

from __future__ import annotations

import math
from statistics import mean

import pytest

from lightning_hetero import LyapunovController, Scenario
from lightning_hetero.controller.messages import Observation
from lightning_hetero.controller.share_guard import ShareGuard
from lightning_hetero.pipeline.decide.plans import in_one_piece
from lightning_hetero.solvers.placement.pipes import Pipe
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.types import AffineCost, PipelinePlan
from tests.pure.controller.kit import cluster_of, model_of

RANKS, SAMPLES, SAMPLE_S, AROUND_S = 4, 64, 0.0018, 0.003
LAYERS, BATCHES, SPELL_STEP_S = 9, 132, 0.02  # as in `benchmarks.peers`: spells pass with time
MODEL, CLUSTER = model_of([SAMPLE_S / LAYERS] * LAYERS, state_bytes=1e5), cluster_of([1.0] * RANKS)
WHOLE = AffineCost(fixed_s=0.0, per_sample_s=1.0)
ALONE = tuple(Pipe((rank,), (0, LAYERS)) for rank in range(RANKS))
EQUAL = (SAMPLES // RANKS,) * RANKS


def spells(seed: int) -> Scenario:
    return Scenario(
        speeds=(1.0,) * RANKS, seed=seed, spells={"probability": 1 / 30, "factor": 6.0, "steps": 8}
    )


def work_s(plan: PipelinePlan, speeds: list[float]) -> dict[int, float]:
    return {g.ranks[0]: SAMPLE_S * g.samples / speeds[g.ranks[0]] for g in plan.groups if len(g.ranks) == 1}


def equal_shares_s(scenario: Scenario, start_s: float) -> float:
    now_s = start_s
    for _ in range(BATCHES):
        step = int(now_s / SPELL_STEP_S)
        now_s += SAMPLE_S * EQUAL[0] / min(scenario.speed(r, step) for r in range(RANKS)) + AROUND_S
    return now_s - start_s


def controlled_s(scenario: Scenario, settings: LyapunovController) -> float:
    """Returns the time of a run whose decisions hold from the second batch after on."""
    plan = in_one_piece(replicas(LAYERS, list(EQUAL)), MODEL, CLUSTER)
    controller = settings.start(MODEL, CLUSTER, plan, planned_batches=BATCHES)
    now_s, generation, due = 0.0, 0, dict[int, tuple[int, PipelinePlan]]()
    for batch in range(BATCHES):
        generation, plan = due.pop(batch, (generation, plan))
        speeds = [scenario.speed(r, int(now_s / SPELL_STEP_S)) for r in range(RANKS)]
        work = work_s(plan, speeds)
        assert len(work) == len(plan.groups), "layers do not move here"
        batch_s = max(work.values()) + AROUND_S
        now_s += batch_s
        sizes = [group.micro_batches for group in plan.groups]
        seen = Observation(batch=batch, generation=generation, batch_s=batch_s, work_s=work, micro_batches=sizes)
        decision = controller.step(seen)
        if decision.kind != "keep":
            due[batch + 2] = decision.generation, in_one_piece(decision.plan, MODEL, CLUSTER)
    return now_s


def test_slow_spells_cost_no_more_than_equal_shares() -> None:
    over: list[float] = []
    for seed in range(4):
        scenario = spells(seed)
        equal_s = mean(equal_shares_s(scenario, start_s) for start_s in (0.0, 0.1, 0.2, 0.3, 0.4))  # as spells meet it
        over.append(controlled_s(scenario, LyapunovController()) / equal_s)
    assert mean(over) <= 1.02, over


def test_a_device_that_stays_slow_is_answered_within_ten_batches() -> None:
    scenario = Scenario(speeds=(1.0,) * RANKS).slow(rank=0, factor=5.0, at_step=0)
    steady_s = SAMPLE_S * SAMPLES / 3.2 + AROUND_S  # of the best shares
    first_s = SAMPLE_S * EQUAL[0] * 5.0 + AROUND_S
    assert controlled_s(scenario, LyapunovController()) <= 10 * first_s + 1.1 * (BATCHES - 10) * steady_s


def observed(guard: ShareGuard, batch: int, slowness: tuple[float, ...], shares: tuple[int, ...] = EQUAL) -> None:
    work = {rank: n * slow for rank, (n, slow) in enumerate(zip(shares, slowness, strict=True))}
    guard.measured(
        Observation(batch=batch, generation=0, work_s=work), ALONE, [(n,) for n in shares]
    )


def started() -> ShareGuard:
    guard = ShareGuard(WHOLE, saves=False)
    guard.structure(ALONE, EQUAL)
    observed(guard, 1, (1.0,) * RANKS)
    return guard


def test_shares_go_as_far_as_is_covered_and_come_back_when_nothing_is() -> None:
    guard, wanted = started(), (4, 4, 4, 52)
    part = guard.within(wanted, tight=False)
    assert sum(part) == SAMPLES and EQUAL[0] < part[3] < 52
    assert guard.stake(part) == pytest.approx(guard.allowed, abs=1 / EQUAL[0])
    assert guard.covers(part)
    guard.decided(part)
    for batch in range(2, 8):
        observed(guard, batch, (1.0, 1.0, 1.0, 3.0), part)
    assert not guard.covers(part)
    assert guard.within(part, tight=True) == EQUAL


def test_no_rank_rests_by_an_account_that_slow_spells_have_emptied() -> None:
    resting = ALONE[:3], (22, 21, 21)
    guard = started()
    assert guard.admits(*resting)
    guard.decided((20, 20, 20, 4))
    for batch in range(2, 8):
        observed(guard, batch, (1.0, 1.0, 3.0, 1.0), (20, 20, 20, 4))
    assert not guard.admits(*resting)


def test_what_budgets_ask_for_is_not_guarded() -> None:
    guard = ShareGuard(WHOLE, saves=True)
    guard.structure(ALONE, EQUAL)
    assert guard.covers((1, 1, 1, 61)) and guard.within((1, 1, 1, 61), tight=False) == (1, 1, 1, 61)
    assert guard.admits(ALONE[:1], (SAMPLES,))


def test_a_plan_for_unequal_devices_counts_until_they_are_measured() -> None:
    guard = ShareGuard(WHOLE, saves=False)
    planned = (4, 4, 4, 52)
    guard.structure(ALONE, planned)
    observed(guard, 1, (13.0, 13.0, 13.0, 1.0), planned)
    assert guard.covers(planned) and guard.allowed < math.inf
