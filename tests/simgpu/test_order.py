"""The proof of order finds what may hang NCCL, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim.check import Entry, check

PAIR = (0, 1)
SHAPE = (((3,), "torch.float32"),)


def _op(issue: int, communicator: str, op: str, peer: int | None = None, shapes: object = SHAPE) -> Entry:
    return Entry("op", issue, communicator, PAIR, op, peer, shapes, f"{op} {issue}", "main")  # type: ignore[arg-type]


def test_the_same_order_on_all_ranks_is_right() -> None:
    log = [_op(0, "a", "allreduce"), _op(1, "b", "broadcast"), _op(2, "a", "barrier")]
    assert check({0: log, 1: log}, serial=True) == []


def test_another_operation_another_shape_and_a_missing_part_are_told() -> None:
    one, other = [_op(0, "a", "allreduce")], [_op(0, "a", "broadcast")]
    assert "several operations" in check({0: one, 1: other}, serial=True)[0]
    wide = [_op(0, "a", "allreduce", shapes=(((4,), "torch.float32"),))]
    assert "shapes or dtypes differ" in check({0: one, 1: wide}, serial=True)[0]
    assert "issued by ranks [0]" in check({0: one, 1: []}, serial=True)[0]


def test_communicators_in_another_order_hang_only_if_kernels_run_one_after_the_other() -> None:
    logs = {0: [_op(0, "a", "allreduce"), _op(1, "b", "allreduce")],
            1: [_op(0, "b", "allreduce"), _op(1, "a", "allreduce")]}  # fmt: skip
    assert check(logs, serial=False) == []
    (wrong,) = check(logs, serial=True)
    assert "in a circle (kernels of a device one after the other)" in wrong and "allreduce 1" in wrong


def test_what_the_host_knows_to_have_ended_is_not_waited_for() -> None:
    logs = {0: [_op(0, "a", "allreduce"), _op(1, "b", "allreduce")],
            1: [_op(0, "b", "allreduce"), Entry("known", 0), _op(1, "a", "allreduce")]}  # fmt: skip
    assert check(logs, serial=True) == []


def test_messages_that_wait_for_one_another_on_one_communicator_hang_always() -> None:
    logs = {rank: [_op(0, "a", "recv", 1 - rank), _op(1, "a", "send", 1 - rank)] for rank in PAIR}
    (wrong,) = check(logs, serial=False)
    assert "in a circle (a stream per communicator)" in wrong


# ---- real runs


def _in_another_order(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    x = torch.ones(3, device="cuda")
    y = torch.ones(3, device="cuda")
    works = [dist.all_reduce(t, group=groups[i], async_op=True) for i, t in ((rank, x), (1 - rank, y))]
    for work in works:
        assert work is not None
        work.wait()


def test_a_run_whose_order_may_hang_fails() -> None:
    with pytest.raises(AssertionError, match="NCCL may hang:\noperations may wait for one another in a circle"):
        run_sim_ranks(2, _in_another_order, nccl=True)
    run_sim_ranks(2, _in_another_order, nccl=True, circle_known="the fault is planted")


def _of_other_shape(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    x = torch.ones((2, 3) if rank else (3, 2), device="cuda")  # as many elements: gloo does not see it
    dist.all_reduce(x)


def test_a_run_in_which_shapes_differ_fails() -> None:
    with pytest.raises(AssertionError, match="shapes or dtypes differ"):
        run_sim_ranks(2, _of_other_shape, nccl=True)


def _on_the_host(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.ones(3))


def test_nccl_takes_no_tensor_of_the_host() -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        run_sim_ranks(2, _on_the_host, nccl=True)


def _on_one_card(rank: int, world: int) -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    dist.all_reduce(torch.ones(3, device="cuda:0"))


def test_nccl_takes_no_two_ranks_on_one_card() -> None:
    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        run_sim_ranks(2, _on_one_card, gpus=1, nccl=True)


def _on_another_card(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.ones(3, device=f"cuda:{1 - rank}"))


def test_a_communicator_is_bound_to_its_device() -> None:
    with pytest.raises(RuntimeError, match="the communicator is bound to cuda:"):
        run_sim_ranks(2, _on_another_card, nccl=True)
