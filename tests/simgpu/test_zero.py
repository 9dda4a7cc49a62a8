"""`UnevenZeroOptimizer` on simulated GPUs, with NCCL's rules: the state is on the cards, and comes back to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_hetero.optim import UnevenZeroOptimizer
from tests.simgpu.harness import run_sim_ranks

CASES: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": False}]


def _each(rank: int, world: int) -> list[tuple[float, set[str], tuple[float, ...]]]:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    found = [_trained(rank, options) for options in CASES]
    dist.destroy_process_group()
    return found


def _trained(rank: int, options: dict[str, Any]) -> tuple[float, set[str], tuple[float, ...]]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 5)).cuda())
    alone = AdamW(models[0].parameters(), **options)
    ours = UnevenZeroOptimizer(models[1].parameters(), AdamW, **options)
    for step in range(6):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).cuda()
        for model, optimizer in zip(models, (alone, ours), strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        if step == 3:
            ours.consolidate_state_dict()
            saved = [ours.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(saved)
            ours = UnevenZeroOptimizer(models[1].parameters(), AdamW, capacities=[3, 1], **options)
            ours.load_state_dict(saved[0])  # type: ignore[arg-type]
    parameters = zip(*(model.parameters() for model in models), strict=True)
    tensors = (v for state in ours.state.values() for v in state.values() if isinstance(v, Tensor))
    off = max(float((a.detach() - b.detach()).abs().max()) for a, b in parameters)
    return off, {str(tensor.device) for tensor in tensors if tensor.ndim}, ours.capacities


def test_weights_are_those_of_the_optimizer_alone() -> None:
    for rank, found in enumerate(run_sim_ranks(2, _each, nccl=True)):
        assert len(found) == len(CASES)
        for off, places, capacities in found:
            assert off < 1e-6
            assert places == {f"cuda:{rank}"}
            assert capacities == (3, 1)
