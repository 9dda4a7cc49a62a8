"""What an optimizer does to its parameters and keeps for them: tried on small copies of these (layer T).

    gradients   a, b, c     five steps ──► parameter 1      equal: it does
    gradients   a, 3b, 3c   five steps ──► parameter 1      else the ranks, which have some each, would step otherwise
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_STEPS = 5  # some take note of others only after a few
_MOST = 4  # parameters of a group, and groups whose parameters are compared


def treats_each_by_itself(optimizer: Optimizer) -> bool:
    """Whether what becomes of a parameter depends on its own gradients only; also if it cannot be tried.

    Args:
        optimizer: over any parameters; it is unchanged.
    """
    groups = optimizer.param_groups[:_MOST]
    first = [sum(len(g["params"][:_MOST]) for g in groups[:i]) for i in range(len(groups))]
    try:
        plain = _tried(optimizer, None)
        return all(torch.equal(plain[i], _tried(optimizer, i)[i]) for i in first if i < len(plain))
    except Exception:
        return True


def copies_per_group(optimizer: Optimizer) -> list[int]:
    """Returns how many tensors of a parameter's size an optimizer keeps for it, by parameter group.

    From its state, if there is one, else from a step that is tried; twice, as for Adam, where it cannot be.
    """
    try:
        known = optimizer if optimizer.state else _stepped(optimizer, None)
    except Exception:
        return [2] * len(optimizer.param_groups)

    def kept(parameter: Tensor) -> int:
        state = known.state.get(parameter, {})
        return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in state.values())

    return [max(map(kept, group["params"]), default=0) for group in known.param_groups]


def _tried(optimizer: Optimizer, alone: int | None) -> list[Tensor]:
    """Returns a copy's parameters after some steps, see `_stepped`."""
    twin = _stepped(optimizer, alone)
    return [toy.detach() for group in twin.param_groups[:_MOST] for toy in group["params"]]


def _stepped(optimizer: Optimizer, alone: int | None) -> Optimizer:
    """Returns a copy after some steps.

    Args:
        optimizer: of which a copy is stepped.
        alone: all gradients but this parameter's are larger; None: none is.
    """
    twin = _twin(optimizer)
    toys = [p for group in twin.param_groups for p in group["params"]]
    source = torch.Generator().manual_seed(1)
    gradients = [torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype) for p in toys]
    if alone is not None:
        gradients = [g if i == alone else 3 * g for i, g in enumerate(gradients)]

    def closure() -> Tensor:
        for toy, gradient in zip(toys, gradients, strict=True):
            toy.grad = gradient.clone()
        return torch.ones(())

    step: Any = type(twin).step  # a scheduler may have put another one on the instance
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for _ in range(_STEPS):
            step(twin, closure)
    return twin


def _twin(optimizer: Optimizer) -> Optimizer:
    """Returns a copy without state, over small parameters of the same numbers of dimensions."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        memo.update((id(p), _toy(p)) for p in group["params"])
    twin: Optimizer = object.__new__(type(optimizer))
    own = {key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad", "state")}
    vars(twin).update(copy.deepcopy(own, memo))
    twin.state = defaultdict(dict)
    for group in twin.param_groups:
        group["params"] = group["params"][:_MOST]
        if isinstance(group.get("lr"), float | int):
            group["lr"] = 0.1  # a warm-up may begin with 0
    return twin


def _toy(parameter: Tensor) -> nn.Parameter:
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    shape: Sequence[int] = [min(size, 4) for size in parameter.shape]
    return nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=parameter.requires_grad)
