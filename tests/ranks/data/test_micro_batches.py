"""Batches of any make cut into micro-batches and joined again; what cannot be known is refused."""

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


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(["tensor", "array", "list", "graphs"]))
def test_pieces_together_are_the_batch(sizes: list[int], kind: str) -> None:
    n = sum(sizes)
    batch: Any = {
        "tensor": torch.arange(n)[:, None].expand(n, 3),
        "array": np.arange(n),
        "list": [f"{i}" for i in range(n)],
        "graphs": Graphs([torch.full((i % 3 + 1,), i) for i in range(n)]),
    }[kind]
    pieces = split_batch(batch, sizes, samples=n)
    assert [len(ids(piece)) for piece in pieces] == sizes
    assert [int(i) for piece in pieces for i in ids(piece)] == list(range(n))
    if len(sizes) == 1:
        assert pieces[0] is batch


def test_parts_keep_their_containers_and_what_belongs_to_nobody() -> None:
    shared = [torch.tensor(0.5), 3, "text", None, torch.ones(1, 9), np.float64(2)]
    batch = {
        "pair": Pair(rows(2), {"ragged": RAGGED, "names": tuple("abcdefg")}),
        "frozen": Frozen(rows(), "name"),
        "default": defaultdict(list, x=rows()),
        "ordered": OrderedDict(b=rows(), a=shared),
        "encoding": Encoding(ids=rows(4)),
        "splits": Splits(list(range(N))),
        "array": np.arange(N),
    }
    whole = split_batch(batch, (3, 4), samples=N)
    first, second = whole
    assert list(first) == list(batch)
    assert isinstance(second["pair"], Pair) and ids(second["pair"].x) == [3, 4, 5, 6]
    assert [len(r) for r in second["pair"].y["ragged"]] == [4, 5, 6, 7] and second["pair"].y["names"] == tuple("defg")
    assert isinstance(first["frozen"], Frozen) and first["frozen"].made.tolist() == [1, 2, 3]
    assert first["frozen"].name == "name" and batch["frozen"].x.tolist() == list(range(N))  # type: ignore[union-attr]
    assert type(first["default"]) is defaultdict and first["default"]["other"] == []
    assert type(second["ordered"]) is OrderedDict and list(second["ordered"]) == ["b", "a"]
    assert second["ordered"]["a"] is shared
    assert isinstance(second["encoding"], Encoding) and ids(second["encoding"]["ids"]) == [3, 4, 5, 6]
    assert batch["encoding"]["ids"].shape == (N, 4)  # type: ignore[index]
    assert first["splits"].rows == [0, 1, 2] and second["array"].tolist() == [3, 4, 5, 6]
    assert second["pair"].x._base is not None  # views


def test_as_many_parts_as_samples() -> None:
    """``[x, y]`` of two samples, as default_collate makes it, are parts; lists of what is no row are samples."""
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5, 6])
    for batch in (default_collate([(x[0], y[0]), (x[1], y[1])]), (x, y)):
        a, b = split_batch(batch, (1, 1), samples=2)
        assert type(a) is type(batch) and (a[0].tolist(), a[1].tolist()) == ([[1.0, 2.0]], [5])
        assert (b[0].tolist(), b[1].tolist()) == ([[3.0, 4.0]], [6])
    images = torch.zeros(3, 4, 4), torch.ones(3, 5, 5)
    targets = {"boxes": torch.zeros(6, 4)}, {"boxes": torch.ones(1, 4)}
    a, b = split_batch((images, targets), (1, 1), samples=2)
    assert len(a[0]) == len(a[1]) == 1 and a[0][0].shape == (3, 4, 4) and b[1][0]["boxes"].shape == (1, 4)


def test_the_users_own_way_goes_first() -> None:
    class Owner:
        def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
            return [f"{batch}{size}" for size in sizes]

    assert split_batch("b", (3, 4), samples=N, owner=Owner()) == ["b3", "b4"]
    assert split_batch("b", (7,), samples=N, owner=Owner()) == ["b"]
    assert len(split_batch(rows(), (3, 4), samples=N, owner=object())) == 2


@pytest.mark.parametrize(
    ("batch", "error", "reason"),
    [
        ({"x": rows(), "t": [torch.zeros(9, N)]}, TypeError, r"batch\['t'\]\[0\] has the shape \(9, 7\)"),
        ((rows(), Holder()), TypeError, r"batch\[1\] is a Holder"),
        (pack_sequence(RAGGED[::-1]), TypeError, "PackedSequence"),
        ({"a": 1, "b": "text"}, ValueError, "nothing in this batch, a dict, has 7 rows"),
        (Pair(*torch.zeros(2)), ValueError, "nothing in this batch, a Pair"),
    ],
)
def test_what_cannot_be_known_is_refused(batch: Any, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        split_batch(batch, (3, 4), samples=N)
    assert "split_batch(batch, sizes)" in str(caught.value)
    assert split_batch(batch, (7,), samples=N) == [batch]


@pytest.mark.parametrize("sizes", [(), (3, 3), (7, 0), (8, -1), (3.0, 4.0)])
def test_sizes_are_checked(sizes: Any) -> None:
    with pytest.raises(ValueError, match="sum up to samples=7"):
        split_batch(rows(), sizes, samples=N)


def test_a_wrong_number_of_pieces_is_noticed() -> None:
    class Wrong(Splits):
        def split(self, sizes: list[int]) -> list[Splits]:
            return [self]

    with pytest.raises(ValueError, match=r"Wrong.split\(sizes\) returned 1 batches for the sizes \(3, 4\)"):
        split_batch(Wrong([]), (3, 4), samples=N)


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
    with pytest.raises(ValueError, match="1 outputs for 2 micro-batches"):
        join_outputs([None], (3, 4))
