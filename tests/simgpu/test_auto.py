"""`hetero_auto` on simulated GPUs: the trial is made on the devices, and what it shows decides."""

from __future__ import annotations

import warnings

import pytest

from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks


def chosen(rank: int, world: int, backend: str) -> tuple[str, bool, list[str], kit.Weights]:
    module = kit.Plain()
    strategy = kit.strategy_of("auto", backend, engines=("balanced", "pipeline"))
    trainer = kit.trainer_on_gpus(world, strategy)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, kit.loader(world))
    assert strategy.choice is not None and trainer.global_step == kit.STEPS
    said = [str(one.message) for one in warned if "hetero_auto" in str(one.message)]
    return strategy.choice.line, strategy.choice.plan is not None, said, kit.host_weights(module)


@pytest.mark.parametrize(
    ("world", "gpus", "nccl"),
    [
        (2, 2, False),
        pytest.param(2, 2, True, marks=pytest.mark.long),
        pytest.param(4, 4, False, marks=pytest.mark.long),
        pytest.param(4, 4, True, marks=pytest.mark.long),
        pytest.param(4, 2, False, marks=pytest.mark.long),
    ],
    ids=["2, gloo", "2, NCCL", "4, gloo", "4, NCCL", "4 on 2 cards"],
)
def test_it_measures_chooses_and_trains(world: int, gpus: int, nccl: bool) -> None:
    found = run_sim_ranks(world, chosen, "nccl" if nccl else "gloo", gpus=gpus, nccl=nccl, timeout_s=300.0)
    expected = kit.oracle(kit.Plain())
    for line, measured, warned, trained in found:
        assert measured and not warned and "without a warm-up" not in line
        assert trained.distance(expected) < 1e-6
    assert len({line for line, *_ in found}) == 1
