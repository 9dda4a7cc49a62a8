"""The parameter server does what one process would: exactness, faults, state. Tiny models, float64, no real waiting."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale import codec as trees
from lightning_hetero.stale.compress import TopK
from lightning_hetero.stale.flags import PushFlag, ReplyFlag, Word
from lightning_hetero.stale.policy import Asp, Backup, Bsp, Drop, Flexible, Policy
from lightning_hetero.stale.worker import RemoteFailureError, Worker
from lightning_hetero.transport.base import Ask, Reply, Request, Say
from tests.ranks.stale_kit import Script, Setting, Trainee, automatic, ends_of, spans, threads

SAMPLES, BATCH, EPOCHS = 26, 6, 2
ENDS = ends_of(SAMPLES, BATCH)

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def data(*shape: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, *shape, generator=generator), torch.randn(samples, 2, generator=generator)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)]


def groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = list(model.parameters())
    return [
        torch.optim.AdamW([{"params": [first], "lr": 0.02, "weight_decay": 0.1}, {"params": rest}], lr=0.01)
    ]


def plain(
    model: nn.Module,
    make: Callable[[nn.Module], Sequence[torch.optim.Optimizer]],
    x: Tensor,
    y: Tensor,
    loss: Loss = mse,
    *,
    ends: Sequence[int] = ENDS,
    accumulate: int = 1,
    clip: float | None = None,
    before: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
) -> nn.Module:
    """Trains a copy in this process on whole batches, in order."""
    model = copy.deepcopy(model)
    (optimizer,) = make(model)
    for epoch in range(EPOCHS):
        for tick, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            before(optimizer, epoch * len(ends) + tick)
            if tick % accumulate == 0:
                optimizer.zero_grad()
            (loss(model, x[start:end], y[start:end]) / accumulate).backward()
            if (tick + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
    return model


def epochs(trainee: Trainee) -> None:
    for epoch in range(EPOCHS):
        trainee.epoch(epoch, ENDS)
        trainee.worker.meet(epoch, "epoch ends")


def differ(a: nn.Module, b: nn.Module) -> float:
    one, other = a.state_dict(), b.state_dict()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


def equal_speed(rank: int, samples: int, now_s: float) -> float:
    return 1.0 + samples


# ---- as one process ---------------------------------------------------------------------------------------------


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
    assert setting.server.meters.staleness == {0: EPOCHS * SAMPLES}
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


def test_the_clip_callable_runs_before_each_step_with_the_global_gradient() -> None:
    x, y = data(5)
    model = mlp()
    setting = Setting(
        model,
        sgd,
        Bsp(),
        3,
        clip=lambda index: void(nn.utils.clip_grad_norm_(setting.model.parameters(), 0.3)),
    )
    Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=equal_speed).run()
    assert differ(plain(model, sgd, x, y, clip=0.3), setting.model) <= 1e-12


def void(value: object) -> None:
    """For lambdas that return nothing."""


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


# ---- manual optimization: sub-steps -----------------------------------------------------------------------------


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


# ---- whatever the timing: what the coordinator decided is what was computed ------------------------------------


def replay(setting: Setting, script: Script, x: Tensor, y: Tensor, *, compensation: float = 0.0) -> nn.Module:
    """Recomputes a run from what the coordinator decided: each contribution at the parameters of its base."""
    model = copy.deepcopy(setting.initial)
    (optimizer,) = setting.make(model)
    positions = {lease: some for t in script.trainees for lease, _, some in t.log}
    history = [copy.deepcopy(model)]
    for updated in setting.coordinator.updates:
        optimizer.zero_grad()
        for c in updated.contributions:
            base = history[updated.version - 1 - c.staleness]
            base.zero_grad()
            mse(base, x[positions[c.lease][: c.samples]], y[positions[c.lease][: c.samples]]).backward()
            scale = setting.coordinator.policy.scale(c.staleness, 3) * c.samples / updated.samples
            for p, q in zip(model.parameters(), base.parameters(), strict=True):
                g = q.grad
                if g is None:
                    continue
                g = g + compensation * g * g * (p - q).detach()
                p.grad = scale * g if p.grad is None else p.grad + scale * g
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = lr * updated.worth
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr
        history.append(copy.deepcopy(model))
    return model


def unequal(rank: int, samples: int, now_s: float) -> float:
    spell = 6.0 if rank == 1 and 12.0 < now_s < 40.0 else 1.0
    return (0.5 + samples) * (1.0, 1.3, 3.0)[rank] * spell


@pytest.mark.parametrize(
    "policy",
    [Flexible(), Flexible(grace=0.0), Asp(), Asp(damping="dynsgd"), Drop(bound=3), Backup(spares=1)],
    ids=str,
)
def test_uneven_speeds_compute_what_was_decided(policy: Policy) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3)
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal).run()
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12
    assert sum(u.ends_tick for u in setting.coordinator.updates) == EPOCHS * len(ENDS)
    if policy.claims_every_sample:
        assert sum(u.samples for u in setting.coordinator.updates) == EPOCHS * SAMPLES
    if not isinstance(policy, Backup):
        assert setting.server.meters.staleness.keys() - {0}, "the script was to make something late"
    meters = setting.server.meters
    assert meters.updates == len(setting.coordinator.updates)
    assert sum(meters.staleness.values()) == sum(meters.samples.values())
    assert all(t.words == [1] * (EPOCHS * len(ENDS)) for t in script.trainees)


class Scribbling(Script):
    """As soon as a worker is answered its slot is written again; nothing may be read out of it after that."""

    def reply(self, rank: int, reply: Reply) -> None:
        super().reply(rank, reply)
        self.links[rank].gradient.fill_(255)  # NaN


@pytest.mark.parametrize("policy", [Flexible(), Flexible(grace=0.0), Bsp(), Asp(), Backup(spares=1)], ids=str)
def test_slots_are_read_before_their_workers_are_answered(policy: Policy) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3)
    script = Scribbling(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal).run()
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12


def test_delay_compensation_is_dc_asgd() -> None:
    x, y = data(5)
    policy = Asp(compensation=2.0)
    setting = Setting(mlp(), sgd, policy, 3, compensation=2.0)
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal).run()
    assert differ(replay(setting, script, x, y, compensation=2.0), setting.model) <= 1e-12
    assert differ(replay(setting, script, x, y), setting.model) > 1e-6


def test_asynchronous_policies_step_once_per_accumulation_window() -> None:
    x, y = data(5)
    setting = Setting(mlp(), lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], Asp(), 3)
    ticks: list[bool] = []
    script = Script(setting, automatic(x, y, mse, accumulate=2), epochs, workers=3, work_s=equal_speed)
    optimizer = setting.optimizers[0]
    optimizer.register_step_post_hook(lambda *_: ticks.append(True))
    script.run()
    assert len(ticks) == EPOCHS * (len(ENDS) // 2)
    assert [Word.steps(w) for w in script.trainees[0].words] == [0, 1, 0, 1, 0] * EPOCHS


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_an_accumulated_batch_does_not_depend_on_its_number_of_updates(chunk: int) -> None:
    """Within a window no step is made, so contributions worth a part of a batch add up to the whole gradient."""
    x, y = data(5)
    model = mlp()
    setting = Setting(model, sgd, Asp(chunk=chunk), 1)
    Script(setting, automatic(x, y, mse, accumulate=2, clip=0.2), epochs, workers=1, work_s=equal_speed).run()
    assert setting.coordinator.version > EPOCHS * len(ENDS)
    assert differ(plain(model, sgd, x, y, accumulate=2, clip=0.2), setting.model) <= 1e-12


@pytest.mark.parametrize("make", [sgd, groups, lambda m: [torch.optim.Adam(m.parameters(), lr=0.01)]])
def test_shards_change_nothing(make: Any) -> None:
    x, y = data(5)
    results = []
    for shards in (1, 3):
        setting = Setting(mlp(), make, Flexible(), 3, shards=shards)
        script = Script(setting, automatic(x, y, mse, clip=0.5), epochs, workers=3, work_s=unequal)
        assert len(setting.server._shards) == shards
        script.run()
        results.append(setting)
    one, other = results
    assert differ(one.model, other.model) == 0.0
    for a, b in zip(one.optimizers, other.optimizers, strict=True):
        assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]
    assert [trees.encode(s) for s in one.server._updater.state_dicts()] == [
        trees.encode(s) for s in other.server._updater.state_dicts()
    ]


def test_an_optimizer_nobody_knows_is_not_split() -> None:
    seen: list[int] = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(sum(len(g["params"]) for g in self.param_groups))
            super().step(closure)

    x, y = data(5)
    setting = Setting(mlp(), lambda m: [Own(m.parameters(), lr=0.1)], Bsp(), 1, shards=3)
    Script(setting, automatic(x, y, mse), epochs, workers=1, work_s=equal_speed).run()
    assert seen == [4] * (EPOCHS * len(ENDS))


def test_hyper_parameters_of_the_present_tick_count_not_those_of_late_pushes() -> None:
    x, y = data(5)
    seen: list[float] = []
    setting = Setting(mlp(), lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], Flexible(), 3)
    setting.optimizers[0].register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal)

    def before(trainee: Trainee, epoch: int, tick: int) -> None:
        trainee.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + epoch * len(ENDS) + tick)

    for trainee in script.trainees:
        trainee.before = before
    script.run()
    assert setting.server.meters.staleness.keys() - {0}
    assert seen == [0.1 / (1 + step) for step in range(EPOCHS * len(ENDS))]


# ---- overflow, NaN, faults --------------------------------------------------------------------------------------


def test_an_overflow_anywhere_skips_the_whole_update_and_everybody_knows() -> None:
    x, y = data(5)
    bad_tick = 2

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        mse(trainee.model, x[positions], y[positions]).backward()
        overflow = trainee.rank == 1 and trainee.tick == bad_tick
        if overflow:
            for p in trainee.model.parameters():
                assert p.grad is not None
                p.grad.fill_(math.inf)
        flags = PushFlag.FINAL | (PushFlag.OVERFLOW if overflow else PushFlag(0))
        return trainee.worker.push(flags, steps=1, zeroes=1)

    model = mlp()
    setting = Setting(model, sgd, Bsp(), 3)
    script = Script(setting, step, epochs, workers=3, work_s=equal_speed).run()
    expected, (optimizer,) = (other := copy.deepcopy(model)), sgd(other)
    for _ in range(EPOCHS):
        for tick, (a, b) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
            optimizer.zero_grad()
            mse(expected, x[a:b], y[a:b]).backward()
            if tick != bad_tick:
                optimizer.step()
    assert differ(expected, setting.model) <= 1e-12
    assert setting.coordinator.version == EPOCHS * len(ENDS)
    assert setting.server.meters.overflows == EPOCHS
    word = Word.of(steps=1, overflow=True)
    for trainee in script.trainees:
        assert trainee.words == [word if t == bad_tick else 1 for t in range(len(ENDS))] * EPOCHS


def poisoned(x: Tensor, y: Tensor) -> Callable[[Trainee, Reply, list[int]], Reply]:
    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        mse(trainee.model, x[positions], y[positions]).backward()
        if trainee.rank == 1 and trainee.tick == 2:
            gradient = list(trainee.model.parameters())[2].grad
            assert gradient is not None
            gradient[0, 0] = math.nan
        return trainee.worker.push(steps=1, zeroes=1)

    return step


def test_a_nan_ends_the_run_and_names_worker_batch_and_parameter() -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 3)
    told: dict[int, str] = {}

    def body(trainee: Trainee) -> None:
        try:
            epochs(trainee)
        except RemoteFailureError as error:
            told[trainee.rank] = str(error)
            with pytest.raises(RemoteFailureError, match="worker 1"):  # whoever asks later is told, too
                trainee.worker.meet(99)

    Script(setting, poisoned(x, y), body, workers=3, work_s=equal_speed).run()
    assert told.keys() == {0, 1, 2}
    assert all(
        "worker 1" in t and "batch 2" in t and "'2.weight'" in t and "'skip'" in t for t in told.values()
    )
    assert setting.coordinator.version == 2
    assert all(bool(p.isfinite().all()) for p in setting.model.parameters())


def test_a_nan_may_be_left_out() -> None:
    x, y = data(5)
    model = mlp()
    setting = Setting(model, sgd, Bsp(), 3, nonfinite="skip")
    script = Script(setting, poisoned(x, y), epochs, workers=3, work_s=equal_speed).run()
    expected, (optimizer,) = (other := copy.deepcopy(model)), sgd(other)
    for _ in range(EPOCHS):
        for tick, (a, b) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
            kept = [i for i in range(a, b) if tick != 2 or not a + 2 <= i < a + 4]  # worker 1's third of six
            optimizer.zero_grad()
            mse(expected, x[kept], y[kept]).backward()
            optimizer.step()
    assert differ(expected, setting.model) <= 1e-12
    assert setting.server.meters.discarded == {"nonfinite": 2 * EPOCHS}
    for trainee in script.trainees:
        assert any("worker 1" in text and "'2.weight'" in text for text in trainee.texts)


@pytest.mark.parametrize("policy", [Flexible(), Bsp(), Asp()], ids=str)
def test_the_others_finish_the_epoch_of_a_dead_worker(policy: Policy) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3)
    met: list[Reply] = []

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ENDS)
        met.append(trainee.worker.meet(0))

    script = Script(setting, automatic(x, y, mse), body, workers=3, work_s=equal_speed, kill={2: 4.0}).run()
    applied = [c.lease for u in setting.coordinator.updates for c in u.contributions]
    positions = {lease: some for t in script.trainees for lease, _, some in t.log}
    assert sorted(p for lease in applied for p in positions[lease]) == list(range(SAMPLES))
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12
    assert [(list(m.numbers), m.generation) for m in met] == [([0, 1], 1)] * 2
    for trainee in script.trainees[:2]:
        assert sum("worker 2 is gone (killed)" in text for text in trainee.texts) == 1
    assert setting.server.meters.reissued["its worker is dead"] == 2


@pytest.mark.parametrize(("policy", "reason"), [(Flexible(), None), (Bsp(), "stalled")], ids=str)
def test_a_stopped_workers_late_push_is_refused_politely_and_it_goes_on(
    policy: Policy, reason: str | None
) -> None:
    """Worker 2 stands still from its second chunk on until the others have long begun the next epoch."""
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3, liveness_s=2.0)
    stopped: list[float] = []

    def work_s(rank: int, samples: int, now_s: float) -> float:
        if rank == 2 and now_s > 2.0 and not stopped:
            stopped.append(now_s)
            return 400.0
        return 1.0 + samples

    def body(trainee: Trainee) -> None:
        for epoch in range(4):
            trainee.epoch(epoch, ENDS)

    script = Script(setting, automatic(x, y, mse), body, workers=3, work_s=work_s).run()
    assert len(stopped) == 1
    assert setting.server.meters.discarded["gone"] > 0
    assert (
        reason is None or setting.server.meters.reissued[reason] > 0
    )  # the default issues them a second time
    assert setting.coordinator.version == 4 * len(ENDS)
    assert sum(u.samples for u in setting.coordinator.updates) == 4 * SAMPLES
    assert script.trainees[2].words[: len(ENDS)] == [1] * len(ENDS)
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12


def test_a_failure_is_told_to_everybody() -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 3)
    told: dict[int, str] = {}

    def body(trainee: Trainee) -> None:
        if trainee.rank == 0:
            trainee.worker.abort("disk full in worker zero")
            return
        try:
            epochs(trainee)
        except RemoteFailureError as error:
            told[trainee.rank] = str(error)

    Script(setting, automatic(x, y, mse), body, workers=3, work_s=equal_speed).run()
    assert told.keys() == {1, 2}
    assert all("disk full in worker zero" in text and "worker 0" in text for text in told.values())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ends", ["worker 1", "worker 0", "disagree", "20 samples in 4 batches"]),
        ("layout", ["worker 1", "the server", "model"]),
        ("meeting", ["0 at meeting 7 (a)", "1 at meeting 7 (b)"]),
        ("future", ["worker 1", "batch 3", "the server in 0"]),
        ("optimizer", ["worker 1", "[4] of 1"]),
        ("weight", ["worker 1", "weight=nan"]),
        ("samples", ["worker 1", "samples=99"]),
    ],
)
def test_confused_workers_end_the_run_with_a_reason(what: str, words: list[str]) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 2)
    told: dict[int, str] = {}

    def wrong(trainee: Trainee) -> None:
        worker = trainee.worker
        odd = trainee.rank == 1
        if what == "layout" and odd:
            object.__setattr__(worker, "layout", copy.copy(worker.layout))
            object.__setattr__(worker.layout, "digest", "another")
        worker.begin_epoch(0, ends_of(20, 5) if what == "ends" and odd else ENDS)
        if what == "meeting":
            worker.meet(7, "ab"[trainee.rank])
        reply = worker.claim(0, 3 if what == "future" and odd else 0)
        worker.pull()
        positions = spans(reply.numbers)
        mse(trainee.model, x[positions], y[positions]).backward()
        options: dict[str, Any] = {}
        if odd:
            cases = {"optimizer": {"steps": 16}, "weight": {"weight": math.nan}, "samples": {"samples": 99}}
            options = cases.get(what, {})
        worker.push(**options)

    def body(trainee: Trainee) -> None:
        try:
            wrong(trainee)
            trainee.worker.meet(0)
        except RemoteFailureError as error:
            told[trainee.rank] = str(error)

    Script(setting, automatic(x, y, mse), body, workers=2, work_s=equal_speed).run()
    assert told.keys() == {0, 1}
    assert all(word in text for text in told.values() for word in words), told


def test_a_torn_push_is_discarded_and_its_samples_are_granted_again() -> None:
    x, y = data(5)
    torn: list[int] = []

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        mse(trainee.model, x[positions], y[positions]).backward()
        if trainee.rank == 1 and not torn:
            torn.append(grant.lease)
            request = Request(kind=Ask.PUSH, lease=grant.lease, samples=len(positions), flags=1, slot=12345)
            return trainee.worker._granted(trainee.worker.link.call(request))
        return trainee.worker.push(steps=1, zeroes=1)

    setting = Setting(mlp(), sgd, Flexible(), 2)
    Script(setting, step, epochs, workers=2, work_s=equal_speed).run()
    assert setting.server.meters.discarded["torn"] > 0
    assert sum(u.samples for u in setting.coordinator.updates) == EPOCHS * SAMPLES
    assert torn[0] not in [c.lease for u in setting.coordinator.updates for c in u.contributions]


def test_a_worker_that_comes_again_takes_part() -> None:
    """Dead in the first epoch, back in the second; the transport tells `Joined` again."""
    x, y = data(5)
    setting = Setting(mlp(), sgd, Flexible(), 2)
    generations: list[int] = []

    def body(trainee: Trainee) -> None:
        for epoch in range(EPOCHS):
            trainee.epoch(epoch, ENDS)
            generations.append(trainee.worker.meet(epoch).generation)

    script = Script(setting, automatic(x, y, mse), body, workers=2, work_s=equal_speed)
    server, members = script.server, script.server._members
    script.run()
    assert generations == [0] * 4
    assert members.generation == 0 and server.finished
    members.joined(5)
    assert members.generation == 1 and not server.finished
    members.gone(5, "killed")
    assert members.generation == 2 and server.finished


# ---- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, groups])
def test_a_fresh_server_goes_on_bit_by_bit_from_the_state(make: Any) -> None:
    x, y = data(5)
    states: list[Any] = []

    def first(trainee: Trainee) -> None:
        epochs(trainee)
        states.append(trainee.worker.state())
        trainee.epoch(2, ENDS)

    whole = Setting(mlp(), make, Bsp(), 1)
    Script(whole, automatic(x, y, mse), first, workers=1, work_s=equal_speed).run()
    (state,) = states
    assert state["version"] == EPOCHS * len(ENDS) == state["coordinator"]["version"]
    assert state["metrics"]["updates"] == state["version"]

    half = Setting(mlp(), make, Bsp(), 1)
    Script(half, automatic(x, y, mse), epochs, workers=1, work_s=equal_speed).run()
    rest = Setting(half.model, make, Bsp(), 1)
    script = Script(rest, automatic(x, y, mse), lambda t: t.epoch(2, ENDS), workers=1, work_s=equal_speed)
    script.server.load_state(trees.decode(trees.encode(state)))
    script.run()
    assert rest.coordinator.version == 3 * len(ENDS)
    assert differ(whole.model, rest.model) == 0.0
    assert trees.encode(whole.optimizers[0].state_dict()) == trees.encode(rest.optimizers[0].state_dict())


def test_an_epoch_is_resumed_in_the_middle() -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 2, ahead=1)
    replies: dict[int, tuple[int, ...]] = {}

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ENDS, tick=2, applied=[(0, 12)])
        trainee.worker.meet(0)
        replies[trainee.rank] = tuple(trainee.worker.begin_epoch(1, ENDS, tick=2, applied=[(0, 12)]).numbers)

    script = Script(setting, automatic(x, y, mse), body, workers=2, work_s=equal_speed).run()
    assert sorted(p for t in script.trainees for _, _, some in t.log for p in some) == list(
        range(12, SAMPLES)
    )
    assert setting.coordinator.version == len(ENDS) - 2
    assert script.trainees[0].words == [1] * (len(ENDS) - 2)
    assert {rank: numbers[:2] for rank, numbers in replies.items()} == {
        0: (12, 15),
        1: (15, 18),
    }  # worth fetching


def test_trees_of_plain_values_and_tensors_survive() -> None:
    adam = torch.optim.Adam([p := nn.Parameter(torch.randn(3, 4))])
    p.grad = torch.ones_like(p)
    adam.step()
    tree = {
        "optimizer": adam.state_dict(),
        1: (1, 2.5, -math.inf, 1e-300, 2**70, True, None, "ü"),
        None: [torch.tensor(7), torch.zeros(0, 3), torch.tensor([True, False]), torch.ones(2, 2).bfloat16()],
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "empty": [{}, [], ()],
        1.5: {True: torch.tensor(1j)},
    }
    again = trees.decode(trees.encode(tree))
    assert repr(again) == repr(tree)
    assert again["strided"].is_contiguous()
    assert type(again[1]) is tuple and math.isnan(trees.decode(trees.encode(math.nan)))


@pytest.mark.parametrize("bad", [object(), {1: {2: object()}}, [torch.nn.Linear], {(1, 2): 3}, {1, 2}])
def test_what_is_not_plain_is_not_encoded(bad: Any) -> None:
    with pytest.raises(TypeError):
        trees.encode(bad)


def test_damaged_trees_are_refused() -> None:
    good = trees.encode({"a": torch.arange(20), "b": [1]})
    for bad in (b"", good[:7], b"X" + good[1:], good[:-100], good[:20], good.replace(b"int64", b"int63")):
        with pytest.raises(ValueError, match="not an encoded tree"):
            trees.decode(bad)


# ---- arguments --------------------------------------------------------------------------------------------------


class _Nowhere:
    def publish(self, version: int, parameters: Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nonfinite": "ignore"}, "ignore.*'stop' or 'skip'"),
        ({"compensation": -1.0}, "-1.0.*>= 0"),
        ({"shards": 0}, "shards=0.*>= 1"),
        ({"divide_by": 0.0}, "divide_by=0.0"),
        ({"codec": TopK(0.5)}, "TopK.*layout"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], words: str) -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1)
    setting.codec = options.pop("codec", setting.codec)
    setting.options = options
    with pytest.raises(ValueError, match=words):
        setting.serve_on(_Nowhere())  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_run_in_the_server_are_refused(cls: Any) -> None:
    setting = Setting(mlp(), lambda m: [cls(m.parameters())], Bsp(), 1)
    with pytest.raises(ValueError, match=f"{cls.__name__}.*parameter server.*ddp"):
        setting.serve_on(_Nowhere())  # type: ignore[arg-type]


def test_optimizers_must_update_the_area() -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1)
    setting.optimizers = sgd(mlp())
    with pytest.raises(ValueError, match=r"'0\.weight'.*adopt"):
        setting.serve_on(_Nowhere())  # type: ignore[arg-type]


def test_a_new_parameter_group_is_refused_at_the_worker() -> None:
    model = mlp()
    setting = Setting(model, sgd, Bsp(), 1)

    def body(trainee: Trainee) -> None:
        worker: Worker = trainee.worker
        worker.begin_epoch(0, ENDS)
        worker.claim(0, 0)
        trainee.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match=r"param_group.*configure_optimizers"):
            worker.push(steps=1)

    x, y = data(5)
    Script(setting, automatic(x, y, mse), body, workers=1, work_s=equal_speed).run()
