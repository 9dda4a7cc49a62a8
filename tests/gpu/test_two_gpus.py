"""Ranks with a GPU each: gradients, and the pipeline's activations, go over NCCL, in groups as Lightning makes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWays
from tests.gpu.kit import PRECISIONS, Model, Trained, card_trainer, fit_engine, moved, oracle, weights
from tests.gpu.ranks import run_card_ranks
from tests.ranks.pipeline.kit import WORLD, loaders, pipeline
from tests.ranks.pipeline.variants import Breaks

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="needs NCCL"),
]

NEIGHBOURS = {"1x2": 1, "1x4": 2, "2x2": 1, "2x1": 0}


def over_nccl(rank: int, world: int, name: str, precision: str = "32-true") -> Trained:
    return fit_engine(rank, world, name, precision, backend="nccl")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["balanced", "stale", "federated", "pipeline 1x2", "pipeline 2x1", "pipeline"])
def test_two_ranks(name: str, precision: str) -> None:
    expected = oracle()
    for trained in run_card_ranks(2, over_nccl, name, precision):
        assert trained.on - {"meta"} == {"cuda"}
        assert moved(trained.weights, expected, weights(Model())) <= PRECISIONS[precision]


def test_auto_chooses_by_measuring() -> None:
    for trained in run_card_ranks(2, over_nccl, "auto"):
        assert "without a warm-up" not in trained.choice and trained.strategy != "AutoStrategy"


def connected(rank: int, world: int, plan: str) -> tuple[Trained, list[int]]:
    """Trains, and returns to how many ranks this one has ways of NCCL's."""
    ways: list[int] = []
    original = DirectWays.prepare

    def noted(made: DirectWays, pairs: Sequence[tuple[int, int]]) -> None:
        original(made, pairs)
        ways.append(len(made.by_peer))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DirectWays, "prepare", noted)
        return over_nccl(rank, world, f"pipeline {plan}"), ways


@pytest.mark.parametrize("plan", ["1x2", "1x4", "2x2", "2x1"])
def test_stages_are_connected_as_the_plan_says(plan: str) -> None:
    if torch.cuda.device_count() < WORLD[plan]:
        pytest.skip(f"needs {WORLD[plan]} GPUs")
    expected = oracle()
    for trained, ways in run_card_ranks(WORLD[plan], connected, plan):
        assert moved(trained.weights, expected, weights(Model())) <= PRECISIONS["32-true"]
        assert ways == [NEIGHBOURS[plan]]


def blocking(rank: int, world: int) -> str:
    try:
        over_nccl(rank, world, "pipeline 1x2")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_kernels_that_are_waited_for_train_or_are_refused_with_the_reason() -> None:
    for said in run_card_ranks(2, blocking, timeout_s=60.0, environment={"CUDA_LAUNCH_BLOCKING": "1"}):
        assert said == "trained" or "CUDA_LAUNCH_BLOCKING" in said


def failing(rank: int, world: int) -> str:
    try:
        strategy = pipeline("1x2", process_group_backend="nccl")
        card_trainer(rank, world, strategy, max_steps=-1, max_epochs=2).fit(Breaks(), loaders(None, 8)[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_the_cause_of_a_failure_appears_on_every_rank() -> None:
    found = run_card_ranks(2, failing)
    assert found[0] == "ZeroDivisionError: layer 5 has had enough"
    assert "rank 0 failed: ZeroDivisionError: layer 5 has had enough" in found[1]
