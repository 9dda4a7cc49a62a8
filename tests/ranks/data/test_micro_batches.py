"""Batches of any make: how they are cut is learned from several sizes; cut into micro-batches and joined again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from lightning_hetero.data.layouts import Layout, learn_layout
from lightning_hetero.data.micro_batches import join_outputs, split_batch

N = 7


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str
    made: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.x + 1)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As tokenizers return it: a mapping that knows more."""

    encodings = "kept"


class Graphs:
    """As graph libraries make it."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.x = items, torch.cat(items)

    def to_data_list(self) -> list[Any]:
        return self.items

    @classmethod
    def from_data_list(cls, items: list[Any]) -> Graphs:
        return cls(items)


class Splits:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def split(self, sizes: list[int]) -> list[Splits]:
        ends = np.cumsum(sizes)
        return [Splits(self.rows[e - s : e]) for s, e in zip(sizes, ends, strict=True)]


class Holder:
    def __init__(self) -> None:
        self.x = torch.zeros(N)


def rows(*shape: int) -> Tensor:
    return torch.arange(N)[(...,) + (None,) * len(shape)].expand(N, *shape)


def ids(batch: Any) -> Any:
    """The samples in a batch, in the shape of the batch."""
    if isinstance(batch, Tensor | np.ndarray):
        return [int(np.asarray(row).flat[0]) for row in batch]
    if isinstance(batch, Graphs):
        return [int(item[0]) for item in batch.items]
    return batch


RAGGED = [torch.full((i + 1, 2), i) for i in range(N)]


def layout_of(collate: Any) -> Layout:
    """How batches are cut that ``collate`` makes of numbers of samples."""
    return learn_layout(lambda samples: collate(len(samples)), range(5))


KINDS: dict[str, Any] = {
    "tensor": lambda n: torch.arange(n)[:, None].expand(n, 3),
    "array": np.arange,
    "list": lambda n: [f"{i}" for i in range(n)],
    "graphs": lambda n: Graphs([torch.full((i % 3 + 1,), i) for i in range(n)]),
}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(list(KINDS)))
def test_pieces_together_are_the_batch(sizes: list[int], kind: str) -> None:
    n = sum(sizes)
    batch = KINDS[kind](n)
    pieces = split_batch(batch, sizes, layout_of(KINDS[kind]), samples=n)
    assert [len(ids(piece)) for piece in pieces] == sizes
    assert [int(i) for piece in pieces for i in ids(piece)] == list(range(n))
    if len(sizes) == 1:
        assert pieces[0] is batch


SHARED = [torch.tensor(0.5), 3, "text", None, torch.ones(1, 9), np.float64(2), torch.tensor([1.0, 2.0, 3.0])]


def mixed(n: int) -> dict[str, Any]:
    of = torch.arange(n)
    return {
        "pair": Pair(of[:, None].expand(n, 2), {"ragged": RAGGED[:n], "names": tuple("abcdefg"[:n])}),
        "frozen": Frozen(of, "name"),
        "default": defaultdict(list, x=of),
        "ordered": OrderedDict(b=of, a=SHARED),
        "encoding": Encoding(ids=of[:, None].expand(n, 4)),
        "splits": Splits(list(range(n))),
        "array": np.arange(n),
        "count": n,
        "counts": torch.tensor(n),
        "steps": torch.arange(n).expand(N, n),
        "channels": np.arange(n)[None, :, None].repeat(N, axis=0),
    }


def test_parts_keep_their_containers_and_what_belongs_to_nobody() -> None:
    batch = mixed(N)
    first, second = split_batch(batch, (3, 4), layout_of(mixed), samples=N)
    assert list(first) == list(batch)
    assert isinstance(second["pair"], Pair) and ids(second["pair"].x) == [3, 4, 5, 6]
    assert [len(r) for r in second["pair"].y["ragged"]] == [4, 5, 6, 7] and second["pair"].y["names"] == tuple("defg")
    assert isinstance(first["frozen"], Frozen) and first["frozen"].made.tolist() == [1, 2, 3]
    assert first["frozen"].name == "name" and batch["frozen"].x.tolist() == list(range(N))
    assert type(first["default"]) is defaultdict and first["default"]["other"] == []
    assert type(second["ordered"]) is OrderedDict and list(second["ordered"]) == ["b", "a"]
    assert second["ordered"]["a"] is SHARED
    assert isinstance(second["encoding"], Encoding) and ids(second["encoding"]["ids"]) == [3, 4, 5, 6]
    assert batch["encoding"]["ids"].shape == (N, 4)
    assert first["splits"].rows == [0, 1, 2] and second["array"].tolist() == [3, 4, 5, 6]
    assert second["pair"].x._base is not None  # views
    assert (first["count"], second["count"], first["counts"].item(), second["counts"].item()) == (3, 4, 3, 4)
    assert second["steps"][0].tolist() == second["channels"][0, :, 0].tolist() == [3, 4, 5, 6]
    assert first["steps"].shape == (N, 3) and first["channels"].shape == (N, 3, 1)


def test_as_many_parts_as_samples() -> None:
    """``[x, y]`` of two samples, and three images of three channels: what follows the number of samples counts."""
    samples = [(torch.full((3, 4 + i % 2, 4), i), torch.tensor(i)) for i in range(4)]
    parts = learn_layout(default_collate, [(x[:, :4], y) for x, y in samples])
    a, b = split_batch(default_collate([(x[:, :4], y) for x, y in samples[:2]]), (1, 1), parts, samples=2)
    assert a[0].shape == (1, 3, 4, 4) and (a[1].tolist(), b[1].tolist()) == ([0], [1])

    def zipped(of: Any) -> Any:
        return tuple(zip(*of, strict=True))

    images = learn_layout(zipped, samples)
    a, b = split_batch(zipped(samples[:3]), (1, 2), images, samples=3)
    assert [len(part) for part in (*a, *b)] == [1, 1, 2, 2] and b[0][1].shape == (3, 4, 4)


def test_the_users_own_way_goes_first() -> None:
    class Owner:
        def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
            return [f"{batch}{size}" for size in sizes]

    assert split_batch("b", (3, 4), None, samples=N, owner=Owner()) == ["b3", "b4"]
    assert split_batch("b", (7,), None, samples=N, owner=Owner()) == ["b"]
    assert len(split_batch(rows(), (3, 4), Layout("rows"), samples=N, owner=object())) == 2


@pytest.mark.parametrize(
    ("collate", "reason"),
    [
        (lambda n: {"x": rows()[:n], "t": [torch.zeros(9, n + 1)]}, r"batch\['t'\]\[0\] has the shapes \(9, 5\), \(9"),
        (lambda n: torch.zeros(n, n), "it is not known which dimension"),
        (lambda n: (rows()[:n], torch.rand(3)), r"batch\[1\] has the shapes \(3,\), \(3,\), \(3,\)"),
        (lambda n: (rows()[:n], Holder()), r"batch\[1\] is a Holder"),
        (lambda n: pack_sequence(RAGGED[:n][::-1]), "PackedSequence"),
        (lambda n: {"a": 1, "b": "text"}, "nothing in the loader's batches has as many rows"),
        (lambda n: Pair(*torch.zeros(2)), "nothing in the loader's batches has as many rows"),
        (lambda n: (rows()[:n], [1] * (n // 2)), r"batch\[1\] has 2, 1 and 1 items in batches of 4, 3 and 2 samples"),
        (lambda n: (rows()[:n], None if n == 3 else rows()[:n]), r"batch\[1\] is of several types \(Tensor, NoneType"),
        (lambda n: {"x": rows()[:n], n: 1}, "batch has other parts in other batches"),
    ],
)
def test_what_cannot_be_known_is_refused(collate: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason) as caught:
        layout_of(collate)
    assert "split_batch(batch, sizes)" in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((torch.zeros(N, 6), ["a"] * N, None), r"batch\[0\] has the shape \(7, 6\) in a batch of 7 samples: did"),
        ((torch.zeros(6, N), ["a"] * 6, None), r"batch\[1\] has 6 items in a batch of 7 samples"),
        ((torch.zeros(6, N), ["a"] * N, torch.zeros(N)), r"batch\[2\] has the shape \(7,\) and not \(\)"),
        ((torch.zeros(6, N), ["a"] * N), r"batch has other contents \(a tuple\)"),
    ],
)
def test_batches_that_are_not_as_others_were(batch: Any, reason: str) -> None:
    layout = layout_of(lambda n: (torch.zeros(6, n), ["a"] * n, None))
    with pytest.raises(TypeError, match=reason):
        split_batch(batch, (3, 4), layout, samples=N)
    with pytest.raises(TypeError, match="what of a tuple belongs to which sample is not known"):
        split_batch(batch, (3, 4), None, samples=N)
    assert split_batch(batch, (7,), None, samples=N) == [batch]


# ---- together --------------------------------------------------------------------------------------------------


def output(low: int, high: int) -> dict[str, Any]:
    """What a step returns for samples low to high of N."""
    x = torch.arange(low, high, dtype=torch.float64)
    return {
        "loss": x.mean(),
        "rows": x[:, None],
        "array": x.numpy(),
        "inner": (x.mean().float(), [f"{i}" for i in range(low, high)]),
        "pair": Pair(x, None),
        "float": float(x.mean()),
        "none": None,
    }


def test_joined_outputs_are_the_whole_batchs() -> None:
    sizes = (3, 3, 1)
    joined, whole = join_outputs([output(0, 3), output(3, 6), output(6, 7)], sizes), output(0, N)
    assert joined.keys() == whole.keys()
    assert joined["loss"].item() == pytest.approx(3.0, rel=1e-15) and joined["loss"].dtype == torch.float64
    assert torch.equal(joined["rows"], whole["rows"]) and (joined["array"] == whole["array"]).all()
    assert joined["inner"][0].item() == 3.0 and joined["inner"][0].dtype == torch.float32
    assert joined["inner"][1] == whole["inner"][1]
    assert isinstance(joined["pair"], Pair) and torch.equal(joined["pair"].x, whole["pair"].x)
    assert joined["float"] == pytest.approx(3.0) and joined["none"] is None


def test_what_has_no_whole_is_a_list() -> None:
    assert join_outputs(["a", "b"], (3, 4)) == ["a", "b"]
    assert [t.item() for t in join_outputs([{"n": torch.tensor(3)}, {"n": torch.tensor(4)}], (3, 4))["n"]] == [3, 4]
    assert join_outputs([{"a": 1}, {"b": 1}], (3, 4)) == [{"a": 1}, {"b": 1}]
    assert len(join_outputs([{"m": torch.zeros(9)}, {"m": torch.ones(9)}], (3, 4))["m"]) == 2
    assert join_outputs([torch.tensor([2.0]), torch.tensor([9.0])], (3, 4)).tolist() == [6.0]  # a loss may have a row
    half = join_outputs([torch.tensor(1.0, dtype=torch.bfloat16)] * 3, (1, 1, 1))
    assert half.dtype == torch.bfloat16 and half.item() == 1.0
    assert join_outputs(["only"], (N,)) == "only"
