"""What optimizers keep of each parameter, listed alike on all ranks (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class OptimizerEntry(NamedTuple):
    """One entry of an optimizer's state.

    Attributes:
        optimizer, parameter: their numbers, the same on all ranks.
        name: of the entry, e.g. ``exp_avg``.
        shape, dtype: of a tensor; of a plain number ``()`` and its type's name.
    """

    optimizer: int
    parameter: int
    name: str
    shape: tuple[int, ...]
    dtype: str


def _states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, int, Tensor, dict[str, Any]]]:
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            yield number, index, parameter, optimizer.state.get(parameter, {})


def kept_states(optimizers: Sequence[Optimizer]) -> list[OptimizerEntry]:
    """Returns what the optimizers keep now.

    Raises:
        TypeError: something that has no average; names it.
    """
    found: list[OptimizerEntry] = []
    for number, index, _, state in _states(optimizers):
        for name, value in sorted(state.items()):
            if value is None:
                continue
            kept = None
            if isinstance(value, Tensor) and (value.dim() == 0 or value.is_floating_point() or value.is_complex()):
                kept = OptimizerEntry(number, index, name, tuple(value.shape), str(value.dtype))
            elif type(value) in (int, float, bool):
                kept = OptimizerEntry(number, index, name, (), type(value).__name__)
            if kept is None:
                what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise TypeError(
                    f"the state of {type(optimizers[number]).__name__} cannot be averaged: {name!r} is {what}. Use"
                    " another optimizer, or strategy='hetero_balanced'"
                )
            found.append(kept)
    return found


def complete(optimizers: Sequence[Optimizer], wanted: Sequence[OptimizerEntry]) -> None:
    """Adds what others keep and these optimizers do not, as zeros: of a parameter that had no gradient here yet."""
    states = {(number, index): (parameter, state) for number, index, parameter, state in _states(optimizers)}
    for kept in wanted:
        parameter, state = states[kept.optimizer, kept.parameter]
        if state.get(kept.name) is not None:
            continue
        if not state:
            optimizers[kept.optimizer].state[parameter] = state
            states[kept.optimizer, kept.parameter] = parameter, state
        if kept.dtype in ("int", "float", "bool"):
            state[kept.name] = {"int": 0, "float": 0.0, "bool": False}[kept.dtype]
        else:
            dtype = getattr(torch, kept.dtype.removeprefix("torch."))
            device = parameter.device if kept.shape else torch.device("cpu")  # where torch has counts by default
            state[kept.name] = torch.zeros(kept.shape, dtype=dtype, device=device)


def average_states_(
    optimizers: Sequence[Optimizer], average: Callable[[list[Tensor]], None], largest: Callable[[Tensor], object]
) -> None:
    """Averages tensors of one dimension or more; of single numbers, which count steps, all get the largest.

    Args:
        optimizers: that keep the same on all ranks.
        average: averages tensors over the ranks, in place.
        largest: replaces float64 numbers by the largest of all ranks, in place.
    """
    tensors: list[Tensor] = []
    counts: list[tuple[dict[str, Any], str]] = []
    for _, _, _, state in _states(optimizers):
        for name, value in sorted(state.items()):
            if isinstance(value, Tensor) and value.dim():
                tensors.append(value)
            elif value is not None:
                counts.append((state, name))
    average(tensors)
    if not counts:
        return
    numbers = torch.tensor([float(state[name]) for state, name in counts], dtype=torch.float64)
    largest(numbers)
    for (state, name), number in zip(counts, numbers.tolist(), strict=True):
        value = state[name]
        if isinstance(value, Tensor):
            value.fill_(number)
        else:
            state[name] = type(value)(number)


def copied_states(optimizers: Sequence[Optimizer]) -> list[dict[Any, dict[str, Any]]]:
    """Returns a copy of what the optimizers keep, for `restore_states`."""
    return [
        {
            parameter: {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in state.items()}
            for parameter, state in optimizer.state.items()
        }
        for optimizer in optimizers
    ]


def restore_states(optimizers: Sequence[Optimizer], copies: Sequence[dict[Any, dict[str, Any]]]) -> None:
    """Gives the optimizers what `copied_states` has found; the copies become theirs."""
    for optimizer, states in zip(optimizers, copies, strict=True):
        optimizer.state.clear()
        optimizer.state.update(states)
