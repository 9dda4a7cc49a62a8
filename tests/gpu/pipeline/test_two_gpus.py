"""The pipeline engine on GPUs of their own: activations and gradients go over NCCL. Skipped with fewer than two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_hetero.pipeline.fit import place
from lightning_hetero.pipeline.runtime.execute.links.direct_ways import DirectWays
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import regression, single, weights
from tests.ranks.pipeline.kit import WORLD, Deep, loaders, pipeline
from tests.ranks.pipeline.variants import Breaks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def trainer_of(rank: int, world: int, strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="gpu",
        devices=world,
        strategy=strategy,
        plugins=[RankEnvironment(rank, world)],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def trained(rank: int, world: int, plan: str) -> Any:
    connected: list[int] = []
    original = place.DirectWays

    def noted(pairs: Any, **options: Any) -> DirectWays:
        ways = original(pairs, **options)
        connected.append(len(ways.by_peer))
        return ways

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(place, "DirectWays", noted)
        module = Deep()
        trainer_of(rank, world, pipeline(plan, process_group_backend="nccl")).fit(module, *loaders(None, 16 // world))
    return weights(module), connected


@pytest.mark.parametrize("plan", ["1x2", "1x4", "2x2", "2x1"])
def test_stages_on_gpus_of_their_own_train_the_weights_of_one_process(plan: str) -> None:
    if torch.cuda.device_count() < WORLD[plan]:
        pytest.skip(f"needs {WORLD[plan]} GPUs")
    module = Deep()
    single(module, regression(400), 16, max_epochs=2)
    neighbours = {"1x2": 1, "1x4": 2, "2x2": 1, "2x1": 0}[plan]
    for found, connected in run_ranks(WORLD[plan], trained, plan, timeout_s=300.0):
        assert found.distance(weights(module)) <= 1e-10
        assert connected == [neighbours]


def failing(rank: int, world: int) -> str:
    try:
        strategy = pipeline("1x2", process_group_backend="nccl")
        trainer_of(rank, world, strategy).fit(Breaks(), *loaders(None, 8))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_the_cause_of_a_failure_appears_on_every_rank() -> None:
    found = run_ranks(2, failing, timeout_s=120.0)
    assert found[0] == "ZeroDivisionError: layer 5 has had enough"
    assert "rank 0 failed: ZeroDivisionError: layer 5 has had enough" in found[1]
