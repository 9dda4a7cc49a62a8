"""A plan that was made from wrong speeds heals within ten batches, and again when the speeds change."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.types import Cluster, Device, Link
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES, rank_trainer
from tests.ranks.pipeline.kit import LAYERS, WIDTH, Deep, pipeline

SAMPLES, TURN, BATCHES = 16, 11, 22
SAMPLE_S = 4e-4  # of a layer, on the fast rank; more than the noise of a busy machine
LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
WRONG = Cluster(devices=(Device(name="slow", speed=0.2), Device(name="fast")), links=((LINK,) * 2,) * 2)


class Sleepy(nn.Linear):
    """Rank 1 takes five times as long, from the twelfth batch on rank 0: nothing that a probe could see."""

    batches = 0

    def forward(self, x: Tensor) -> Tensor:
        slow = int(Sleepy.batches < TURN)
        if self.training:
            time.sleep(SAMPLE_S * len(x) * (5.0 if torch.distributed.get_rank() == slow else 1.0))
        return super().forward(x).tanh()


class Slowed(Deep):
    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.plans: list[Any] = []
        Sleepy.batches = 0

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(Sleepy(WIDTH, WIDTH) for _ in range(LAYERS)))

    def on_train_batch_end(self, *args: Any) -> None:
        Sleepy.batches += 1
        self.plans.append(self.trainer.strategy.plan)  # type: ignore[attr-defined]


def parts(plan: Any) -> list[float]:
    """Which part of the work each rank has."""
    work = [0.0, 0.0]
    for group in plan.groups:
        for stage, rank in enumerate(group.ranks):
            work[rank] += group.samples * (group.cuts[stage + 1] - group.cuts[stage]) / (SAMPLES * LAYERS)
    return work


def job(rank: int, world: int, options: dict[str, Any]) -> tuple[list[list[float]], list[Any]]:
    data = TensorDataset(torch.randn(SAMPLES * BATCHES, FEATURES), torch.randn(SAMPLES * BATCHES, 1))
    module, strategy = Slowed(), pipeline(None, **options)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=SAMPLES // world))
    return [parts(plan) for plan in module.plans], strategy.replans


@pytest.mark.parametrize("options", [{"max_groups": 1}, {"cluster": WRONG}], ids=["layers move", "wrong cluster"])
def test_it_heals_by_itself(options: dict[str, Any]) -> None:
    found = run_ranks(2, job, options, timeout_s=100.0)
    assert found[0] == found[1], "the same plans, and the same record of them, on all ranks"
    work, replans = found[0]
    assert len(work) == BATCHES
    assert work[9][0] > 1.9 * work[9][1], "rank 0 does at least twice as much after ten batches"
    assert work[-1][1] > 1.9 * work[-1][0], "and rank 1, ten batches after the speeds were exchanged"
    assert all(r.step > 0 and r.reason for r in replans)
    if "max_groups" in options:
        assert any(r.kind == "plan" and r.bytes > 0 and r.pause_s > 0 for r in replans)
    assert any((r.realised_gain or 0.0) > 0.1 for r in replans)


def kept(rank: int, world: int) -> tuple[int, list[Any]]:
    work, replans = job(rank, world, {"controller": None, "cluster": WRONG})
    return len({tuple(each) for each in work}), replans


def test_without_a_controller_the_first_plan_stays() -> None:
    assert run_ranks(2, kept) == [(1, [])] * 2
