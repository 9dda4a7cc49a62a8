"""What stands for a tensor that other ranks hold: what may be done with it, and what is an error (torch 2.13)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.ownership.by_parameter import treats_each_by_itself
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here, StandIn, leave, stand_in_for

CPU = torch.device("cpu")
VERSIONS = f"torch {torch.__version__}, checked with 2.13"


def stand_in(shape: tuple[int, ...] = (2, 3), hook: str | None = "on_train_batch_end", **here: Any) -> StandIn:
    real = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    return stand_in_for(real, "net.2.weight", (1, 3), Here(0, lambda: hook, **here), device=CPU)


def test_it_has_all_but_values() -> None:
    p = stand_in()
    assert isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf and p.is_meta and p.grad is None, VERSIONS
    assert (p.shape, p.dtype, p.device, p.numel(), p.nbytes, len(p)) == ((2, 3), torch.float64, CPU, 6, 48, 2)
    assert "net.2.weight is held by rank 1 or 3" in repr(p)
    layer = nn.Linear(3, 2)
    layer.weight = p
    assert sum(q.numel() for q in layer.parameters()) == 8 and list(layer.state_dict()) == ["weight", "bias"]
    layer.requires_grad_(False)
    assert not p.requires_grad
    zeros = p.new_zeros(4)
    assert not isinstance(zeros, StandIn) and (zeros.dtype, zeros.tolist()) == (torch.float64, [0.0] * 4)
    assert not torch.equal(p, torch.zeros(3, 2)), "shapes tell"


ALONE: dict[str, Callable[[StandIn], Any]] = {
    "in place": lambda p: p.clamp_(-1, 1),
    "from another": lambda p: p.copy_(torch.ones(2, 3)),
    "result": lambda p: p.sub(p.mean(0, keepdim=True)).abs().sqrt(),
    "norm": lambda p: p.div_(p.norm()),
    "view": lambda p: p.view(-1)[torch.topk(p.abs().view(-1), 2).indices],
    "by a factor on this rank": lambda p: p * torch.tensor(0.5),
    "lists": lambda p: torch._foreach_add([p, p.data], 0.5)[1],
    "like": torch.zeros_like,
    "out": lambda p: torch.add(p, 1.0, out=p),
    "assigned": lambda p: setattr(p, "data", torch.ones(2, 3)) or p,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("kind", ALONE)
def test_what_its_rank_does_alone_gives_another_stand_in_and_not_within_a_step(kind: str) -> None:
    with torch.no_grad():
        assert isinstance(ALONE[kind](stand_in()), StandIn), VERSIONS
        with pytest.raises(RuntimeError, match=r"weight is held by rank 1 or 3 .* in training_step: .*weight_decay"):
            ALONE[kind](stand_in(hook="training_step"))


MIXED: dict[str, Callable[[StandIn, Tensor], Any]] = {
    "operand": lambda p, other: other.add_(p),
    "other operand": lambda p, other: p + other,
    "copy": lambda p, other: other.copy_(p),
    "stack": lambda p, other: torch.stack([other, p]),
    "matrix": lambda p, other: nn.functional.linear(other, p),
    "lists": lambda p, other: torch._foreach_add_([other, other], [other, p]),
    "norms": lambda p, other: sum((p.norm(), other.norm())),
    "item": lambda p, other: p[0, 0].item(),
    "bool": lambda p, other: bool((p > 0).any()),
    "float": lambda p, other: float(p.sum()),
    "format": lambda p, other: f"{p.sum():.2f}",
    "tensor": lambda p, other: torch.tensor([p.sum()]),
    "numpy": lambda p, other: p.detach().numpy(),
    "list": lambda p, other: p.tolist(),
    "equal": lambda p, other: torch.equal(p, other),
    "found": lambda p, other: p.nonzero(),
    "pickle": lambda p, other: pickle.dumps(p),
    "saved": lambda p, other: torch.save({"a": [p]}, io.BytesIO()),
    "memory": lambda p, other: p.share_memory_(),
    "pointer": lambda p, other: p.data_ptr(),
}


@pytest.mark.parametrize("kind", MIXED)
def test_what_mixes_it_or_wants_a_value_is_an_error(kind: str) -> None:
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"is held by rank 1 or 3 .*rank 0 has no values .*hetero_balanced"),
    ):
        MIXED[kind](stand_in(), torch.ones(2, 3, dtype=torch.float64))


def test_lists_are_treated_place_by_place() -> None:
    p, own = stand_in(), torch.ones(2, 3, dtype=torch.float64)
    torch._foreach_mul_([own, p.data], 3.0)
    torch._foreach_lerp_([own, p.data], [torch.zeros_like(own), own], 0.5)
    assert torch.equal(own, torch.full_like(own, 1.5))
    first, second = torch._foreach_norm([p.data, own])
    assert isinstance(first, StandIn) and float(second) == pytest.approx(1.5 * 6**0.5)


def test_what_is_drawn_behind_it_is_what_is_drawn_behind_the_real_one() -> None:
    drawn = []
    for tensor in (torch.empty(2, 3, dtype=torch.float64), stand_in().data):
        torch.manual_seed(1)
        nn.init.normal_(tensor)
        torch.rand_like(tensor)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_gradients_are_there_for_hooks_and_not_for_optimizers() -> None:
    hook = ["on_after_backward"]
    real = nn.Parameter(torch.ones(2))
    here = Here(0, lambda: hook[0])
    p: Any = stand_in_for(real, "net.2.bias", (1,), here, device=CPU)
    assert p.grad is None
    here.gradients = True
    gradient: Any = p.grad
    assert p.grad is gradient and gradient.clamp_(-1, 1) is gradient
    p.grad = gradient / 2
    with pytest.raises(RuntimeError, match=r"net\.2\.bias\.grad is held by rank 1"):
        gradient.norm().item()
    hook[0] = "optimizer_step"
    optimizer = torch.optim.Adam([p], lr=0.1)
    optimizer.step()
    assert p.grad is None and not optimizer.state


def test_copies_are_known_as_long_as_somebody_keeps_them() -> None:
    p = stand_in()
    kept = copy.deepcopy(p)
    p.detach().mul_(2.0)
    assert list(p.held.here.made.values()) == [kept] or [*p.held.here.made] == [id(kept)]
    del kept
    assert not p.held.here.made


def test_a_reference_to_what_was_replaced_is_an_error() -> None:
    for tensor in (nn.Parameter(torch.ones(3)), torch.ones(3)):
        leave(tensor, "net.0.bias")
        for use in (Tensor.norm, Tensor.numel, lambda t: t.grad, lambda t: t.mul_(2.0)):
            with pytest.raises(RuntimeError, match=r"a reference to net\.0\.bias"):
                use(tensor)


# ---- optimizers -------------------------------------------------------------------------------------------------


class Normed(torch.optim.SGD):
    """By the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        closure()
        ps = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            p.grad.div_(norm)
        return super().step()


class Noisy(torch.optim.SGD):
    """Adds noise, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.1)
        return loss


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


STEPPED = [
    (torch.optim.SGD, {"momentum": 0.9}, True),
    (torch.optim.AdamW, {}, True),
    (torch.optim.Adagrad, {}, True),
    (torch.optim.Adafactor, {}, True),
    (torch.optim.RMSprop, {"foreach": True}, True),
    (Noisy, {}, True),
    (Normed, {}, False),
    (Twice, {}, True),
    (torch.optim.LBFGS, {}, False),
]


@pytest.mark.parametrize(("kind", "options", "alone"), STEPPED)
def test_whether_each_parameter_is_treated_by_itself(kind: Any, options: Any, alone: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    groups: Any = module.parameters()
    if kind is not torch.optim.LBFGS:
        groups = [{"params": module[0].parameters()}, {"params": module[1].parameters(), "lr": 0.3}]
    optimizer = kind(groups, lr=0.1, **options)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))  # begins with 0
    before, drawn = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    assert treats_each_by_itself(optimizer) == alone
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())
