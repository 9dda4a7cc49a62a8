"""The parameter server does what one process would: updates, clipping, accumulation, buffers, threads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.decide.policy import Bsp, Flexible, Policy
from lightning_hetero.transport.base import Reply
from lightning_hetero.transport.flags import Word
from tests.ranks.stale.kit import Script, Setting, Trainee, automatic, ends_of, threads
from tests.ranks.stale.reference import (
    ENDS,
    EPOCHS,
    SAMPLES,
    data,
    differ,
    epochs,
    equal_speed,
    groups,
    mlp,
    mse,
    plain,
    sgd,
)

pytestmark = pytest.mark.usefixtures("float64")


class Frozen(nn.Module):
    """A frozen parameter, one no batch uses, and one used by some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen, self.rare = (nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.used(x))
        rare = x[:, 0] > 1.0
        if bool(rare.any()):
            hidden = hidden + torch.where(rare[:, None], self.rare(x), torch.zeros_like(hidden))
        return self.head(hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(self.a(x))))


def convolution() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (1 + step) * (i + 1)
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.99)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...], dict[str, Any]]] = {
    "momentum": (mlp, sgd, (5,), {}),
    "adam": (mlp, lambda m: [torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True)], (5,), {}),
    "groups and schedule": (mlp, groups, (5,), {"before": schedule}),
    "clipping": (mlp, sgd, (5,), {"clip": 0.3}),
    "accumulation": (mlp, sgd, (5,), {"accumulate": 2}),
    "accumulation and clipping": (mlp, sgd, (5,), {"accumulate": 2, "clip": 0.1}),
    "frozen and unused": (Frozen, sgd, (5,), {}),
    "tied": (Tied, sgd, (5,), {}),
    "channels last": (convolution, sgd, (3, 4, 4), {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("policy", "workers"), [(Flexible(), 1), (Bsp(), 3), (Flexible(), 3)], ids=str)
def test_training_is_that_of_one_process(case: str, policy: Policy, workers: int) -> None:
    make_model, make, shape, options = CASES[case]
    torch.manual_seed(0)
    model = make_model()
    x, y = data(*shape)
    expected = plain(model, make, x, y, **options)
    step_options = {k: v for k, v in options.items() if k != "before"}
    setting = Setting(model, make, policy, workers)
    script = Script(
        setting, automatic(x, y, mse, **step_options), epochs, workers=workers, work_s=equal_speed
    )
    for trainee in script.trainees:
        if "before" in options:
            trainee.before = lambda t, epoch, tick: options["before"](
                t.optimizers[0], epoch * len(ENDS) + tick
            )
    script.run()
    assert differ(expected, setting.model) <= (0.0 if workers == 1 else 1e-12)
    assert setting.coordinator.version == EPOCHS * len(ENDS)
    assert setting.server.counts.staleness == {0: EPOCHS * SAMPLES}
    per_tick = [int((t + 1) % options.get("accumulate", 1) == 0) for t in range(len(ENDS))]
    for trainee in script.trainees:
        assert [Word.steps(w) for w in trainee.words] == per_tick * EPOCHS
        trainee.worker.pull()
        assert differ(setting.model, trainee.model) == 0.0


@pytest.mark.parametrize(("workers", "policy"), [(1, Flexible()), (3, Bsp())], ids=str)
def test_real_threads_over_a_transport(workers: int, policy: Policy) -> None:
    x, y = data(5)
    model = mlp()
    setting = Setting(model, sgd, policy, workers)
    with threads(setting, automatic(x, y, mse), epochs, workers=workers):
        pass
    assert differ(plain(model, sgd, x, y), setting.model) <= 1e-12
    positions = sorted(p for t in setting.trainees for _, _, some in t.log for p in some)
    assert positions == sorted(list(range(SAMPLES)) * EPOCHS)


def test_a_loss_that_is_a_sum_is_divided_by_the_number_of_devices() -> None:
    def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y, reduction="sum")

    x, y = data(5)
    model = mlp()

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        total(trainee.model, x[positions], y[positions]).backward()
        return trainee.worker.push(weight=1.0, steps=1, zeroes=1)

    setting = Setting(model, sgd, Bsp(), 3, divide_by=3.0)
    Script(setting, step, epochs, workers=3, work_s=equal_speed).run()
    expected = plain(model, sgd, x, y, lambda m, a, b: total(m, a, b) / 3.0)
    assert differ(expected, setting.model) <= 1e-12


