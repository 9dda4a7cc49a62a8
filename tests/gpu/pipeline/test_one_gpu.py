"""The pipeline engine on one GPU: stages as processes that share it, messages through pinned host memory over gloo.

And a model that is larger than the memory a process may use: it is planned layer by layer.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.pipeline.fit import planning
from lightning_hetero.pipeline.runtime.measure.layers import profile_on_device
from lightning_hetero.pipeline.runtime.step.layer_calls.route import PLAIN
from lightning_hetero.types import AffineCost, LayerCost
from tests.gpu.kit import SIMULATED, card_trainer, of_kernels, weights
from tests.gpu.ranks import run_card_ranks
from tests.ranks.kit import Weights, regression, single
from tests.ranks.pipeline.kit import PLANS, WIDTH, WORLD, Deep, loaders, pipeline
from tests.ranks.pipeline.replan_kit import Scripted


def trained(rank: int, world: int, plan: str, script: dict[int, Any] | None = None) -> Weights:
    strategy = pipeline(plan, controller=None if script is None else Scripted(script))
    trainer = card_trainer(rank, world, strategy, max_steps=-1, max_epochs=2)
    module = Deep()
    trainer.fit(module, loaders(regression(400), 16 // world)[0])
    if script is not None:
        assert [r.bytes > 0 for r in strategy.replans] == [True, False, True]  # in 2x1 each rank has all layers
        report = strategy.step_report()
        assert report is None or all(record.compute_s > 0 for record in report.records)
    return weights(module)


def test_layers_move_between_processes_that_share_a_gpu() -> None:
    module = Deep()
    single(module, regression(400), 16, max_epochs=2)
    script = {2: PLANS["2x1"], 9: PLANS["1x2"], 30: PLANS["2x1"]}
    for found in run_card_ranks(2, trained, "1x2", script):
        assert found.distance(weights(module)) <= 1e-10


@pytest.mark.parametrize("plan", ["1x2", "1x4", "2x2"])
def test_stages_that_share_a_gpu_train_the_weights_of_one_process(plan: str) -> None:
    module = Deep()
    single(module, regression(400), 16, max_epochs=2)
    for found in run_card_ranks(WORLD[plan], trained, plan):
        assert found.distance(weights(module)) <= 1e-10  # kernels differ from the CPU's in the last bits


@of_kernels
def test_layers_are_profiled_with_events() -> None:
    widths = (4096, 4096, 16384, 4096)  # on less work a fast GPU waits for the host
    layers: list[Any] = [nn.Linear(a, b).cuda() for a, b in itertools.pairwise(widths)]
    x = torch.randn(2048, 4096, device="cuda", requires_grad=True)
    no_time = AffineCost(fixed_s=0.0, per_sample_s=0.0)
    free = LayerCost(name="", forward=no_time, backward=no_time)
    examples = {n: (PLAIN, x[:n].detach().requires_grad_()) for n in (512, 2048)}
    model = profile_on_device(layers, examples, names=list("abc"), before=free, head=free, device=x.device, copies={})
    seconds = [layer.forward.seconds(2048) for layer in model.layers]
    assert all(s > 0 for s in seconds)
    assert seconds[1] > 1.5 * seconds[0]  # four times the work


WIDE = 512 if SIMULATED else 4096
LAYER_BYTES = 4 * WIDE * (WIDE + 1)
WORKSPACE_BYTES = 0 if SIMULATED else 32 * 2**20  # which cuBLAS takes for itself on Hopper; less on others


class Large(Deep):
    """Sixteen layers of 64 MiB each, in float32."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(16)))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = nn.functional.pad(self.before(x), (0, WIDE - WIDTH))
        return nn.functional.mse_loss(self.head(self.model(h)[:, :WIDTH]), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def planned_in_little_memory(rank: int, world: int) -> int:
    """Returns the most memory that planning took on this rank [bytes]."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.reset_peak_memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(12 * LAYER_BYTES / total, device)  # the parameters are 16
    peak: list[int] = []
    measure = planning.measure_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = measure(*args, **kwargs)
        peak.append(torch.cuda.max_memory_allocated(device))
        torch.cuda.set_per_process_memory_fraction(1.0, device)  # the plan is for the devices of `cluster`
        return found

    cluster = {"devices": [{"count": world, "mem": 100 * LAYER_BYTES}], "link": {"bandwidth": "10 GB/s"}}
    strategy = pipeline(None, cluster=cluster, max_groups=1, micro_batch_size=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(planning, "measure_model", watched)
        try:
            trainer = card_trainer(rank, world, strategy, max_steps=0)
            trainer.fit(Large(), loaders(regression(64, dtype=torch.float32), 8)[0])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    return max(peak, default=0)


def test_a_model_larger_than_the_memory_is_planned() -> None:
    peak_bytes, *_ = run_card_ranks(2, planned_in_little_memory)
    assert LAYER_BYTES < peak_bytes - WORKSPACE_BYTES < 4 * LAYER_BYTES  # a layer, its gradient, what is outside
