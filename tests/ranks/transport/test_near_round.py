"""What all ranks of a node have for one another: the right bytes, in any order of waiting, and errors that name why."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.transport.one_node.near_round import SLOT_BYTES, NearWork
from lightning_hetero.transport.small_sums import start_sums
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline.near_kit import board, near_round

pytestmark = pytest.mark.ranks

WORLD = 3
ROUNDS = 40


def pieces_of(rank: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    sizes = torch.Generator().manual_seed(number)  # the same on all ranks
    return [
        torch.randint(256, (int(size),), generator=generator, dtype=torch.uint8)
        for size in torch.randint(0, 3000, (1 + number % 3,), generator=sizes)
    ]


def expected(number: int) -> Tensor:
    return torch.stack([torch.cat(pieces_of(rank, number)) for rank in range(WORLD)])


def rounds(rank: int, world: int) -> None:
    with near_round(rank, world) as near:
        before: tuple[NearWork, Tensor, int] | None = None
        for number in range(ROUNDS):
            work, rows = near.start(pieces_of(rank, number))
            if (rank + number) % 3 == 0:  # ranks are late in turn
                time.sleep(0.002)
            if before is not None:
                before[0].wait()
                assert torch.equal(before[1], expected(before[2]))
                before = None
            if number % 2:  # every other round is left open until the next has begun
                before = work, rows, number
                continue
            while not work.is_completed():
                time.sleep(0.0005)
            assert work.wait(timedelta(0)) and torch.equal(rows, expected(number))
        assert near.takes(SLOT_BYTES) and not near.takes(SLOT_BYTES + 1)
        last = [near.start([torch.full((SLOT_BYTES,), rank, dtype=torch.uint8)]) for _ in range(1)]
        assert before is not None and not near.takes(1), "two are open"
        before[0].wait()
        assert near.takes(1)
        last[0][0].wait()
        assert last[0][1].to(torch.int64).sum() == SLOT_BYTES * sum(range(WORLD))
        dist.barrier()  # nobody closes before all have read


def test_every_rank_gets_the_bytes_of_all() -> None:
    run_ranks(WORLD, rounds)


def sums(rank: int, world: int) -> list[list[Tensor]]:
    """By memory, by gloo, and too large for one message."""
    group = dist.group.WORLD
    assert group is not None
    found: list[list[Tensor]] = []
    with near_round(rank, world) as near:
        for way, more in ((near, 0), (None, 0), (near, 40_000)):
            tensors = [
                torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)[rank].repeat(3),
                torch.arange(5 + more, dtype=torch.float32).reshape(5, -1) * rank,
                torch.tensor(rank, dtype=torch.int64),
                torch.full((3,), 0.1 * rank, dtype=torch.bfloat16),
            ]
            totals = start_sums(tensors, group, near=way)
            for total in totals:
                board(rank).wait(total.work)
            found.append([total.result().clone() for total in totals])
            works = {id(total.work) for total in totals}
            assert (len(works) == 1) == (more == 0), "small ones share a message"
        dist.barrier()
    return found


def test_sums_of_several_tensors_are_the_same_by_any_way_and_on_all_ranks() -> None:
    first, *others = run_ranks(WORLD, sums)
    for found in others:
        for mine, its in zip(first, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    near, gloo, large = first
    assert all(torch.equal(a, b) for a, b in zip(near, gloo, strict=True))
    assert near[0].tolist() == [0.0] * 3, "in the order of ranks: 1e16 + 1 is 1e16"
    assert torch.equal(near[1], torch.arange(5.0).reshape(5, 1) * 3) and int(near[2]) == 3
    assert large[1].shape == (5, 8001) and torch.equal(large[1].reshape(-1), torch.arange(40_005.0) * 3)


def dead(rank: int, world: int) -> str:
    with near_round(rank, world) as near:
        if rank == 2:
            return ""
        work, _ = near.start([torch.zeros(8, dtype=torch.uint8)])
        with pytest.raises(RuntimeError) as caught:
            board(rank).wait(work)
        assert work.is_completed()
        return str(caught.value)


def test_a_rank_that_is_gone_is_named() -> None:
    *errors, _ = run_ranks(WORLD, dead)
    assert all("rank 2" in error and "its connection is closed" in error for error in errors), errors


def silent(rank: int, world: int) -> tuple[str, float]:
    with near_round(rank, world, timeout_s=1.5) as near:
        found = "", 0.0
        if rank != 1:
            began_s = time.monotonic()
            work, _ = near.start([torch.zeros(8, dtype=torch.uint8)])
            with pytest.raises(RuntimeError, match=r"not all ranks have come within 0.05 s"):
                work.wait(timedelta(seconds=0.05))
            assert not work.is_completed()
            with pytest.raises(RuntimeError) as caught:
                board(rank).wait(work)
            found = str(caught.value), time.monotonic() - began_s
        dist.barrier()
        return found


def test_a_rank_that_says_nothing_is_named_after_the_timeout() -> None:
    for rank, (error, seconds) in enumerate(run_ranks(WORLD, silent)):
        if rank != 1:
            assert "rank 1" in error and "for 1.5 s, the timeout" in error, error
            assert seconds < 10.0


def told(rank: int, world: int) -> str:
    with near_round(rank, world) as near:
        if rank == 0:
            board(rank).report(RuntimeError("out of memory"))
            return ""
        work, _ = near.start([torch.zeros(8, dtype=torch.uint8)])
        with pytest.raises(RuntimeError) as caught:
            board(rank).wait(work)
        return str(caught.value)


def test_what_a_failed_rank_has_reported_is_the_error() -> None:
    _, *errors = run_ranks(WORLD, told)
    assert all("out of memory" in error for error in errors), errors


