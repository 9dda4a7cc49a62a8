"""Checks of the configuration and of gradients, and the verdict, on facts made up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_hetero.doctor.facts import DeviceFacts, Parity
from lightning_hetero.doctor.training import CHECKS, examine, parity, verdict, world_size
from tests.pure.doctor.kit import made_up

pytestmark = pytest.mark.pure
GPU = DeviceFacts(name="a", capability=(8, 0), mem_bytes=1.0, free_bytes=1.0)


def same(engine: str, error: float = 1e-15, problem: str = "") -> Parity:
    return Parity(engine=engine, error=error, problem=problem)


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({}, "ok", "devices: all there are, nodes: 1"),
        ({"devices": (GPU,), "devices_wanted": 2}, "fail", "devices=2, but this machine shows 1 GPUs"),
        ({"devices_wanted": 2, "environ": {"LOCAL_WORLD_SIZE": "4"}}, "fail", "torchrun has started 4 processes"),
        (
            {"devices_wanted": 6, "environ": {"LOCAL_WORLD_SIZE": "6", "WORLD_SIZE": "8"}, "nodes_wanted": 2},
            "warn",
            "WORLD_SIZE=8, but num_nodes=2 nodes of 6 make 12",
        ),
        (
            {"devices_wanted": 4, "environ": {"SLURM_TASKS_PER_NODE": "6,1(x2)"}},
            "fail",
            "SLURM has 6/1/1 tasks per node",
        ),
        ({"devices_wanted": 6, "environ": {"SLURM_TASKS_PER_NODE": "6,1(x2)"}}, "ok", "6 per node"),
    ],
)
def test_the_configuration_against_the_ranks_there_are(facts: dict[str, Any], level: str, words: str) -> None:
    (found,) = world_size(made_up(**facts))
    assert found.level == level and words in found.text and bool(found.advice) == (level != "ok")


def test_gradients() -> None:
    assert parity(made_up()) == []
    good = parity(made_up(parity=(same("one process", 0.0), same("ddp"), same("stale"))))
    assert [(f.check, f.level) for f in good] == [("gradients, ddp", "ok"), ("gradients, stale", "ok")]
    wrong = parity(made_up(parity=(same("one process", 0.0), same("balanced", 0.5))))
    assert wrong[0].level == "fail" and "by 5.0e-01" in wrong[0].text and "loss_reduction='sum'" in wrong[0].advice
    refused = parity(made_up(parity=(same("one process", 0.0), same("pipeline", math.nan, "TypeError: no"))))
    assert refused[0].level == "warn" and refused[0].text == "TypeError: no"
    assert parity(made_up(parity=(same("ddp", math.nan, "no"),)))[0].level == "fail"
    assert parity(made_up(parity=(same("balanced", math.nan),)))[0].level == "fail"


def test_what_draws_random_numbers_or_does_not_train_alone_is_not_compared() -> None:
    (random,) = parity(made_up(parity=(same("one process", 0.3), same("balanced", 0.3))))
    assert random.level == "warn" and "draws random numbers" in random.text
    (broken,) = parity(made_up(parity=(same("one process", math.nan, "KeyError: 'x'"),)))
    assert broken.level == "fail" and "KeyError: 'x'" in broken.text


def test_the_verdict_recommends_what_is_faster_and_right() -> None:
    asked = {"verdict": "strategy=hetero_balanced: 2 times", "gain": 2.0, "engine": "balanced"}
    (found,) = verdict(made_up(**asked, parity=(same("balanced"),)))
    assert found.level == "ok" and "Trainer(strategy='hetero_balanced')" in found.advice
    (doubt,) = verdict(made_up(**asked, parity=(same("balanced", 0.5),)))
    assert doubt.level == "warn" and "gradients above" in doubt.advice
    assert verdict(made_up()) == []
    (stay,) = verdict(made_up(verdict="strategy=ddp: fine", engine="ddp"))
    assert stay.level == "ok" and not stay.advice


def test_examining_runs_every_check_in_order() -> None:
    facts = made_up(verdict="x", parity=(same("one process", 0.0), same("ddp")))
    found = examine(facts)
    assert [f.check for f in found] == [f.check for check in CHECKS for f in check(facts)]
    assert found[-1].check == "verdict" and {"versions", "world size", "fork"} <= {f.check for f in found}
