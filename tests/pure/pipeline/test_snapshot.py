"""Whatever is done to objects, a snapshot puts them back, as the very objects that they were."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given
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


LEAVES = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.text("ab", max_size=2),
    st.builds(lambda n: torch.arange(float(n)), st.integers(0, 3)),
    st.builds(lambda n: np.arange(float(n)), st.integers(0, 3)),
    st.builds(random.Random, st.integers(0, 3)),
    st.builds(np.random.default_rng, st.integers(0, 3)),
    st.builds(np.random.RandomState, st.integers(0, 3)),
    st.builds(lambda seed: torch.Generator().manual_seed(seed), st.integers(0, 3)),
    st.builds(lambda n: nn.Linear(1 + n, 2), st.integers(0, 2)),
    st.builds(bytearray, st.binary(max_size=2)),
    st.builds(Counter, st.text("ab", max_size=3)),
    st.builds(set, st.lists(st.integers(0, 3), max_size=3)),
)


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several, named = st.lists(inner, max_size=3), st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(lambda entries: deque(entries, maxlen=4)),
        named,
        named.map(OrderedDict),
        named.map(lambda entries: defaultdict(list, entries)),
        *(inner.map(kind) for kind in (Plain, Slotted, Frozen)),
        inner.map(lambda value: functools.partial(print, value)),
    )


def parts_of(root: Any) -> list[Any]:
    """Returns all mutable objects that can be reached, each once."""
    found: dict[int, Any] = {}
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in found or value is None or isinstance(value, int | str | float | type):
            continue
        found[id(value)] = value
        pending += children(value)
    return list(found.values())


def children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | deque | set):
        return list(value)
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, functools.partial):
        return list(value.args)
    return [value.value] if isinstance(value, Plain | Slotted | Frozen) else []


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
            return [id(entry) for entry in children(value)]


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


@given(st.recursive(LEAVES, around, max_leaves=12), st.integers(0, 1000))
def test_whatever_changes_is_put_back(root: Any, seed: int) -> None:
    if isinstance(root, list):
        root.append(root)  # a circle
    parts, draw = parts_of(root), random.Random(seed)
    before = [copy.copy(look(part)) for part in parts]
    snapshot = Snapshot([Plain(root)])
    for part in parts:
        if draw.random() < 0.7:
            change(part, draw)
    snapshot.put_back()
    assert [look(part) for part in parts] == before


def test_changes_are_noticed_at_all() -> None:
    """The oracle of the test above sees each kind of change."""
    draw = random.Random(0)
    for leaf in (torch.ones(1), np.ones(1), bytearray(b"a"), random.Random(1), np.random.default_rng(1),
                 np.random.RandomState(1), torch.Generator(), {"a": 1}, OrderedDict(a=1, b=2), {1}, [1], deque([1]),
                 Plain(1), Slotted(1), nn.Linear(1, 1), Counter("a")):  # fmt: skip
        before = copy.copy(look(leaf))
        change(leaf, draw)
        assert look(leaf) != before, leaf


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
