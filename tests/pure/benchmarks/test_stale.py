"""The simulated half of the stale benchmark: its gradients, its comparator, its cache and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.kit.figures import geometric
from benchmarks.stale.cases import CASES, CONTENDERS, COSTS, JitteredWork
from benchmarks.stale.learning import BATCH, RECIPES, Learner, Training, layered, mlp_gradient, mlp_weights, synchronous
from benchmarks.stale.simulated import ENDS, balanced_barrier, spread
from benchmarks.stale.simulator import Costs, simulate
from benchmarks.stale.speeds import SimulatedSpeeds
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import by_name

pytest.importorskip("sklearn")


def constant(*speeds: float) -> SimulatedSpeeds:
    return SimulatedSpeeds([[(0.0, v)] for v in speeds], launch_work=1.0)


def steady(*speeds: float) -> JitteredWork:
    return JitteredWork(constant(*speeds), len(speeds), 0.0, 0)


# ---- gradients -------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_loss() -> None:
    rng = np.random.default_rng(3)
    weights: Any = mlp_weights(rng).astype(np.float64)
    images: Any = rng.standard_normal((5, 64))
    labels = rng.integers(0, 10, 5)
    _, gradient = mlp_gradient(weights, images, labels)
    for i in rng.integers(0, len(weights), 40):
        step = np.zeros_like(weights)
        step[i] = 1e-6
        up, down = mlp_gradient(weights + step, images, labels)[0], mlp_gradient(weights - step, images, labels)[0]
        assert gradient[i] == pytest.approx((up - down) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["MLP, momentum", "MLP, Adam"])
@pytest.mark.parametrize("policy", ["bsp", "flexible"])
def test_equal_workers_train_as_one_process(name: str, policy: str) -> None:
    recipe = replace(RECIPES[name], epochs=1)
    learner = Learner(recipe, 5)
    training = Training([learner], 5)
    coordinator = Coordinator(by_name(policy), workers=range(4))
    work = constant(1.0, 1.0, 1.0, 1.0).work_s
    trace = simulate(coordinator, work, workers=range(4), epochs=[ENDS], costs=COSTS, hooks=training)
    assert trace.staleness == {0: ENDS[-1]}
    assert not learner.running
    assert learner.final_loss() == pytest.approx(synchronous(recipe, 5)["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "Muon"])
def test_an_optimizer_does_what_torchs_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    recipe = replace(RECIPES[f"MLP, {name}"], epochs=10_000)  # the learning rate stays what it is
    learner = Learner(recipe, 0)
    layers = [torch.nn.Parameter(torch.from_numpy(part)) for part in layered(learner.weights.copy())]
    matrices = [p for p in layers if p.ndim == 2]
    if name == "Muon":
        others = [p for p in layers if p.ndim == 1]
        made = [torch.optim.Muon(matrices, recipe.lr, weight_decay=0.0), torch.optim.Adam(others, recipe.lr / 3)]
    elif name == "Adam":
        made = [torch.optim.Adam(layers, recipe.lr)]
    else:
        made = [torch.optim.SGD(layers, recipe.lr, momentum=0.9 * (name == "momentum"))]
    rng = np.random.default_rng(1)
    for _ in range(3):
        gradient = rng.standard_normal(len(learner.weights)).astype(np.float32)
        learner.pool = gradient
        learner.step(1, 1.0, True)
        for p, part in zip(layers, layered(gradient), strict=True):
            p.grad = torch.from_numpy(part)
        for one in made:
            one.step()
    theirs = torch.cat([p.detach().flatten() for p in layers]).numpy()
    assert learner.weights == pytest.approx(theirs, rel=1e-4, abs=2e-3 if name == "Muon" else 1e-5)  # Muon: bfloat16


def test_a_stale_gradient_is_taken_at_old_parameters() -> None:
    recipe = replace(RECIPES["MLP, momentum"], epochs=1)
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((8, 64)).astype(np.float32), rng.integers(0, 10, 8)
    plain = Learner(recipe, 0)
    plain.take(1)
    plain.take(2)
    plain.give(1, images, labels, 1.0)
    plain.step(8, 1.0, True)
    plain.give(2, images, labels, 0.25)
    old = mlp_weights(np.random.default_rng([7, 0]))
    gradient = plain.gradient(old, images, labels)[1]
    assert plain.pool == pytest.approx(2.0 * gradient, rel=1e-5, abs=1e-7)


# ---- the balanced engine's barrier -----------------------------------------------------------------------


def test_the_balanced_barrier_on_equal_workers_in_closed_form() -> None:
    trace = balanced_barrier(steady(1.0, 1.0, 1.0, 1.0), 4, [64] * 10, Costs(pull_s=0.5, push_s=0.25))
    assert trace.makespan_s == pytest.approx(10 * 17.75)
    assert all(worker.hold_s == 0.0 for worker in trace.workers.values())


def test_the_balanced_barrier_comes_near_the_ideal_time() -> None:
    trace = balanced_barrier(steady(1.0, 1.0, 0.5, 0.25), 4, [64] * 200, Costs())
    ideal_s = constant(1.0, 1.0, 0.5, 0.25).ideal_s([64])
    last_s = trace.updates_s[-1] - trace.updates_s[-2]
    assert trace.updates_s[0] == 68.0  # equal shares first
    assert ideal_s <= last_s <= 1.1 * ideal_s
    assert sum(w.samples for w in trace.workers.values()) == 64 * 200


def test_a_worker_may_get_nothing_only_if_allowed() -> None:
    speeds = (1.0, 1.0, 1.0, 1 / 64)
    least = [
        balanced_barrier(steady(*speeds), 4, [64] * 50, Costs(), min_samples=n).workers[3].chunks for n in (0, 1)
    ]
    assert least[0] < 10
    assert least[1] == 50


# ---- table ------------------------------------------------------------------------------------------------


def test_means_of_ratios() -> None:
    mean, error = geometric([0.5, 2.0])
    assert mean == pytest.approx(1.0)
    assert error == pytest.approx(math.log(2.0))  # deviation sqrt(2) ln 2 over sqrt(2) runs
    assert geometric([1.5]) == (pytest.approx(1.5), 0.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.5
    assert spread([7.0]) == 0.0


def test_a_case_builds_the_same_speeds_again_and_others_for_other_seeds() -> None:
    spells = next(case for case in CASES if case.name == "spells")
    one, again, other = spells.build(1), spells.build(1), spells.build(2)
    assert [one.done(r, 9.0) for r in range(4)] == [again.done(r, 9.0) for r in range(4)]
    assert [one.done(r, 9.0) for r in range(4)] != [other.done(r, 9.0) for r in range(4)]
    assert one.ideal_s([BATCH] * 660) > CASES[0].build(1).ideal_s([BATCH] * 660)


def test_contenders_have_names_of_their_own_and_one_case_is_held_out() -> None:
    assert len({c.name for c in CONTENDERS}) == len(CONTENDERS)
    assert len({c.name for c in CASES}) == len(CASES)
    assert [c.name for c in CASES if c.held_out] == ["spells on 1:1:1/2:1/4"]
