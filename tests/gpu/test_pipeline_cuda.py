"""The pipeline engine on one GPU: stages as processes that share it, messages through pinned host memory over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.pipeline.profile import profile_on_device
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Weights, regression, single, weights
from tests.ranks.pipeline_kit import WORLD, Deep, loaders, pipeline


def trained(rank: int, world: int, plan: str) -> Weights:
    from lightning.pytorch import Trainer

    trainer = Trainer(
        accelerator="gpu",
        devices=[0] * world,
        strategy=pipeline(plan),
        plugins=[RankEnvironment(rank, world)],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Deep()
    trainer.fit(module, *loaders(None, 16 // world))
    return weights(module)


@pytest.mark.parametrize("plan", ["1x2", "1x4", "2x2"])
def test_stages_that_share_a_gpu_train_the_weights_of_one_process(plan: str) -> None:
    module = Deep()
    single(module, regression(400), 16, max_epochs=2)
    for found in run_ranks(WORLD[plan], trained, plan, timeout_s=300.0):
        assert found.distance(weights(module)) <= 1e-10  # kernels differ from the CPU's in the last bits


def test_layers_are_profiled_with_events() -> None:
    layers: list[Any] = [nn.Linear(1024, 1024).cuda(), nn.Linear(1024, 4096).cuda(), nn.Linear(4096, 1024).cuda()]
    model = profile_on_device(layers, torch.randn(512, 1024, device="cuda", requires_grad=True))
    seconds = [layer.forward.seconds(512) for layer in model.layers]
    assert all(s > 0 for s in seconds)
    assert seconds[1] > 1.5 * seconds[0]  # four times the work
