"""The weighted average of what the ranks hold, tensors and optimizer states, and FedProx's pull to it (layer T).

    average = sum_r w_r t_r / sum_r w_r        floating and complex tensors: in float64, rounded once at the end
    largest of all ranks                       whole numbers and flags, e.g. BatchNorm's count of batches; an
                                               optimizer's single numbers, which count steps

In float64, so that what is equal on all ranks stays what it is, to the bit.

FedProx (Li et al., MLSys 2020): local loss + mu / 2 |w - w_average|^2, added as its gradient, mu (w - w_average).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

_BUCKET = 4_000_000  # numbers that travel at once: 32 MB

Entry = tuple[int, int, str]
"""Numbers of an optimizer and of its parameter, the same on all ranks, and the name of what is kept, e.g. exp_avg."""
Kind = tuple[tuple[int, ...], Any]
"""Shape and dtype of a tensor; of a plain number ``()`` and its type."""


def average_(tensors: Iterable[Tensor], part: float, group: dist.ProcessGroup) -> None:
    """Replaces tensors by their average over the ranks, in place; a collective.

    Args:
        tensors: the same number, shapes and types on all ranks; what is no floating number gets the largest value.
        part: this rank's part of the average; the ranks' sum up to 1. A rank of part 0 adds nothing, be it NaN.
        group: of the ranks.
    """
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    for bucket in _buckets([tensor for tensor in real if tensor.is_floating_point()]):
        packed = _packed(bucket, torch.float64)
        packed = packed * part if part else torch.zeros_like(packed)
        dist.all_reduce(packed, group=group)
        _unpack(packed, bucket)
    for bucket in _buckets([tensor for tensor in real if not tensor.is_floating_point()]):
        packed = _packed(bucket, torch.int64)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
        _unpack(packed, bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors in groups of one device and not too many numbers, in order."""
    bucket: list[Tensor] = []
    numbers = 0
    for tensor in tensors:
        if bucket and (tensor.device != bucket[0].device or numbers + tensor.numel() > _BUCKET):
            yield bucket
            bucket, numbers = [], 0
        bucket.append(tensor)
        numbers += tensor.numel()
    if bucket:
        yield bucket


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors])


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, packed.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(values.reshape(tensor.shape))


@torch.no_grad()
def add_proximal_(parameters: Sequence[Tensor], average: Sequence[Tensor], mu: float) -> None:
    """Adds the term's gradient to those of the parameters; one without a gradient is not trained and gets none.

    Args:
        parameters: their present values.
        average: as they were after the last average.
        mu: strength; under a loss scale, times the scale.
    """
    for parameter, before in zip(parameters, average, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - before, alpha=mu)


# ---- optimizer states --------------------------------------------------------------------------------------------


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Yields every entry that is kept, and the state that has it, in the same order on all ranks."""
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            for name in sorted(name for name, value in state.items() if value is not None):
                yield (number, index, name), state


def kept_states(optimizers: Sequence[Optimizer]) -> dict[Entry, Kind]:
    """Returns what the optimizers keep now.

    Raises:
        TypeError: something that has no average; names it.
    """
    found: dict[Entry, Kind] = {}
    for entry, state in _states(optimizers):
        number, _, name = entry
        value = state[name]
        if isinstance(value, Tensor) and (value.dim() == 0 or value.is_floating_point() or value.is_complex()):
            found[entry] = tuple(value.shape), value.dtype
        elif type(value) in (int, float, bool):
            found[entry] = (), type(value)
        else:
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(
                f"the state of {type(optimizers[number]).__name__} cannot be averaged: {name!r} is {what}. Use"
                " another optimizer, or strategy='hetero_balanced'"
            )
    return found


def complete(optimizers: Sequence[Optimizer], wanted: Mapping[Entry, Kind]) -> None:
    """Adds what others keep and these optimizers do not, as zeros: of a parameter that had no gradient here yet."""
    parameters = [_parameters(optimizer) for optimizer in optimizers]
    for (number, index, name), (shape, kind) in wanted.items():
        parameter = parameters[number][index]
        state = optimizers[number].state[parameter]
        if state.get(name) is None:
            device = parameter.device if shape else torch.device("cpu")  # where torch has counts by default
            is_tensor = isinstance(kind, torch.dtype)
            state[name] = torch.zeros(shape, dtype=kind, device=device) if is_tensor else kind()


def average_states_(
    optimizers: Sequence[Optimizer], part: float, group: dist.ProcessGroup, on_host: dist.ProcessGroup
) -> None:
    """Averages tensors of one dimension or more; of single numbers, which count steps, all get the largest.

    Args:
        optimizers: that keep the same on all ranks.
        part, group: see `average_`.
        on_host: the ranks' group for numbers on the host.
    """
    tensors: list[Tensor] = []
    counts: list[tuple[dict[str, Any], str]] = []
    for (_, _, name), state in _states(optimizers):
        if isinstance(state[name], Tensor) and state[name].dim():
            tensors.append(state[name])
        else:
            counts.append((state, name))
    average_(tensors, part, group)
    if not counts:
        return
    numbers = torch.tensor([float(state[name]) for state, name in counts], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=on_host)
    for (state, name), number in zip(counts, numbers.tolist(), strict=True):
        value = state[name]
        state[name] = value.fill_(number) if isinstance(value, Tensor) else type(value)(number)
