"""`UnevenZeroOptimizer`: the weights and the state of the optimizer without a division, whatever the capacities."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adafactor, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_hetero.optim import UnevenZeroOptimizer, zero
from tests.ranks.harness import run_ranks
from tests.ranks.optim.kit import EXACT, differing

STEPS = 6
CAPACITIES = [24.0, 10.0, 3.0]


class Model(nn.Module):
    """A dominant table, a shared weight, a number, a transposed weight; what is frozen, or used in some steps only."""

    def __init__(self, dtype: torch.dtype = torch.float64, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(157, 8, sparse=sparse)
        self.conv = nn.Conv2d(2, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.odd, self.frozen = nn.Linear(8, 12), nn.Linear(8, 8)
        self.tied = nn.Linear(8, 157, bias=False) if not sparse else nn.Linear(8, 3, bias=False)
        if not sparse:
            self.tied.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, index: Tensor, step: int) -> Tensor:
        x = self.table(index)
        x = self.frozen(x) * self.scale + torch.tanh(x @ self.turned.t()).sum(-1, keepdim=True)
        images = x[: len(x) // 4 * 4].reshape(-1, 2, 4, 4)
        loss = self.tied(x).square().mean() + self.conv(images).square().mean()
        return loss + self.odd(x).abs().mean() if step % 2 else loss


def batch(step: int) -> Tensor:
    return torch.randint(157, (32,), generator=torch.Generator().manual_seed(step))


class Pair:
    """A model with the optimizer alone, and the same one with its state divided."""

    def __init__(self, cls: Any, groups: Callable[[Model], Any] = nn.Module.parameters, **given: Any) -> None:
        model = {name: given.pop(name) for name in ("dtype", "sparse") if name in given}
        self.models = Model(**model), Model(**model)
        self.cls, self.given = cls, given
        self.plain = cls(groups(self.models[0]), **given)
        self.groups = groups
        self.ours = self.make(CAPACITIES)

    def make(self, capacities: Any) -> UnevenZeroOptimizer:
        return UnevenZeroOptimizer(self.groups(self.models[1]), self.cls, capacities=capacities, **self.given)

    def __iter__(self) -> Iterator[tuple[Model, Any]]:
        return iter(zip(self.models, (self.plain, self.ours), strict=True))

    def step(self, step: int) -> None:
        for model, optimizer in self:
            optimizer.zero_grad()
            model(batch(step), step).backward()
            optimizer.step()

    def whole(self) -> Any:
        """The complete state, as rank 0 has it."""
        self.ours.consolidate_state_dict()
        said = [self.ours.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said)
        return said[0]

    def difference(self) -> float:
        pairs = zip(*(model.parameters() for model in self.models), strict=True)
        return max(float((a - b).abs().max().detach()) for a, b in pairs)


def trained_and_resumed(pair: Pair, schedule: Callable[[Any], Any] | None = None) -> tuple[float, list[str], int]:
    """Trains, saves, divides in another way, trains on; the difference, what differs in the state, numbers held."""
    schedules = [schedule(optimizer) for _, optimizer in pair] if schedule else []
    for step in range(STEPS):
        pair.step(step)
        for one in schedules:
            one.step()
        if step == STEPS // 2:
            saved = pair.whole()
            found = differing(saved, pair.plain.state_dict())
            pair.ours = pair.make([1, 4, 2])
            pair.ours.load_state_dict(deepcopy(saved))
            pair.plain = pair.cls(pair.groups(pair.models[0]), **pair.given)
            pair.plain.load_state_dict(deepcopy(saved))  # ours, in stock torch
            schedules = []
    held = sum(v.numel() for s in pair.ours.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim)
    return pair.difference(), found, held


def grouped(model: Model) -> Any:
    decayed = [model.table.weight, *model.odd.parameters(), model.turned]
    others = [p for p in model.parameters() if all(p is not q for q in decayed)]
    return [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}]


def cycle(optimizer: Any) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=STEPS + 1)


OPTIMIZERS: dict[str, tuple[Callable[[], Pair], Any]] = {
    "AdamW": (partial(Pair, AdamW, lr=1e-2), None),
    "Adam, fused, amsgrad": (partial(Pair, Adam, fused=True, amsgrad=True), None),
    "AdamW, foreach, maximize": (partial(Pair, AdamW, foreach=True, maximize=True), None),
    "AdamW, bfloat16": (partial(Pair, AdamW, foreach=False, dtype=torch.bfloat16), None),
    "AdamW, names, groups, OneCycleLR": (partial(Pair, AdamW, grouped, lr=1e-2), cycle),
    "SGD, groups, LambdaLR": (
        partial(Pair, torch.optim.SGD, grouped, lr=0.1, momentum=0.9), lambda o: LambdaLR(o, lambda step: 0.9**step)
    ),
    "SGD, sparse": (partial(Pair, torch.optim.SGD, lr=0.1, sparse=True), None),
    "SGD, names": (partial(Pair, torch.optim.SGD, lambda model: model.named_parameters(), lr=0.1), None),
    "Adagrad": (partial(Pair, Adagrad), None),
    "Adafactor": (partial(Pair, Adafactor), None),
} | {
    name: (partial(Pair, getattr(torch.optim, name)), None)
    for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
}  # fmt: skip


LONG = ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")  # whose state is of the same kinds as others'


def optimizers_job(rank: int, world: int, names: list[str]) -> dict[str, tuple[float, list[str], int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "_BUCKET_BYTES", 512)  # several to a tensor
        return {name: trained_and_resumed(make(), schedule) for name in names for make, schedule in [OPTIMIZERS[name]]}


@cache
def optimizers(long: bool) -> list[dict[str, tuple[float, list[str], int]]]:
    return run_ranks(3, optimizers_job, [name for name in OPTIMIZERS if (name in LONG) == long])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in OPTIMIZERS])
def test_weights_and_states_are_those_of_the_optimizer_alone(name: str) -> None:
    ranks = optimizers(name in LONG)
    for rank in ranks:
        difference, found, _ = rank[name]
        assert difference <= EXACT
        assert found == []
    held = [rank[name][2] for rank in ranks]
    if name != "Adafactor" and sum(held):  # whole tensors, of which the table is most
        assert held == pytest.approx([sum(held) * part / 7 for part in (1, 4, 2)], rel=0.1)


# ---- what happens around a step ----------------------------------------------------------------------------------


def closures(pair: Pair) -> None:
    for step in range(STEPS):
        for model, optimizer in pair:

            def closure(model: Model = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch(step), step)
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), Tensor)


def scaled(pair: Pair) -> None:
    """With a GradScaler, which leaves out a step whose gradients are not finite."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)]
    for step in range(STEPS):
        for scaler, (model, optimizer) in zip(scalers, pair, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(batch(step), step) * (float("inf") if step == 3 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()


def thawed(pair: Pair) -> None:
    """Parameters are frozen and thawed, in the optimizer's groups and outside of them."""
    for step in range(STEPS):
        for model, optimizer in pair:
            if step == 2:
                model.frozen.requires_grad_(True)  # is in a group already
                model.turned.requires_grad_(False)
            if step == 4:
                extra = nn.Linear(8, 8).double()
                with torch.no_grad():
                    [p.fill_(0.1) for p in extra.parameters()]
                model.frozen.register_module("extra", extra)
                model.frozen.register_forward_hook(lambda module, _, output: module.extra(output))
                optimizer.add_param_group({"params": list(extra.parameters()), "lr": 5e-3})
        pair.step(step)
    assert differing(pair.whole(), pair.plain.state_dict()) == []


def moved(pair: Pair) -> None:
    """The memory of parameters is replaced, and the state reset."""
    for step in range(STEPS):
        for model, optimizer in pair:
            if step == 3:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            if step == 5:
                optimizer.state.clear()
        pair.step(step)


def unlike(pair: Pair) -> None:
    """A rank lacks a gradient that others have: nobody waits for ever, and all have the owner's rows."""
    for step in range(2):
        pair.step(step)
    model, optimizer = pair.models[1], pair.ours
    optimizer.zero_grad()
    model(batch(3), 3).backward()
    if dist.get_rank() == 2:
        model.table.weight.grad = None
    optimizer.step()
    pair.models = (deepcopy(model), model)
    for parameter in pair.models[0].parameters():
        dist.broadcast(parameter.data, 0)


SITUATIONS = {what.__name__: what for what in (closures, scaled, thawed, moved, unlike)}


def situations_job(rank: int, world: int) -> dict[str, float]:
    found = {}
    for name, happens in SITUATIONS.items():
        pair = Pair(AdamW, lr=1e-2)
        happens(pair)
        found[name] = pair.difference()
    return found


def test_what_happens_around_a_step_is_the_same() -> None:
    for rank in run_ranks(3, situations_job):
        assert rank == dict.fromkeys(SITUATIONS, pytest.approx(0.0, abs=EXACT))


# ---- capacities and refusals -------------------------------------------------------------------------------------


def capacities_job(rank: int, world: int) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh  # takes long to import

    placed = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (world,)), [Replicate()])
    model = Model()
    made = partial(UnevenZeroOptimizer, list(model.parameters()), AdamW)
    calls: dict[str, Callable[[], Any]] = {
        "few": lambda: made(capacities=[1.0]),
        "negative": lambda: made(capacities=[1.0, -2.0]),
        "text": lambda: made(capacities="equal"),
        "unequal": lambda: made(capacities=[1.0, 1.0 + rank]),
        "LBFGS": lambda: UnevenZeroOptimizer(model.parameters(), torch.optim.LBFGS),
        "Muon": lambda: UnevenZeroOptimizer(model.parameters(), torch.optim.Muon),
        "DTensor": lambda: UnevenZeroOptimizer([nn.Parameter(placed)], AdamW),
        "not collected": lambda: made().state_dict(),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            call()
        said[name] = f"{error.type.__name__}: {error.value}"
    said["auto"] = repr(len(set(made().capacities)))
    needed = sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters())
    for name, gb in (("two cards", [24, 10]), ("one card", [24, 24]), ("nothing is left", [0, 0])):
        card = SimpleNamespace(total_bytes=lambda gb=gb: needed + gb[rank] * 1e9, device="cuda:0")
        card.identity = lambda name=name: "the same" if name == "one card" else str(rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zero, "device_of", lambda _, card=card: card)
            said[name] = str([f"{size / 1e9:.2f}" for size in made().capacities])
    return said


