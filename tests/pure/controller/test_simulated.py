"""The simulation: batches take what their operations take, decisions come late, costs add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.joint.machine import Machine, Phase
from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.pipeline.decide.costs import times_of
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, makespan_s
from lightning_hetero.pipeline.decide.plans import best_plan
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.types import PipelinePlan
from tests.pure.controller.kit import cluster_of, model_of
from tests.pure.controller.simulated import Rates, Trace, Unchanged, simulate

MODEL = model_of([1e-3, 2e-3, 1e-3, 3e-3], output_bytes=1e4)
CAPPED = cluster_of([1.0, 0.5], mem_bytes=3.1e6)
CALM = Phase(start=0, slowness=(1.0, 1.0))


class Scripted:
    """Decides what it is told, batch by batch; keeps what it sees."""

    def __init__(self, plan: PipelinePlan, *decisions: Decision) -> None:
        self._plan, self._decisions = plan, {d.batch: d for d in decisions}
        self.seen: list[Observation] = []

    def step(self, seen: Observation) -> Decision:
        self.seen.append(seen)
        keep = Decision(batch=seen.batch, generation=seen.generation, kind="keep", plan=self._plan, reason="")
        return self._decisions.get(seen.batch, keep)


def test_a_batch_takes_what_its_operations_take() -> None:
    plan, machine = best_plan(MODEL, CAPPED, 12, micro_batch_size=2), Machine(MODEL, CAPPED)
    [group] = plan.groups
    slow = Phase(start=0, slowness=(2.0, 1.0), links={(0, 1): 100.0})
    times = times_of(MODEL, machine.cluster_in(slow), group)
    batch = machine.batch(plan, slow)
    assert batch.seconds == pytest.approx(makespan_s(times, SchedulePolicy(depths=group.depths)))
    assert batch.work_s[0] == pytest.approx(2.0 * machine.batch(plan, CALM).work_s[0])
    assert machine.batch(plan, CALM).seconds == pytest.approx(plan.total_s, rel=0.1)


def test_links_carry_activations_and_gradients_and_the_loop() -> None:
    plan, machine = best_plan(MODEL, CAPPED, 12, micro_batch_size=2), Machine(MODEL, CAPPED)
    links = machine.batch(plan, CALM).links
    assert {(w.source, w.target): (w.messages, w.size_bytes) for w in links} == {
        (0, 1): (12, 24e4),
        (1, 0): (12, 24e4),
    }
    assert all(w.seconds == pytest.approx(12 * 1e-5 + 24e4 / 1e9) for w in links)


def test_replicas_synchronise() -> None:
    roomy = cluster_of([1.0, 1.0], bandwidth=1e8)
    plan = evaluate_plan(MODEL, roomy, replicas(4, [6, 6]).groups)
    batch = Machine(MODEL, roomy).batch(plan, CALM)
    assert batch.seconds == pytest.approx(6 * 7e-3 + 2 * (5e5 / 1e8 + 1e-5))
    assert batch.links == ()


def test_a_decision_is_in_force_after_the_lag_and_its_migration_comes_first() -> None:
    plan = best_plan(MODEL, CAPPED, 12, micro_batch_size=2)
    [group] = plan.groups
    first, border, end = group.cuts
    other = replace(plan, groups=(replace(group, cuts=(first, border - 1, end)),))
    decision = Decision(batch=3, generation=1, kind="plan", plan=other, reason="")
    machine = Machine(MODEL, CAPPED, pause_s=0.5, layer_s=0.1)
    script = Scripted(plan, decision)
    run = simulate(script, machine, Trace([CALM]), plan, batches=8, lag=2)
    pause = 0.5 + 0.1 + 1e-5 + 1e6 / 1e9
    assert list(run.pause_s) == pytest.approx([0, 0, 0, 0, 0, pause, 0, 0])
    assert [seen.generation for seen in script.seen] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert script.seen[5].pause_s == pytest.approx(pause)
    assert list(run.decisions) == [decision]
    free = simulate(Scripted(plan, decision), machine, Trace([CALM]), plan, batches=8, free_moves=True)
    assert free.pause_s.sum() == 0.0 and free.mean_s < run.mean_s


def test_a_trace_by_second_follows_the_clock() -> None:
    plan, machine = best_plan(MODEL, CAPPED, 12, micro_batch_size=2), Machine(MODEL, CAPPED)
    calm_s = machine.batch(plan, CALM).seconds
    phases = [CALM, Phase(start=2.5 * calm_s, slowness=(2.0, 2.0))]
    run = simulate(Unchanged(plan), machine, Trace(phases, by_batch=False), plan, batches=5)
    slow_s = machine.batch(plan, phases[1]).seconds
    assert list(run.batch_s) == pytest.approx([calm_s, calm_s, calm_s, slow_s, slow_s])


def test_costs_add_up() -> None:
    roomy = cluster_of([1.0, 1.0])
    plan = evaluate_plan(MODEL, roomy, replicas(4, [6, 0]).groups)
    spike = Phase(start=1, slowness=(1.0, 1.0), prices=(2.0, 2.0))
    rates = Rates(prices=[36.0, 72.0], rest_cost=0.5)
    script = Scripted(plan)
    run = simulate(script, Machine(MODEL, roomy), Trace([CALM, spike]), plan, batches=2, rates=rates)
    seconds = 6 * 7e-3
    assert list(run.money) == pytest.approx([0.02 * seconds, 0.04 * seconds])
    assert [dict(seen.prices) for seen in script.seen] == [{}, {0: 72.0, 1: 144.0}]


def test_noise_is_drawn_from_the_generator_that_is_passed_in() -> None:
    plan, machine = best_plan(MODEL, CAPPED, 12, micro_batch_size=2), Machine(MODEL, CAPPED)
    runs = [
        simulate(
            Unchanged(plan), machine, Trace([CALM]), plan, batches=400, noise=0.1, rng=np.random.default_rng(s)
        )
        for s in (1, 1, 2)
    ]
    assert (runs[0].batch_s == runs[1].batch_s).all() and (runs[0].batch_s != runs[2].batch_s).any()
    calm_s = machine.batch(plan, CALM).seconds
    assert runs[0].batch_s.mean() == pytest.approx(calm_s, rel=0.03)
    assert runs[0].batch_s.std() == pytest.approx(0.1 * calm_s, rel=0.2)