def test_weights_other_than_samples() -> None:
    """A loss that is a mean over tokens: contributions count by tokens."""
    x, y = data(5)
    tokens = torch.arange(SAMPLES) % 4
    model = mlp()

    def loss(m: nn.Module, a: Tensor, b: Tensor, n: Tensor) -> Tensor:
        return ((m(a) - b).square().mean(1) * n).sum() / n.sum().clamp(min=1)

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        n = tokens[positions]
        loss(trainee.model, x[positions], y[positions], n).backward()
        return trainee.worker.push(weight=float(n.sum()), steps=1, zeroes=1)

    setting = Setting(model, sgd, Bsp(), 3)
    Script(setting, step, epochs, workers=3, work_s=equal_speed).run()
    expected, (optimizer,) = (other := copy.deepcopy(model)), sgd(other)
    for start, end in zip([0, *ENDS] * EPOCHS, [*ENDS, 0] * EPOCHS, strict=True):
        if end:
            optimizer.zero_grad()
            loss(expected, x[start:end], y[start:end], tokens[start:end]).backward()
            optimizer.step()
    assert differ(expected, setting.model) <= 1e-12


def test_bfloat16_is_pooled_in_float32() -> None:
    x, y = (t.bfloat16() for t in data(5))
    model = mlp().bfloat16()
    expected = plain(model, sgd, x, y)
    one = Setting(model, sgd, Bsp(), 1)
    Script(one, automatic(x, y, mse), epochs, workers=1, work_s=equal_speed).run()
    assert differ(expected, one.model) == 0.0
    three = Setting(model, sgd, Bsp(), 3)
    Script(three, automatic(x, y, mse), epochs, workers=3, work_s=equal_speed).run()
    assert {three.server._updater.spares.take(i).dtype for i in range(4)} == {torch.float32}
    assert 0.0 < differ(expected, three.model) < 0.05


def test_batch_norm_statistics_are_those_of_the_global_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    x, y = data(5)
    setting = Setting(model, sgd, Bsp(), 3)
    ends = ends_of(24, 6)  # so that nobody gets a single sample, of which BatchNorm knows no variance
    Script(setting, automatic(x, y, mse), lambda t: t.epoch(0, ends), workers=3, work_s=equal_speed).run()
    mean, count = torch.zeros(5), 0
    for start, end in zip([0, *ends], ends, strict=False):
        mean = 0.9 * mean + 0.1 * x[start:end].mean(0)
        count += 1
    norm = setting.model[0]  # type: ignore[index]
    assert torch.allclose(norm.running_mean, mean, rtol=0, atol=1e-12)
    assert int(norm.num_batches_tracked) == count
    assert bool((norm.running_var != 1.0).all())


def test_a_buffer_nobody_changes_stays_as_it_is_bit_by_bit() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 2)
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1) + 0.1)
            self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            seen: Any = self.seen
            seen.fill_(True)
            self.total: Any = self.total + 1  # replaces the buffer
            return self.linear(x)

    x, y = data(5)
    model: Any = Masked()
    setting = Setting(model, sgd, Bsp(), 3)
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=equal_speed).run()
    after: Any = setting.model
    assert torch.equal(after.mask, model.mask)
    assert bool(after.seen)
    assert torch.equal(after.total, torch.full((2,), float(EPOCHS * len(ENDS))))
    trainee: Any = script.trainees[1]
    trainee.worker.pull()
    assert torch.equal(trainee.model.total, after.total)