SAID = {
    "few": r"ValueError: capacities=\[1.0\] must be 'auto', or a list of one number > 0 for each of the 2 ranks",
    "negative": r"ValueError: capacities\[1\]=-2.0 must be a finite number > 0",
    "text": "ValueError: capacities='equal' must be 'auto', or a list",
    "unequal": r"ValueError: capacities=\[\[1.0, 1.0\], \[1.0, 2.0\]\] of the ranks must be the same on all",
    "LBFGS": "TypeError: LBFGS needs inner products",
    "Muon": "ValueError: Muon only supports 2D parameters",  # on both, not only where such a parameter is
    "DTensor": "TypeError: FSDP or tensor parallelism has divided the state already",
    "not collected": r"RuntimeError: .*call consolidate_state_dict\(\) on all of them",
    "auto": "1",  # two ranks share this host's memory
    "two cards": r"\['24.00', '10.00'\]",  # what weights and gradients leave
    "one card": r"\['12.00', '12.00'\]",
    "nothing is left": r"\['0.00', '0.00'\]",
}


@pytest.fixture(scope="module")
def capacities() -> list[dict[str, str]]:
    return run_ranks(2, capacities_job)


@pytest.mark.parametrize("name", SAID)
def test_capacities_and_what_is_said_of_wrong_arguments(name: str, capacities: list[dict[str, str]]) -> None:
    for rank in capacities:
        assert re.match(SAID[name], rank[name]), rank[name]
