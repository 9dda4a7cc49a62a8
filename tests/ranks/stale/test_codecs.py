"""How gradients are written into slots: casts, and the largest entries with error feedback."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.stale.runtime.memory.codecs import Cast, Codec, TopK, by_name
from lightning_hetero.stale.runtime.memory.entry import Entry

pytestmark = pytest.mark.usefixtures("float64")


def travel(codec: Codec, gradient: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    entry = Entry.of("weight", gradient)
    data = torch.full((codec.bytes(entry),), 77, dtype=torch.uint8)
    memory = codec.encode(gradient, data, entry, memory)
    pool = entry.empty().fill_(math.nan)
    codec.put(pool, data, entry, 2.0)
    codec.add_to(pool, data, entry, -0.5)
    return pool / 1.5, memory


@pytest.mark.parametrize(
    ("codec", "tolerance"), [(None, 1e-15), ("bf16", 2**-8), ("fp16", 2**-11), (TopK(1.0), 1e-15)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(codec: Any, tolerance: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for gradient in (
        torch.randn(6, 5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(()),
    ):
        exact = gradient.to(dtype)
        received, _ = travel(by_name(codec), exact)
        assert received.stride() == exact.stride()
        error = ((received - exact).abs() / exact.abs()).max()
        assert error <= tolerance + (1e-6 if dtype is torch.float32 else 0.0)


def test_narrow_codecs_make_pushes_smaller() -> None:
    entry = Entry.of("w", torch.zeros(1000, dtype=torch.float32))
    assert by_name(None).bytes(entry) == 4000
    assert by_name("bf16").bytes(entry) == by_name("fp16").bytes(entry) == 2000
    assert TopK(0.01).bytes(entry) == 120
    assert by_name("bf16").bytes(Entry.of("c", torch.zeros(10, dtype=torch.complex64))) == 80


def test_topk_sends_the_largest_and_keeps_the_rest() -> None:
    gradient = torch.tensor([0.1, -5.0, 0.2, 3.0])
    received, memory = travel(TopK(0.5), gradient)
    assert memory is not None
    assert received.tolist() == pytest.approx([0.0, -5.0, 0.0, 3.0])
    assert memory.tolist() == pytest.approx([0.1, 0.0, 0.2, 0.0])


def test_with_error_feedback_the_sum_of_pushes_follows_the_sum_of_gradients() -> None:
    torch.manual_seed(0)
    codec, memory = TopK(0.1), None
    sent, total, rests = torch.zeros(40), torch.zeros(40), []
    constant = torch.randn(40)
    for step in range(1, 201):
        gradient = constant + 0.1 * torch.randn(40)
        received, memory = travel(codec, gradient, memory)
        sent, total = sent + received, total + gradient
        rests.append(float((sent - total).norm()) / step)
    assert memory is not None
    assert torch.allclose(sent + memory, total, rtol=0, atol=1e-10)  # nothing is ever lost
    assert rests[-1] < 0.1 * float(constant.norm()) < rests[0]


def test_topk_refuses_places_that_do_not_exist() -> None:
    codec, entry = TopK(0.5), Entry.of("weight", torch.zeros(4))
    data = torch.zeros(codec.bytes(entry), dtype=torch.uint8)
    data[:8].view(torch.int64)[0] = 4
    with pytest.raises(ValueError, match="'weight' has 4 entries"):
        codec.add_to(torch.zeros(4), data, entry, 1.0)


@pytest.mark.parametrize("codec", [None, "bf16", "fp16", TopK(0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_bad_number_is_found(codec: Any, bad: float) -> None:
    codec = by_name(codec)
    gradient = torch.randn(50)
    entry = Entry.of("w", gradient)
    data = torch.zeros(codec.bytes(entry), dtype=torch.uint8)
    codec.encode(gradient, data, entry, None)
    assert codec.finite(codec.values(data, entry))
    gradient[17] = bad
    codec.encode(gradient, data, entry, None)
    assert not codec.finite(codec.values(data, entry))


def test_a_sum_that_overflows_blames_nobody() -> None:
    for dtype, large in ((torch.float16, 6e4), (torch.float32, 3e38), (torch.float64, 1.7e308)):
        assert Cast().finite(torch.full((100,), large, dtype=dtype))


@pytest.mark.parametrize("codec", ["int8", "", "BF16"])
def test_unknown_codecs_are_named(codec: str) -> None:
    with pytest.raises(ValueError, match=f"compression={codec!r}.*'bf16', 'fp16'"):
        by_name(codec)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.1, math.nan])
def test_topk_ratio_is_checked(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"TopK\(ratio="):
        TopK(ratio)
