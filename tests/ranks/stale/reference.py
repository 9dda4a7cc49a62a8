"""A small regression, and what one process makes of it: what a server with workers must come to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.ranks.stale.kit import Script, Setting, Trainee, ends_of

SAMPLES, BATCH, EPOCHS = 26, 6, 2
ENDS = ends_of(SAMPLES, BATCH)

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


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
        for global_step, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            before(optimizer, epoch * len(ends) + global_step)
            if global_step % accumulate == 0:
                optimizer.zero_grad()
            (loss(model, x[start:end], y[start:end]) / accumulate).backward()
            if (global_step + 1) % accumulate == 0:
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


def replay(setting: Setting, script: Script, x: Tensor, y: Tensor) -> nn.Module:
    """Recomputes a run with SGD from what the coordinator decided: each contribution at the parameters of its base."""
    completes = setting.coordinator.policy.completes
    return replay_completing(setting, script, x, y)[0] if completes else replay_joining(setting, script, x, y)


def replay_joining(setting: Setting, script: Script, x: Tensor, y: Tensor) -> nn.Module:
    """The same where late contributions join the mean of the update they come to."""
    model = copy.deepcopy(setting.initial)
    (optimizer,) = setting.make(model)
    positions = {assignment: some for t in script.trainees for assignment, _, some in t.log}
    history = [copy.deepcopy(model)]
    for updated in setting.coordinator.updates:
        optimizer.zero_grad()
        for c in updated.contributions:
            base = history[updated.version - 1 - c.staleness]
            base.zero_grad()
            mse(base, x[positions[c.assignment][: c.samples]], y[positions[c.assignment][: c.samples]]).backward()
            scale = setting.coordinator.policy.scale(c.staleness, 3) * c.samples / updated.samples
            for p, q in zip(model.parameters(), base.parameters(), strict=True):
                g = q.grad
                if g is None:
                    continue
                p.grad = scale * g if p.grad is None else p.grad + scale * g
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = lr * updated.worth
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr
        history.append(copy.deepcopy(model))
    return model


def replay_completing(setting: Setting, script: Script, x: Tensor, y: Tensor) -> tuple[nn.Module, int]:
    """The same where late contributions complete the mean of the update they missed; returns their number, too.

    Means are made anew out of all that is in them, not moved step by step.
    """
    model = copy.deepcopy(setting.initial)
    (optimizer,) = setting.make(model)
    positions = {assignment: some for t in script.trainees for assignment, _, some in t.log}
    history = [copy.deepcopy(model)]
    computed: dict[int, list[list[Tensor]]] = {}  # version -> gradient of each sample that was computed with it
    late = 0

    def mean(version: int) -> list[Tensor]:
        return [torch.stack(some).mean(0) for some in zip(*computed[version], strict=True)]

    for updated in setting.coordinator.updates:
        version = updated.version - 1
        before = {base: mean(base) for base in computed}
        for c in updated.contributions:
            base = history[version - c.staleness]
            late += c.staleness > 0
            for i in positions[c.assignment][: c.samples]:
                base.zero_grad()
                mse(base, x[i : i + 1], y[i : i + 1]).backward()
                one = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in base.parameters()]
                computed.setdefault(version - c.staleness, []).append(one)
        now = {base: mean(base) for base in computed}
        moves = [now[version]] if version in now else []
        moves += [[a - b for a, b in zip(now[base], before[base], strict=True)] for base in before]
        for p, *parts in zip(model.parameters(), *moves, strict=True):
            p.grad = torch.stack(parts).sum(0)
        optimizer.step()
        history.append(copy.deepcopy(model))
    return model, late


def unequal(rank: int, samples: int, now_s: float) -> float:
    spell = 6.0 if rank == 1 and 12.0 < now_s < 40.0 else 1.0
    return (0.5 + samples) * (1.0, 1.3, 3.0)[rank] * spell
