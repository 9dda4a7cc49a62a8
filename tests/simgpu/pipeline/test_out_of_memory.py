"""A device that is full, on simulated GPUs: every rank ends, and says what happened where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWay
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim.cuda import cap

_CAP, _FULL = 1 << 26, 1 << 30  # bytes that a device has, and that are asked for


class _Needs(torch.autograd.Function):
    """Needs more memory than there is, where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Full) -> Tensor:
        ctx.layer = layer
        if layer.when == "forward":
            torch.empty(_FULL, dtype=torch.uint8, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.layer.when == "backward":
            torch.empty(_FULL, dtype=torch.uint8, device=grad.device)
        return grad.clone(), None


class Full(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.when = layer, ""

    def forward(self, x: Tensor) -> Tensor:
        return _Needs.apply(self.layer(x), self)


class Fills(kit.DeepPlain):
    """From the fourth batch on the device of layer 2 is full when that layer computes, or when something comes."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.model[2] = Full(self.model[2])  # type: ignore[index,operator]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 3:
            self.model[2].when = self.when  # type: ignore[index,union-attr]
            if self.when == "receive" and self.global_rank == 0:
                DirectWay.receive = lambda *_: torch.empty(_FULL, dtype=torch.uint8, device="cuda")  # type: ignore[method-assign]


def _fails(rank: int, world: int, folder: str, plan: str, backend: str, when: str) -> None:
    cap(rank, _CAP)
    strategy = kit.strategy_of("pipeline", backend, plan=plan)
    try:
        kit.fit_quietly(kit.trainer_on_gpus(world, strategy), Fills(when), kit.loader(world))
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("plan", "backend", "when"),
    [
        ("1x2", "nccl", "backward"),
        pytest.param("1x2", "nccl", "receive", marks=pytest.mark.long),
        pytest.param("1x2", "nccl", "forward", marks=pytest.mark.long),
        pytest.param("2x1", "nccl", "backward", marks=pytest.mark.long),
        pytest.param("2x2", "nccl", "backward", marks=pytest.mark.long),
        pytest.param("1x2", "gloo", "backward", marks=pytest.mark.long),
        pytest.param("2x2", "gloo", "forward", marks=pytest.mark.long),
    ],
)
def test_all_ranks_end_with_the_cause(plan: str, backend: str, when: str, tmp_path: Path) -> None:
    world = 4 if plan == "2x2" else 2
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        run_sim_ranks(world, _fails, str(tmp_path), plan, backend, when, nccl=backend == "nccl", timeout_s=60.0)
    found = [(tmp_path / str(rank)).read_text() for rank in range(world)]
    for text in found:
        assert text.startswith("OutOfMemoryError: ") or "failed: OutOfMemoryError: " in text, found
