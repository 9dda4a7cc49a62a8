"""Manual optimization on the parameter server: several pushes in one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Policy
from lightning_hetero.transport.base import Reply, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag
from tests.ranks.stale.kit import Script, Setting, Trainee
from tests.ranks.stale.reference import (
    ENDS,
    EPOCHS,
    data,
    differ,
    epochs,
    equal_speed,
    mse,
)

pytestmark = pytest.mark.usefixtures("float64")


class Two(nn.Module):
    """A generator and a discriminator, as far as the optimizers are concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.g(x)))


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model.g.parameters(), lr=0.05),
        torch.optim.SGD(model.d.parameters(), lr=0.1, momentum=0.9),
    ]


def adversary(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return -(model(x) - y).abs().mean() + model(x).square().mean()


def gan_plain(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    g, d = two_optimizers(model)
    for _ in range(EPOCHS):
        for tick, (a, b) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
            g.zero_grad()
            mse(model, x[a:b], y[a:b]).backward()  # leaves gradients at d, too
            g.step()
            if tick % 2 == 0:  # else the generator's loss stays in d's gradient
                d.zero_grad()
            adversary(model, x[a:b], y[a:b]).backward()
            nn.utils.clip_grad_norm_(d_of(model), 0.2)
            d.step()
    return model


def d_of(model: Any) -> list[nn.Parameter]:
    return list(model.d.parameters())


def gan_step(x: Tensor, y: Tensor) -> Callable[[Trainee, Reply, list[int]], Reply]:
    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        worker, a, b = trainee.worker, x[positions], y[positions]
        mse(trainee.model, a, b).backward()
        applied = worker.push(PushFlag(0), steps=0b01, zeroes=0b01)
        assert applied.kind is Say.APPLIED
        worker.pull()
        adversary(trainee.model, a, b).backward()
        worker.clip(1, 0.2)
        return worker.push(PushFlag.FINAL, steps=0b10, zeroes=0b10 if trainee.tick % 2 == 0 else 0)

    return step


@pytest.mark.parametrize(
    ("policy", "workers"), [(Flexible(), 1), (Bsp(), 3), (Flexible(grace=0.5), 3), (Asp(), 1)], ids=str
)
def test_two_optimizers_that_take_turns(policy: Policy, workers: int) -> None:
    torch.manual_seed(0)
    model = Two()
    x, y = data(5)
    setting = Setting(model, two_optimizers, policy, workers)
    script = Script(setting, gan_step(x, y), epochs, workers=workers, work_s=equal_speed).run()
    assert differ(gan_plain(model, x, y), setting.model) <= 1e-12
    assert all(t.words == [2] * (EPOCHS * len(ENDS)) for t in script.trainees)


def test_a_worker_waits_for_a_substep_no_longer_than_the_grace() -> None:
    """Worker 1 becomes eight times slower: the others get their answer after the grace, not after worker 1."""
    x, y = data(5)
    waits: list[tuple[float, int]] = []
    setting = Setting(Two(), two_optimizers, Flexible(grace=0.25), 3)

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        mse(trainee.model, x[positions], y[positions]).backward()
        asked_s = script.now_s + (script.work_s(trainee.rank, len(positions), script.now_s))
        limit_s = 0.25 * setting.coordinator.step_s
        reply = trainee.worker.push(PushFlag(0), steps=1, zeroes=1)
        if trainee.rank != 1:
            waits.append((script.now_s - asked_s, int(script.now_s - asked_s <= limit_s + 1e-9)))
            assert reply.flags in (0, ReplyFlag.CHANGED)
        trainee.worker.pull()
        mse(trainee.model, x[positions], y[positions]).backward()
        return trainee.worker.push(PushFlag.FINAL, steps=2, zeroes=2)

    script = Script(
        setting, step, epochs, workers=3,
        work_s=lambda rank, n, now_s: n * (8.0 if rank == 1 and now_s > 10.0 else 1.0),
    )  # fmt: skip
    script.run()
    assert all(within for _, within in waits)
    assert max(wait_s for wait_s, _ in waits) > 0.0
    assert setting.coordinator.version == EPOCHS * len(ENDS)


def test_a_death_between_substeps_does_not_stop_a_barrier() -> None:
    x, y = data(5)
    setting = Setting(Two(), two_optimizers, Bsp(), 3)
    script = Script(setting, gan_step(x, y), epochs, workers=3, work_s=equal_speed, kill={2: 7.0}).run()
    assert setting.coordinator.version == EPOCHS * len(ENDS)
    for trainee in script.trainees[:2]:
        assert len(trainee.words) == EPOCHS * len(ENDS)
