"""Manual optimization on the parameter server: several pushes in one batch."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stale.policies import Buffered, Drop, Joining, Quorum
from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Policy
from lightning_hetero.transport.base import Reply, Say
from lightning_hetero.transport.flags import PushFlag
from tests.ranks.stale.kit import Script, Setting, Trainee, ends_of
from tests.ranks.stale.reference import ENDS, EPOCHS, data, differ, epochs, equal_speed, mse

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
        for global_step, (a, b) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
            g.zero_grad()
            mse(model, x[a:b], y[a:b]).backward()  # leaves gradients at d, too
            g.step()
            if global_step % 2 == 0:  # else the generator's loss stays in d's gradient
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
        applied = worker.push(PushFlag.MORE, steps=0b01, zeroes=0b01)
        assert applied.kind is Say.APPLIED
        worker.pull()
        adversary(trainee.model, a, b).backward()
        worker.clip(1, 0.2)
        return worker.push(PushFlag.FINAL, steps=0b10, zeroes=0b10 if trainee.global_step % 2 == 0 else 0)

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


def test_a_death_between_substeps_does_not_stop_a_barrier() -> None:
    x, y = data(5)
    setting = Setting(Two(), two_optimizers, Bsp(), 3)
    script = Script(setting, gan_step(x, y), epochs, workers=3, work_s=equal_speed, kill={2: 7.0}).run()
    assert setting.coordinator.version == EPOCHS * len(ENDS)
    for trainee in script.trainees[:2]:
        assert len(trainee.words) == EPOCHS * len(ENDS)


SAMPLES = 24


class Tally(nn.Module):
    """One number per sample and optimizer: a sample that counts in an update is where its gradient is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Parameter(torch.zeros(SAMPLES)), nn.Parameter(torch.zeros(SAMPLES))


