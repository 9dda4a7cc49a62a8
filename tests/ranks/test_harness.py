"""The rank harness itself: results, errors, collectives, Lightning, hangs."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.harness import RankEnvironment, RankTimeoutError, RankTracebackError, run_ranks, worker_pids


def describe(rank: int, world_size: int, factor: int) -> tuple[int, int, int, int, int]:
    return rank, dist.get_rank(), dist.get_world_size(), rank_zero_only.rank or 0, factor * world_size


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def allreduce(rank: int, world_size: int, value: torch.Tensor) -> torch.Tensor:
    total = value * (rank + 1)
    dist.all_reduce(total)
    return total


def fail_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ZeroDivisionError(f"rank {rank} fails on purpose")
    dist.barrier()  # the others wait for the culprit


def die_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        threading.Event().wait()


def stand_still(event: Any) -> None:
    event.wait()


def hang_in_child(rank: int, world_size: int) -> None:
    """As in a DataLoader worker."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=stand_still, args=(context.Event(),), daemon=True)
    child.start()
    child.join()


def return_lambda(rank: int, world_size: int) -> Any:
    return lambda: None


def leave_thread(rank: int, world_size: int) -> None:
    threading.Thread(target=threading.Event().wait, args=(5.0,), name="forgotten").start()


def dirty(rank: int, world_size: int) -> None:
    os.environ["HETERO_LEFTOVER"] = "1"
    with open("droppings.txt", "a") as file:
        file.write("x")


def leftovers(rank: int, world_size: int) -> tuple[bool, list[str]]:
    return "HETERO_LEFTOVER" in os.environ, os.listdir()


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        x = torch.arange(64.0).reshape(16, 4) / 64
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def fit(rank: int, world_size: int) -> tuple[int, bool, int, float, list[float]]:
    model = Line()
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[RankEnvironment(rank, world_size)],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    loss = float(trainer.callback_metrics["loss"])
    return trainer.global_rank, trainer.is_global_zero, trainer.global_step, loss, weights


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    expected = [(rank, rank, world_size, rank, 3 * world_size) for rank in range(world_size)]
    assert run_ranks(world_size, describe, 3) == expected


def test_workers_outlive_the_job() -> None:
    first = run_ranks(2, pid)
    assert run_ranks(2, pid) == first
    assert set(first) <= worker_pids()
    assert os.getpid() not in first


def test_allreduce_adds_over_ranks() -> None:
    for result in run_ranks(4, allreduce, torch.tensor([1.0, 2.0])):
        assert torch.equal(result, torch.tensor([10.0, 20.0]))


def test_an_exception_is_raised_again_with_the_ranks_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="rank 1 fails on purpose") as caught:
        run_ranks(2, fail_on, 1)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTracebackError)
    assert "rank 1:" in str(cause) and "in fail_on" in str(cause)
    assert len(run_ranks(2, pid)) == 2  # the next job is not harmed


def test_a_dead_rank_is_reported_and_replaced() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died with exit code 7"):
        run_ranks(2, die_on, 0)
    assert len(run_ranks(2, pid)) == 2


def test_a_hang_is_killed_and_shows_where() -> None:
    before = run_ranks(2, pid)
    with pytest.raises(RankTimeoutError, match=r"ranks \[1\] did not finish within 1.0 s, killed") as caught:
        run_ranks(2, hang_on, 1, timeout_s=1.0)
    assert "in hang_on" in str(caught.value)
    assert set(run_ranks(2, pid)).isdisjoint(before)


def test_a_hang_shows_where_children_stand() -> None:
    with pytest.raises(RankTimeoutError, match="in stand_still"):
        run_ranks(1, hang_in_child, timeout_s=2.0)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        run_ranks(2, return_lambda)


def test_a_thread_left_behind_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"left threads behind: \['forgotten'\]"):
        run_ranks(2, leave_thread)


def test_jobs_do_not_see_each_others_leftovers() -> None:
    run_ranks(2, dirty)
    assert run_ranks(2, leftovers) == [(False, []), (False, [])]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(0, pid)
    with pytest.raises(TypeError, match="module level"):
        run_ranks(2, lambda rank, world_size: None)
    with pytest.raises(ValueError, match="rank=2 must be in"):
        RankEnvironment(2, 2)


def test_a_stock_ddp_fit_agrees_on_all_ranks() -> None:
    (rank0, zero0, steps0, loss0, weights0), (rank1, zero1, steps1, loss1, weights1) = run_ranks(2, fit)
    assert (rank0, rank1) == (0, 1)
    assert (zero0, zero1) == (True, False)
    assert steps0 == steps1 == 4  # 16 samples, batches of 4, 2 ranks, 2 epochs
    assert weights0 == weights1
    assert loss0 == loss1


def test_devices_must_match_the_ranks() -> None:
    with pytest.raises(ValueError, match="wants 3 processes, run_ranks has 2"):
        RankEnvironment(0, 2).set_world_size(3)
