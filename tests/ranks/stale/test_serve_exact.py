"""The parameter server does what one process would: updates, clipping, accumulation, buffers, threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.decide.policy import Bsp, Flexible, Policy
from lightning_hetero.transport.flags import Word
from tests.ranks.stale.kit import Script, Setting, automatic, threads
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


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (1 + step) * (i + 1)
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.99)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (sgd, {}),
    "groups and schedule": (groups, {"before": schedule}),
    "accumulation and clipping": (sgd, {"accumulate": 2, "clip": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("policy", "workers"), [(Flexible(), 1), (Bsp(), 3), (Flexible(), 3)], ids=str)
def test_training_is_that_of_one_process(case: str, policy: Policy, workers: int) -> None:
    make, options = CASES[case]
    model = mlp()
    x, y = data(5)
    expected = plain(model, make, x, y, **options)
    step_options = {k: v for k, v in options.items() if k != "before"}
    setting = Setting(model, make, policy, workers)
    script = Script(
        setting, automatic(x, y, mse, **step_options), epochs, workers=workers, work_s=equal_speed
    )
    for trainee in script.trainees:
        if "before" in options:
            trainee.before = lambda t, epoch, global_step: options["before"](
                t.optimizers[0], epoch * len(ENDS) + global_step
            )
    script.run()
    assert differ(expected, setting.model) <= (0.0 if workers == 1 else 1e-12)
    assert setting.coordinator.version == EPOCHS * len(ENDS)
    assert setting.server.counts.staleness == {0: EPOCHS * SAMPLES}
    per_step = [int((t + 1) % options.get("accumulate", 1) == 0) for t in range(len(ENDS))]
    for trainee in script.trainees:
        assert [Word.steps(w) for w in trainee.words] == per_step * EPOCHS
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
