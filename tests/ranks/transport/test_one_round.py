"""Sums and rows that all ranks send one another at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.transport.one_round import start_gather, start_sum
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

WORLD = 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = ((), (1,), (0,), (5, 7), (20_000,), (40_000,))  # the last is too large for one round


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (8 * values).round().to(dtype)  # exact, in whatever order it is added up


def sums(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    found: list[tuple[Tensor, Tensor]] = []
    for dtype in DTYPES:
        for shape in SHAPES:
            total, most = (start_sum(own(rank, shape, dtype), group, largest=largest) for largest in (False, True))
            total.work.wait()
            most.work.wait()
            found.append((total.result(), most.result()))
    return found


def test_sums_and_greatest_values_of_all_dtypes_and_sizes() -> None:
    expected = []
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = torch.stack([own(rank, shape, dtype) for rank in range(WORLD)])
            expected.append((parts.sum(0, dtype=dtype), parts.amax(0)))
    for found in run_ranks(WORLD, sums):
        for (total, most), (whole, greatest) in zip(found, expected, strict=True):
            assert total.dtype == whole.dtype and torch.equal(total, whole) and torch.equal(most, greatest)


def rounding(rank: int, world: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    total = start_sum(torch.tensor([1e16, 1.0, -1e16])[rank].double().expand(4).contiguous(), group)
    total.work.wait()
    return total.result()


def test_all_ranks_add_in_the_order_of_ranks() -> None:
    assert [found.tolist() for found in run_ranks(WORLD, rounding)] == [[0.0] * 4] * WORLD, "1e16 + 1 is 1e16"


def rows(rank: int, world: int) -> list[list[float]]:
    group = dist.group.WORLD
    assert group is not None
    work, found = start_gather(torch.tensor([float(rank), float("nan"), -1.0 - rank]), group)
    work.wait()
    return found.nan_to_num(7.0).tolist()


def test_rows_of_all_ranks() -> None:
    assert run_ranks(WORLD, rows) == [[[r, 7.0, -1.0 - r] for r in range(WORLD)]] * WORLD
