"""Every engine on simulated GPUs: ten steps are those of one process, whatever carries the messages."""

from __future__ import annotations

import math

import pytest

from tests.simgpu import kit
from tests.simgpu.cases import TOLERANCE, Case, expected, run
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.kit import STEPS

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
FEATURES = ("accumulation", "norm", "validation", "resume")


ALWAYS = [
    Case("ddp"),
    Case("ddp", "nccl", "16-mixed", feature="validation"),
    Case("balanced"),
    Case("balanced", "nccl", "bf16-mixed"),
    Case("balanced", precision="16-mixed", feature="accumulation"),
    Case("stale"),
    Case("stale", "nccl", "16-mixed", feature="validation"),
    Case("federated", "nccl"),
    Case("auto", "nccl"),
    Case("pipeline", plan="1x2", feature="validation"),
    Case("pipeline", "nccl", plan="2x1"),
    Case("pipeline", plan="2x2", world=4),
    Case("pipeline", "nccl", "16-mixed", plan="1x2"),
    Case("pipeline", plan="moves"),
    Case("pipeline", "nccl", plan="1x2", feature="resume"),
    Case("pipeline", plan="1x2", gpus=1),
]


def _all() -> list[Case]:
    cases = []
    for backend in ("gloo", "nccl"):
        for engine in ("ddp", "balanced", "stale", "federated", "auto"):
            precisions = PRECISIONS if engine != "federated" else PRECISIONS[:1]
            cases += [Case(engine, backend, precision) for precision in precisions]
            cases += [Case(engine, backend, feature=feature) for feature in FEATURES]
        for plan in ("1x2", "2x1", "2x2", "", "moves"):
            world = 4 if plan == "2x2" else 2
            cases += [Case("pipeline", backend, precision, plan, world=world) for precision in PRECISIONS]
            features = [feature for feature in FEATURES if feature != "norm"]  # statistics are each stage's own
            cases += [Case("pipeline", backend, plan=plan, feature=feature, world=world) for feature in features]
    cases += [Case(engine, gpus=1) for engine in ("ddp", "balanced", "stale", "federated", "auto")]
    return [case for case in cases if case not in ALWAYS]


PARAMETERS = [pytest.param(case, id=str(case)) for case in ALWAYS]
PARAMETERS += [pytest.param(case, id=str(case), marks=pytest.mark.long) for case in _all()]


@pytest.mark.parametrize("case", PARAMETERS)
def test_ten_steps_are_those_of_one_process(case: Case) -> None:
    tolerance = TOLERANCE[case.precision]
    for found, wanted in zip(run(case), expected(case), strict=True):
        assert found.steps == wanted.steps >= (6 if case.feature == "accumulation" else STEPS)
        assert all(map(math.isfinite, found.losses))
        distance = found.weights.distance(wanted.weights)
        assert distance <= tolerance
        if case.feature == "validation":
            assert found.logged["val"] == pytest.approx(wanted.logged["val"], rel=tolerance)


@pytest.mark.parametrize("plan", ["1x2", pytest.param("2x2", marks=pytest.mark.long)])
def test_stages_train_where_kernels_of_a_device_run_one_after_the_other(plan: str) -> None:
    case = Case("pipeline", "nccl", plan=plan, world=4 if plan == "2x2" else 2)
    for found, wanted in zip(run(case, serial=True), expected(case), strict=True):
        assert found.weights.distance(wanted.weights) <= TOLERANCE[case.precision]


def _stale_as_it_is(rank: int, world: int) -> tuple[kit.Weights, int]:
    module = kit.Plain()
    trainer = kit.trainer_on_gpus(world, kit.strategy_of("stale"))
    kit.fit_quietly(trainer, module, kit.loader(world))
    return kit.host_weights(module), trainer.global_step


def test_stale_trains_with_its_own_policy() -> None:
    """Which gradients come late depends on time: all ranks end with the same weights, near those of one process."""
    (one, steps), (other, _) = run_sim_ranks(2, _stale_as_it_is)
    assert steps == STEPS
    distance = one.distance(kit.oracle(kit.Plain()))
    assert distance < 0.2
    assert one.distance(other) == 0
