"""Whatever is done to objects, a snapshot puts them back, as the very objects that they were."""

from __future__ import annotations

import copy
import functools
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_hetero.pipeline.runtime.measure.snapshot import Snapshot


class Plain:
    """An object with attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    """An object without a dict of them."""

    __slots__ = ("unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Frozen:
    value: Any


def leaves() -> list[Any]:
    """Returns one of each kind of object that a module may keep."""
    return [
        torch.ones(1), torch.zeros(2, 2), np.ones(1), bytearray(b"a"), random.Random(1), np.random.default_rng(1),
        np.random.RandomState(1), torch.Generator(), {"a": 1}, OrderedDict(a=1, b=2), defaultdict(list, a=[1]), {1},
        [1], deque([1], maxlen=4), Plain(1), Slotted(1), nn.Linear(1, 1), nn.Linear(2, 1).weight, Counter("a"),
    ]  # fmt: skip


NESTS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda value: value,
    "list, in a circle": lambda value: (found := [value]).append(found) or found,
    "tuple": lambda value: (value, {"key": [value]}),
    "deque": lambda value: deque([value]),
    "dict": lambda value: OrderedDict(key=value),
    "object": lambda value: Plain(Slotted(Frozen(value))),
    "partial": lambda value: functools.partial(print, value),
}


def look(value: Any) -> Any:
    """Returns what an object holds, its parts by identity."""
    match value:
        case Tensor():
            return value.tolist(), value.requires_grad, value.data_ptr(), value.grad is None
        case np.ndarray() | bytearray():
            return value.tolist() if isinstance(value, np.ndarray) else bytes(value)
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return str(value.bit_generator.state)
        case np.random.RandomState():
            return str(value.get_state())
        case torch.Generator():
            return value.get_state().tolist()
        case dict():
            return [(key, id(entry)) for key, entry in value.items()]
        case set():
            return sorted(value, key=str)
        case Plain():
            return {name: id(entry) for name, entry in vars(value).items()}
        case Slotted():
            return id(value.value), hasattr(value, "unset")
        case nn.Module():
            return {name: id(entry) for name, entry in vars(value).items()}, value.training
        case _:
            return [id(entry) for entry in value]


def change(value: Any, draw: random.Random) -> None:
    """Does to an object what code does to such ones."""
    match value:
        case nn.Parameter() if draw.random() < 0.5:
            value.data = torch.ones_like(value)
            value.requires_grad_(False)
            value.grad = torch.ones_like(value)
        case Tensor():
            value.detach().add_(1.0)
        case np.ndarray():
            value += 1.0
        case bytearray():
            value.append(1)
        case random.Random():
            value.random()
        case np.random.Generator() | np.random.RandomState():
            value.normal()
        case torch.Generator():
            torch.rand(1, generator=value)
        case OrderedDict() if value and draw.random() < 0.5:
            value.move_to_end(next(iter(value)))
        case Counter():
            value["c"] += 1
        case dict() if value and draw.random() < 0.5:
            value.pop(next(iter(value)))
        case dict():
            value["new"] = [1]
        case set():
            value.add(draw.random())
        case list() | deque() if value and draw.random() < 0.5:
            value.clear()
        case list() | deque():
            value.append("new")
        case Plain():
            value.value, value.more = "new", 1  # type: ignore[attr-defined]
        case Slotted():
            value.value = value.unset = "new"  # type: ignore[attr-defined]
        case nn.Module():
            value.eval()
            value.steps = 3  # type: ignore[assignment]


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_changes_is_put_back(nest: str, seed: int) -> None:
    parts, draw = leaves(), random.Random(seed)
    before = [copy.copy(look(part)) for part in parts]
    snapshot = Snapshot([Plain([NESTS[nest](part) for part in parts])])
    for part, was in zip(parts, before, strict=True):
        change(part, draw)
        assert look(part) != was, f"a change of {part} is not seen"
    snapshot.put_back()
    assert [look(part) for part in parts] == before


class Counting(nn.Module):
    seen: ClassVar[list[int]] = []
    steps: ClassVar[int] = 0


def test_values_of_the_class_memory_and_what_is_left_alone() -> None:
    module, stranger = Counting(), Plain([1])
    data = TensorDataset(torch.zeros(3))
    module.stranger, module.data = stranger, data  # type: ignore[assignment]
    view = (queue := torch.zeros(2, 2))[0]
    module.queue = queue
    late = torch.zeros(2)
    snapshot = Snapshot([module], shared=[stranger])
    Counting.seen.append(1)
    Counting.steps += 1
    Counting.more = 1  # type: ignore[attr-defined]
    module.queue = torch.ones(1)
    view += 1.0
    late += 1.0
    stranger.value.append(2)
    data.tensors[0].add_(1.0)
    snapshot.put_back()
    assert (Counting.seen, Counting.steps, hasattr(Counting, "more")) == ([], 0, False)
    assert module.queue is queue and not queue.any()
    assert stranger.value == [1, 2] and late.sum() == 2.0  # not looked into, not reached
    assert data.tensors[0].sum() == 3.0  # a data set's tensors are not copied


def test_what_refers_weakly_to_a_module_gives_it_nothing_of_a_copys() -> None:
    """As PyTorchProfiler's hooks do; a LightningModule's copy has no trainer."""

    class Attached(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "trainer": None}

    module = Attached(1, 1)
    module.trainer = "here"  # type: ignore[assignment]
    module.helper = Plain(weakref.proxy(module))  # type: ignore[assignment]
    snapshot = Snapshot([module])
    module.helper.value.trainer = "elsewhere"
    snapshot.put_back()
    assert module.trainer == "here"
