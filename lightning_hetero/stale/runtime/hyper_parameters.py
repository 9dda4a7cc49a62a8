"""Hyper-parameters that travel with every push: learning rates and similar ones, and gradient clipping (layer T).

Schedulers and callbacks change ``optimizer.param_groups`` at the workers; the optimizer that steps is the server's. So
each push carries all numeric entries of all groups as float64, in an order both sides derive from the optimizers as
`configure_optimizers` made them:

    numbers  [ clip kind, clip value: per optimizer | entries: per optimizer, group, name ]

Only an entry that a worker has *changed* since the beginning is written to the server's group (others travel as NaN),
so that optimizers which count in their groups (schedule-free ones) keep their own count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CLIP_NORM, CLIP_VALUE = 1, 2
_NEW = object()

# How a step is computed is each side's own business, not the recipe.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True)
class _Place:
    optimizer: int
    group: int
    name: str
    item: int | None  # index inside a tuple such as betas
    kind: str

    def get(self, optimizers: Sequence[Optimizer]) -> float:
        value = optimizers[self.optimizer].param_groups[self.group][self.name]
        return float(value if self.item is None else value[self.item])

    def set(self, optimizers: Sequence[Optimizer], number: float) -> None:
        group = optimizers[self.optimizer].param_groups[self.group]
        old = group[self.name]
        if isinstance(old, Tensor):
            old.fill_(number)
            return
        plain = {"bool": bool, "int": int}.get(self.kind, float)
        value: Any = plain(number)
        if self.kind == "int" and not number.is_integer():
            value = number
        group[self.name] = value if self.item is None else (*old[: self.item], value, *old[self.item + 1 :])


def _kind(value: Any) -> str | None:
    if isinstance(value, (bool, int, float)):
        return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return "float" if isinstance(value, Tensor) and value.numel() == 1 else None


def _places(o: int, optimizer: Optimizer) -> Iterator[_Place]:
    """Yields the numeric entries of an optimizer's groups."""
    for g, group in enumerate(optimizer.param_groups):
        for name in sorted(group.keys() & optimizer.defaults.keys() - _IMPLEMENTATION):
            value = group[name]
            items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
            for item, number in items:
                if kind := _kind(number):
                    yield _Place(o, g, name, item, kind)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's entries that a checkpoint may hold."""
    entries = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name not in _IMPLEMENTATION
    }
    plain = (bool, int, float, str, tuple, type(None))
    return {name: value for name, value in entries.items() if isinstance(value, plain)}


class HyperParameters:
    """The numeric entries of the optimizers' groups, in a fixed order.

    Only entries named in ``optimizer.defaults`` take part: what schedulers add (``initial_lr``) is theirs alone.

    Args:
        optimizers: in the order of `configure_optimizers`; looked at again at each call.

    Attributes:
        size: how many numbers travel.
        digest: equal on both sides if they agree on what the numbers mean.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
        self._places = [place for o, optimizer in enumerate(optimizers) for place in _places(o, optimizer)]
        self._known = self.entries()
        self._changed = [False] * len(self._known)  # at this side, since the beginning
        self._told = [[_plain(group) for group in optimizer.param_groups] for optimizer in optimizers]
        self.size = 2 * len(self._optimizers) + len(self._places)
        self.digest = hashlib.sha256(repr([len(self._optimizers), *self._places]).encode()).hexdigest()[:32]

    def own_entries(self) -> list[list[dict[str, Any]]]:
        """Returns, per optimizer and group, what this side's steps have changed: some optimizers count there."""
        return [
            [
                {name: value for name, value in _plain(group).items() if before.get(name, _NEW) != value}
                for group, before in zip(optimizer.param_groups, told, strict=True)
            ]
            for optimizer, told in zip(self._optimizers, self._told, strict=True)
        ]

    def entries(self) -> list[float]:
        """Returns the present values of the optimizers' groups.

        Raises:
            ValueError: a group or an entry is gone or new.
        """
        for o, (optimizer, known) in enumerate(zip(self._optimizers, self._num_groups, strict=True)):
            if len(optimizer.param_groups) > known:
                raise ValueError(
                    f"optimizer {o} has got a new param_group ({len(optimizer.param_groups)} in all, {known} at the"
                    " start). The parameter server knows the groups as configure_optimizers made them: put all"
                    " parameters there, with requires_grad=False where they are frozen at first"
                )
        try:
            return [place.get(self._optimizers) for place in self._places]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"an optimizer's param_groups have changed their form: {error!r}") from error

    def write(self, numbers: Tensor, clips: Sequence[tuple[int, float]]) -> None:
        """Fills the numbers of a push (float64, ``size``) from this side's optimizers and clipping."""
        flat = [number for clip in clips for number in clip]
        for i, number in enumerate(entries := self.entries()):
            if not self._changed[i]:
                self._changed[i] = number != self._known[i]
                entries[i] = number if self._changed[i] else math.nan
        numbers.copy_(torch.tensor([*flat, *entries], dtype=torch.float64))

    def apply(self, numbers: Sequence[float]) -> list[tuple[int, float]]:
        """Sets this side's groups to what a push says; returns the clipping (kind, value) per optimizer."""
        start = 2 * len(self._optimizers)
        for i, place in enumerate(self._places):
            number = numbers[start + i]
            if number != self._known[i] and not math.isnan(number):
                place.set(self._optimizers, number)
                self._known[i] = number
                told = _plain(self._optimizers[place.optimizer].param_groups[place.group])
                self._told[place.optimizer][place.group][place.name] = told[place.name]
        return [(int(numbers[2 * o]), numbers[2 * o + 1]) for o in range(len(self._optimizers))]