class Ledger:
    """How often, and how stale, each sample was applied, per sub-step; see `Tally`.

    Args:
        more: a batch's first push says that another one follows.

    Attributes:
        applied: per optimizer, how often each sample counted.
        staleness: versions that the first optimizer's contributions were old when they were applied.
    """

    def __init__(self, policy: Policy, workers: int, *, more: bool = False) -> None:
        self.first = PushFlag.MORE if more else PushFlag(0)
        self.setting = Setting(Tally(), self._optimizers, policy, workers, liveness_s=30.0)
        self.applied = [Counter[int](), Counter[int]()]
        self.staleness: list[int] = []
        self._base: dict[int, int] = {}
        self._versions = 0
        for index, optimizer in enumerate(self.setting.optimizers):
            optimizer.register_step_pre_hook(lambda o, *_, index=index: self._stepped(index, o))

    @staticmethod
    def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([model.g], lr=1.0), torch.optim.SGD([model.d], lr=1.0)]

    def _stepped(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        if parameter.grad is not None:
            there = parameter.grad.nonzero().flatten().tolist()
            least = min(float(parameter.grad[p]) for p in there)
            self.applied[index].update({p: round(float(parameter.grad[p]) / least) for p in there})
            if index == 0:
                self.staleness += [self._versions - self._base.get(p, self._versions) for p in there]
        self._versions += index

    def step(self, trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        trainee.model.g[positions].mean().backward()
        trainee.worker.push(self.first, steps=0b01, zeroes=0b01)
        trainee.worker.pull()
        trainee.model.d[positions].mean().backward()
        return trainee.worker.push(steps=0b10, zeroes=0b10)

    def run(self, workers: int, **times: Any) -> None:
        """An epoch; ``times`` are `Script`'s."""
        script = Script(
            self.setting, self.step, lambda t: t.epoch(0, ends_of(SAMPLES, 6)), workers=workers, **times
        )  # fmt: skip
        batch, coordinator = self.setting.server._batch, self.setting.coordinator
        add = batch.add_substep

        def noting(rank: int, request: Any, *args: Any, **said: Any) -> Any:
            assignment = coordinator.assignment(rank, request.assignment)
            if assignment is not None and said.get("counts", True):
                self._base.update({p: assignment.base for start, end in assignment.spans for p in range(start, end)})
            return add(rank, request, *args, **said)

        batch.add_substep = noting  # type: ignore[method-assign]
        script.run()

    def check(self, what: object) -> None:
        """Every step counted once for every sample, within the policy's bound."""
        once = dict.fromkeys(range(SAMPLES), 1)
        assert [dict(applied) for applied in self.applied] == [once, once], what
        bound = self.setting.coordinator.policy.claims_bound
        assert bound is None or max(self.staleness) <= bound, what


def troubled(seed: int, workers: int) -> dict[str, Any]:
    """Workers that are now and then slow, before a sub-step or behind it, and die."""
    draw = random.Random(seed)
    return {
        "work_s": lambda rank, n, now_s: n * draw.uniform(0.8, 1.2) * draw.choice([1.0, 1.0, 1.0, 6.0]),
        "rest_s": lambda rank, now_s: draw.choice([0.0, 1.0, 1.0, 20.0]),
        "kill": {rank: draw.uniform(0.0, 60.0) for rank in range(1, workers) if draw.random() < 0.3},
    }


# A sum tells which samples are in it, a corrected mean does not: so these policies join.
@pytest.mark.parametrize("slow_s", [3.0, 12.0, 18.0, 27.0])
def test_a_late_step_counts_once_and_never_beyond_the_bound(slow_s: float) -> None:
    """A worker's first batch takes so long; the others top up, and have their next steps without it."""
    ledger = Ledger(Joining(bound=1), 3)
    ledger.run(
        3, work_s=lambda rank, n, now_s: slow_s if rank == 2 and now_s < 1.0 else float(n), rest_s=lambda *_: 3.0
    )  # fmt: skip
    ledger.check(slow_s)


@pytest.mark.parametrize("more", [False, True])
def test_a_step_that_others_build_on_waits_for_all(more: bool) -> None:
    """A worker is slow with its first step of a batch: without a word that more follow, the others go on without it."""
    ledger = Ledger(Joining(bound=2), 3, more=more)
    ledger.run(3, work_s=lambda rank, n, now_s: 20.0 if rank == 2 else float(n), rest_s=lambda *_: 3.0)
    ledger.check(more)
    assert (max(ledger.staleness) == 0) == more


@pytest.mark.parametrize(
    "policy",
    [Joining(bound=0), Joining(bound=1), Joining(bound=2, grace=0.5), Bsp(), Asp(), Drop(bound=1),
     Buffered(k=2), Quorum(quorum=1)],
    ids=str,
)
@pytest.mark.short("Joining(bound=2, grace=0.5)", "Bsp()")
def test_every_step_counts_once_for_every_sample_and_within_the_bound(policy: Policy) -> None:
    """Also where a batch's last push comes too late, or never, and others compute its samples again."""
    reissued = 0
    for seed in range(12):
        ledger = Ledger(policy, 3, more=bool(seed % 2))
        ledger.run(3, **troubled(seed, 3))
        ledger.check(seed)
        reissued += sum(ledger.setting.server.counts.reissued.values())
    assert reissued


def test_what_counts_already_is_known_to_a_server_that_goes_on_from_the_state() -> None:
    """A worker was too late with its last push when the checkpoint was made: its sub-step is in the parameters."""
    ledger = Ledger(Bsp(), 1)
    ledger.applied[0].update(range(6, 9))
    coordinator = ledger.setting.coordinator
    before = Ledger(Bsp(), 2).setting.coordinator
    before.begin(0, ends_of(SAMPLES, 6), now=0.0)
    for start in (0, 3, 6):
        assert before.ledger.first(0, [(start, start + 3)])
    coordinator.load_state_dict(before.state_dict())
    applied = [(0, 6)]
    Script(
        ledger.setting, ledger.step, lambda t: t.epoch(0, ends_of(SAMPLES, 6), global_step=1, applied=applied),
        workers=1,
        work_s=equal_speed,
    ).run()  # fmt: skip
    rest = dict.fromkeys(range(6, SAMPLES), 1)
    assert [dict(sorted(applied.items())) for applied in ledger.applied] == [rest, rest]
