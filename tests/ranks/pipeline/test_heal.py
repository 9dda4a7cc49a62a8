"""A plan that was made from wrong speeds or layers heals within ten batches, and again when speeds or links change."""

from __future__ import annotations

import time
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.pipeline.fit import place
from lightning_hetero.pipeline.fit.wires import Emulation
from lightning_hetero.pipeline.runtime.execute.pace import SlowClock
from lightning_hetero.types import AffineCost, Cluster, Device, LayerCost, Link, ModelCost
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES, rank_trainer
from tests.ranks.pipeline.kit import LAYERS, WIDTH, Deep, pipeline

SAMPLES, TURN, BATCHES = 16, 11, 30
SAMPLE_S = 8e-4  # of a layer, on the fast rank; more than the noise of a busy machine
LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
WRONG = Cluster(devices=(Device(name="slow", speed=0.2), Device(name="fast")), links=((LINK,) * 2,) * 2)


class Sleepy(nn.Linear):
    """Rank 1 takes five times as long, from the twelfth batch on rank 0: nothing that a probe could see."""

    batches = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(SAMPLE_S * len(x) * self.slowness())
        return super().forward(x).tanh()

    @staticmethod
    def slowness() -> float:
        return 5.0 if torch.distributed.get_rank() == int(Sleepy.batches < TURN) else 1.0


class Equal(Sleepy):
    """On equal ranks."""

    @staticmethod
    def slowness() -> float:
        return 1.0


class Slowed(Deep):
    def __init__(self, layer: type[Sleepy] = Sleepy) -> None:
        self._layer = layer
        super().__init__(torch.float32)
        self.plans: list[Any] = []
        Sleepy.batches = 0

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(self._layer(WIDTH, WIDTH) for _ in range(LAYERS)))

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


def trained(rank: int, world: int, module: Slowed, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    data = TensorDataset(torch.randn(SAMPLES * BATCHES, FEATURES), torch.randn(SAMPLES * BATCHES, 1))
    strategy = pipeline(None, **options)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=SAMPLES // world))
    return module.plans, strategy.replans


def job(rank: int, world: int, options: dict[str, Any]) -> tuple[list[list[float]], list[Any]]:
    plans, replans = trained(rank, world, Slowed(), options)
    return [parts(plan) for plan in plans], replans


@pytest.mark.parametrize("options", [{"max_groups": 1}, {"cluster": WRONG}], ids=["layers move", "wrong cluster"])
def test_it_heals_by_itself(options: dict[str, Any]) -> None:
    found = run_ranks(2, job, options, timeout_s=100.0)
    assert found[0] == found[1], "the same plans, and the same record of them, on all ranks"
    work, replans = found[0]
    assert len(work) == BATCHES
    assert work[9][0] > 1.9 * work[9][1], "rank 0 does at least twice as much after ten batches"
    assert work[-1][1] > 1.9 * work[-1][0], "and rank 1, fifteen batches after the speeds were exchanged"
    assert all(r.step > 0 and r.reason for r in replans)
    if "max_groups" in options:
        assert any(r.kind == "plan" and r.bytes > 0 and r.pause_s > 0 for r in replans)
    assert any((r.realised_gain or 0.0) > 0.1 for r in replans)


def kept(rank: int, world: int) -> tuple[int, list[Any]]:
    work, replans = job(rank, world, {"controller": None, "cluster": WRONG})
    return len({tuple(each) for each in work}), replans


def test_without_a_controller_the_first_plan_stays() -> None:
    assert run_ranks(2, kept) == [(1, [])] * 2


# ---- a link that gets slow -------------------------------------------------------------------------------------------

FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
SLEEP = AffineCost(fixed_s=0.0, per_sample_s=SAMPLE_S)
COST = LayerCost(name="", forward=SLEEP, backward=FREE, output_bytes=4.0 * WIDTH)
ENDS = LayerCost(name="", forward=FREE, backward=FREE)
ALIKE = ModelCost(layers=(COST,) * LAYERS, before=ENDS, head=ENDS)
WIRE = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-3)  # more than what surrounds a message on a busy machine
EQUAL = Cluster(devices=(Device(name="a"), Device(name="b")), links=((WIRE,) * 2,) * 2)


class Jammed:
    """From the twelfth batch on each message takes 20 ms."""

    bandwidth_bytes_per_s = WIRE.bandwidth_bytes_per_s

    @property
    def latency_s(self) -> float:
        return WIRE.latency_s * (1.0 if Sleepy.batches < TURN else 20.0)


class OverJammed(Emulation):
    def clock(self, peer: int) -> Any:
        return SlowClock(cast(Link, Jammed()), lambda: None)


def jammed(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    options = {"profile": ALIKE, "cluster": EQUAL, "max_groups": 1, "emulate_links": True}
    with mock.patch.object(place, "Emulation", OverJammed):
        plans, replans = trained(rank, world, Slowed(Equal), options)
    return [plan.groups for plan in plans], replans


def test_a_link_that_gets_slow_is_not_used_any_more() -> None:
    for _ in range(3):  # a rank that the machine stopped for a while is answered, too: then once more
        (groups, replans), (_, same) = run_ranks(2, jammed, timeout_s=100.0)
        assert replans == same
        if all(r.step >= TURN for r in replans):
            break
    assert len(groups[TURN - 1][0].ranks) == 2
    assert all(len(g[0].ranks) == 1 for g in groups[TURN + 15 :]), [[g[0].ranks for g in groups], replans]
    reasons = [r.reason for r in replans if r.kind == "plan" and r.step >= TURN]
    assert any("link 0 -> 1 takes" in each or "link 1 -> 0 takes" in each for each in reasons), reasons
