"""Where parameters, buffers and gradients lie in flat memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.runtime.layout import ALIGN_BYTES, FlatLayout, check_compression, is_finite
from tests.ranks.stale.kit import adopt

pytestmark = pytest.mark.usefixtures("float64")


def all_kinds() -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    last = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [
        ("scalar", torch.tensor(3.5)),
        ("matrix", torch.randn(3, 5, dtype=torch.float32)),
        ("transposed", torch.randn(3, 5).t()),
        ("last", last),
        ("half", torch.randn(7).bfloat16()),
        ("complex", torch.randn(2, 2, dtype=torch.complex64)),
        ("empty", torch.zeros(0, 4)),
        ("integer", torch.arange(5)),
        ("bool", torch.tensor([True, False])),
        ("expanded", torch.arange(3.0).expand(2, 3)),
        ("strided", torch.randn(4, 8)[:, ::2]),
        ("one", torch.randn(1, 6)[:, :1]),
    ]


def test_every_tensor_survives_the_area_in_its_own_format() -> None:
    named = all_kinds()
    tensors = [t for _, t in named]
    before = [t.clone() for t in tensors]
    layout = FlatLayout.of(named[:6], named[6:])
    area = torch.full((layout.bytes,), 255, dtype=torch.uint8)
    adopt(layout, area, tensors)
    for view, tensor, old, (start, stop) in zip(
        layout.views(area), tensors, before, layout.ranges, strict=True
    ):
        assert torch.equal(view, old) and torch.equal(tensor, old)
        assert view.dtype == old.dtype
        assert start % ALIGN_BYTES == 0 and stop - start == old.numel() * old.element_size()
        assert tensor.numel() == 0 or tensor.data_ptr() == area.data_ptr() + start
    assert dict(named)["last"].is_contiguous(memory_format=torch.channels_last)
    assert dict(named)["transposed"].stride() == (1, 5)
    assert layout.views(area)[9].is_contiguous()  # what overlapped has got room
    ranges = sorted(layout.ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    assert layout.parameter_bytes <= layout.ranges[6][0]


def test_tied_tensors_appear_once() -> None:
    a, b = torch.zeros(3), torch.zeros(3)
    layout = FlatLayout.of([("a", a), ("again", a), ("b", b)], [("c", torch.ones(1)), ("a buffer", b)])
    assert [e.name for e in layout.parameters] == ["a", "b"]
    assert [e.name for e in layout.buffers] == ["c"]


def test_the_digest_tells_whatever_matters() -> None:
    def make(**changes: Any) -> FlatLayout:
        shape, dtype = changes.get("shape", (3, 4)), changes.get("dtype", torch.float32)
        weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if changes.get("transposed"):
            weight = nn.Parameter(torch.zeros(shape[::-1], dtype=dtype).t())
        optimizers = [changes.get("optimizer", torch.optim.SGD)([weight])]
        named = [(changes.get("name", "weight"), weight)]
        buffers = [] if changes.get("parameter") else [("b", torch.zeros(2))]
        more = [("b", torch.zeros(2))] if changes.get("parameter") else []
        return FlatLayout.of(named + more, buffers, optimizers=optimizers, compression=changes.get("compression"))

    assert make().digest == make().digest
    changes = [
        {"shape": (4, 3)}, {"dtype": torch.float64}, {"name": "w"}, {"transposed": True}, {"parameter": True},
        {"optimizer": torch.optim.Adam}, {"compression": "bf16"}, {"compression": "fp16"},
    ]  # fmt: skip
    assert len({make(**change).digest for change in [{}, *changes]}) == len(changes) + 1


@pytest.mark.parametrize(("compression", "tolerance"), [(None, 0.0), ("bf16", 2**-8), ("fp16", 2**-11)])
def test_gradients_travel_in_their_own_format_or_in_16_bits(compression: Any, tolerance: float) -> None:
    named = [(name, tensor) for name, tensor in all_kinds() if tensor.dtype.is_floating_point or tensor.is_complex()]
    layout = FlatLayout.of(named, compression=compression)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    for i, (_, gradient) in enumerate(named):
        sent = layout.gradient_of(slot, i)
        sent.copy_(gradient)
        narrow = compression is not None and gradient.dtype in (torch.float32, torch.float64)
        assert sent.dtype == (gradient.dtype if not narrow else sent.dtype) and (sent.element_size() == 2 or not narrow)
        assert ((sent.to(gradient.dtype) - gradient).abs() <= (tolerance if narrow else 0.0) * gradient.abs()).all()
    with pytest.raises(ValueError, match="compression='int8' must be None, 'bf16' or 'fp16'"):
        check_compression("int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 6e4), (torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_a_single_bad_number_is_found_and_a_sum_that_overflows_blames_nobody(dtype: torch.dtype, large: float) -> None:
    gradient = torch.full((100,), large, dtype=dtype)
    assert is_finite(gradient)
    for bad in (torch.nan, torch.inf, -torch.inf):
        gradient[17] = bad
        assert not is_finite(gradient)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (nn.LazyLinear(2).weight, "lazy.*forward"),
    ],
)
def test_what_has_no_place_is_refused_by_name(tensor: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=f"'odd'.*{words}"):
        FlatLayout.of([("odd", tensor)])
