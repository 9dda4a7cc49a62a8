"""The pipeline engine on one GPU: stages as processes that share it, messages through pinned host memory over gloo.

And a model that is larger than the memory a process may use: it is planned layer by layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.pipeline.runtime.measure.layers import profile_on_device
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Weights, regression, single, weights
from tests.ranks.pipeline.kit import PLANS, WIDTH, WORLD, Deep, loaders, pipeline
from tests.ranks.pipeline.replan_kit import Scripted


def trained(rank: int, world: int, plan: str, script: dict[int, Any] | None = None) -> Weights:
    from lightning.pytorch import Trainer

    strategy = pipeline(plan, controller=None if script is None else Scripted(script))
    trainer = Trainer(
        accelerator="gpu",
        devices=[0] * world,
        strategy=strategy,
        plugins=[RankEnvironment(rank, world)],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Deep()
    trainer.fit(module, *loaders(regression(400), 16 // world))
    if script is not None:
        assert [r.bytes > 0 for r in strategy.replans] == [True] * len(script)
        report = trainer.strategy.step_report()
        assert report is None or all(record.compute_s > 0 for record in report.records)
    return weights(module)


def test_layers_move_between_processes_that_share_a_gpu() -> None:
    module = Deep()
    single(module, regression(400), 16, max_epochs=2)
    script = {2: PLANS["2x1"], 9: PLANS["1x2"], 30: PLANS["2x1"]}
    for found in run_ranks(2, trained, "1x2", script, timeout_s=300.0):
        assert found.distance(weights(module)) <= 1e-10


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


class Large(Deep):
    """Sixteen layers of 64 MiB each, in float32."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(16)))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = nn.functional.pad(self.before(x), (0, 4096 - WIDTH))
        return nn.functional.mse_loss(self.head(self.model(h)[:, :WIDTH]), y)


def planned_in_little_memory(rank: int, world: int) -> tuple[int, int]:
    """Returns the most memory that planning took on this rank, and what one layer takes [bytes]."""
    from lightning.pytorch import Trainer

    layer_bytes = 4 * 4096 * 4097
    torch.cuda.set_device(0)
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(12 * layer_bytes / total)  # the parameters are 16
    peak: list[int] = []
    cluster = {"devices": [{"count": world, "mem": 20 * layer_bytes}], "link": {"bandwidth": "10 GB/s"}}

    class Measured(Large):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    from lightning_hetero.pipeline.fit import planning

    measure = planning.measure_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = measure(*args, **kwargs)
        peak.append(torch.cuda.max_memory_allocated())
        return found

    planning.measure_model = watched
    try:
        trainer = Trainer(
            accelerator="gpu",
            devices=[0] * world,
            strategy=pipeline(None, cluster=cluster, max_groups=1, micro_batch_size=4),
            plugins=[RankEnvironment(rank, world)],
            max_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Measured(), *loaders(regression(64, dtype=torch.float32), 8))
    finally:
        planning.measure_model = measure
        torch.cuda.set_per_process_memory_fraction(1.0)
    return max(peak, default=0), layer_bytes


def test_a_model_larger_than_the_memory_is_planned() -> None:
    peaks = run_ranks(2, planned_in_little_memory, timeout_s=300.0)
    peak_bytes, layer_bytes = peaks[0]
    assert layer_bytes < peak_bytes < 4 * layer_bytes  # a layer, its gradient, what is outside
