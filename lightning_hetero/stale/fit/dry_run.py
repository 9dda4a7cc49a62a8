"""Whether an optimizer's step can be made in the parameter server: tried on a copy over tiny parameters (layer L).

The server calls ``step()`` once per update, when the gradients of the whole batch are there. What needs more than that
is found before the first batch. A copy that raises in any case, e.g. because a class cannot be copied, says nothing.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["refuse_unusual_steps"]

_INSTEAD = "Use strategy='hetero_balanced', whose ranks step themselves"


def refuse_unusual_steps(optimizers: Iterable[Optimizer]) -> None:
    """Refuses an optimizer whose step asks a rank for more than gradients.

    Raises:
        TypeError: with the reason.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        refuse_step_hooks(optimizer)
        plain, state, _ = _try(optimizer, closure=False)
        with_closure, _, calls = _try(optimizer, closure=True)
        if with_closure and not plain:
            raise TypeError(
                f"{name}.step() needs a closure, and the parameter server, which makes the step, has the gradients of a"
                f" batch and cannot compute them again. {_INSTEAD}"
            )
        if with_closure and calls > 1:
            raise TypeError(
                f"{name}.step(closure) computes the loss {calls} times per step, and here the step is made in the"
                f" parameter server, once the gradients of the whole batch are there. {_INSTEAD}"
            )
        if more := sorted(state - {"state", "param_groups"}):
            raise TypeError(
                f"{name}.state_dict() has {', '.join(map(repr, more))} besides 'state' and 'param_groups': the"
                f" parameter server, which has the state, could not bring that home. {_INSTEAD}"
            )


def refuse_step_hooks(optimizer: Optimizer) -> None:
    """Raises TypeError if hooks around the step of an optimizer are registered: a rank makes none."""
    found = [name for name in ("pre", "post") if getattr(optimizer, f"_optimizer_step_{name}_hooks", None)]
    if found:
        raise TypeError(
            f"register_step_{found[0]}_hook of {type(optimizer).__name__}: the step is made in the parameter server, so"
            f" what the hook does would be lost on the ranks. Do it in on_train_batch_end, or: {_INSTEAD[0].lower()}"
            f"{_INSTEAD[1:]}"
        )


def _try(optimizer: Optimizer, *, closure: bool) -> tuple[bool, set[str], int]:
    """Returns whether a step of a copy works, the entries of its state then, and how often it called its closure."""
    calls = 0
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
            warnings.simplefilter("ignore")
            trial, parameters = _copied(optimizer)

            def gradients() -> Tensor:
                nonlocal calls
                calls += 1
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 0.1) if parameter.requires_grad else None
                return torch.ones(())

            gradients()
            calls = 0
            step: Callable[..., Any] = type(optimizer).step
            if getattr(step, "hooked", False):  # torch's wrapper calls everybody's hooks, also those of all optimizers
                step = getattr(step, "__wrapped__", step)
            step(trial, gradients) if closure else step(trial)
            return True, set(trial.state_dict()), calls
    except Exception:
        return False, set(), calls


def _copied(optimizer: Optimizer) -> tuple[Optimizer, list[nn.Parameter]]:
    """Returns a copy without state and hooks, and its parameters, which have one entry each."""
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tiny = nn.Parameter(torch.ones([1] * p.ndim, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
            memo[id(p)] = tiny
            parameters.append(tiny)
    own = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    for name, value in own.items():
        if name.endswith("_hooks"):
            memo[id(value)] = OrderedDict()
    trial = memo[id(optimizer)] = object.__new__(type(optimizer))
    trial.__dict__.update({name: copy.deepcopy(value, memo) for name, value in own.items()})
    return trial, parameters
