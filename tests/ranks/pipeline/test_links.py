"""What travels between stages: values to bytes and back, order, emulated links, and ends that are told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.decide.schedule import What
from lightning_hetero.pipeline.runtime.execute.messages import Message, Pass, pack, unpack
from lightning_hetero.pipeline.runtime.execute.pace import SlowClock
from lightning_hetero.pipeline.runtime.execute.stage_links import StageLinks
from lightning_hetero.pipeline.runtime.execute.stages import Stage
from lightning_hetero.pipeline.runtime.step.tensor_trees import split
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.types import Link
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline.models import assert_same


def divide(value: Any) -> float:
    return 1.0 / value


def board(rank: int, name: str, patience_s: float = 0.2) -> FailureBoard:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return FailureBoard(RunStore(store, b""), rank, patience_s=patience_s)


# ---- messages ----------------------------------------------------------------------------------------------------


def values() -> list[Any]:
    x = torch.randn(2, 3, 4, 5)
    return [
        x,
        x.to(memory_format=torch.channels_last),
        x.transpose(1, 3)[:, ::2],  # neither dense nor in order
        x[:, :1].expand(2, 3, 4, 5),
        torch.tensor(3.5),
        torch.empty(0, 3),
        (x[0], (), (torch.arange(5), (x[1] > 0, None)), x[0].bfloat16()),
        (torch.randn(3, dtype=torch.complex64).conj(), torch.ones(1, dtype=torch.int8), torch.randn(2).double()),
        tuple(torch.full((1,), i) for i in range(100)),  # its header does not fit into the head
        None,
    ]


def test_a_message_comes_as_it_was_when_it_was_sent() -> None:
    for value in values():
        message = Message(
            what=What.ACTIVATION,
            stage=3,
            micro_batch=5,
            value=value,
            requires_grad=(True, False),
            way=Pass(step=2, number=9, call=1, autocast={"cpu": torch.bfloat16}),
            step=2,
            samples=7,
        )
        header, payload = pack(message)
        before = unpack(header, payload.clone())
        assert_same(before.value, value)
        for name in ("what", "stage", "micro_batch", "requires_grad", "samples", "way"):
            assert getattr(before, name) == getattr(message, name)
        for tensor in split(value)[0]:
            if tensor.numel() and not tensor.is_complex() and tensor.stride()[:2] != (60, 0):
                tensor.zero_()
        assert_same(unpack(header, payload).value, before.value)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert unpack(*pack(Message(what=What.GRADIENT, value=image))).value.stride() == image.stride()


@pytest.mark.parametrize("value", [{"x": torch.ones(1)}, [torch.ones(1)], 3, torch.ones(2, 2).to_sparse()])
def test_what_cannot_travel_is_named(value: Any) -> None:
    name = "layout torch.sparse" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    with pytest.raises(TypeError, match=f"returned (a tensor of )?{name}.*change what the layer returns"):
        pack(Message(what=What.ACTIVATION, value=(torch.ones(1), value)))


# ---- links -------------------------------------------------------------------------------------------------------


def exchange(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"device": torch.device("cpu"), "failures": board(rank, "a", 3.0), "timeout_s": 20.0}
    for _ in range(2):  # one after the other on the same wire
        links = StageLinks(dist.group.WORLD, rank, [1 - rank], **options)
        for m, value in enumerate(values()):  # both at once, unasked
            links.send(1 - rank, Message(what=What.ACTIVATION, micro_batch=m, value=value))
        torch.manual_seed(0)
        for m in range(len(values())):
            message = links.receive(1 - rank)
            assert message.micro_batch == m
        assert_same(message.value, None)
        links.close()
        links.close()

    # Over an emulated link of 1 MB/s and 10 ms one message follows the other, 20 ms each; the other way there is none.
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=0.01)

    def clock(peer: int) -> Any:
        return SlowClock(link, lambda: None) if rank == 1 else LinkClock()

    links = StageLinks(dist.group.WORLD, rank, [1 - rank], clock=clock, **options)
    message = Message(what=What.ACTIVATION, value=torch.zeros(20_000, dtype=torch.uint8))
    links.send(1 - rank, message)
    links.receive(1 - rank)
    dist.barrier()
    links.times()
    start_s = time.monotonic()
    dist.barrier()
    if rank == 0:
        for _ in range(3):
            links.send(1, message)
        links.receive(1)
    else:
        for i in range(3):
            links.receive(0)
            assert time.monotonic() - start_s >= 0.02 * (i + 1) + 0.01
        links.send(0, message)
    [found] = links.times()
    assert (found.source, found.target, found.messages, found.size_bytes) == (1 - rank, rank, 1, 20_032.0)
    assert found.seconds >= (0.03 if rank == 1 else 0.0), "the first of three: the others had to queue"
    assert links.times() == []
    links.close()

    # A neighbour that sends nothing, and one that gives up while it is waited for.
    wire = dist.new_group(backend="gloo")
    links = StageLinks(wire, rank, [1 - rank], **{**options, "timeout_s": 20.0 if rank else 0.3})
    with pytest.raises(RuntimeError, match=r"rank 0 gave up waiting for rank 1, .*: it sent nothing for 0.3 s"):
        links.receive(1 - rank)
    links.abort()
    if rank == 1:
        links.abort()
        links.close()
    dist.barrier()

    # Whatever goes wrong in the sending thread, the training thread raises it.
    given = {**options, "failures": board(rank, "thread")}
    links = StageLinks(dist.new_group(backend="gloo"), rank, [1 - rank], **given)
    if rank == 0:
        links._links[1]._let_out = lambda job: divide(job.parts)  # type: ignore[method-assign]
        with pytest.raises(TypeError, match="unsupported operand"):
            while True:
                links.send(1, message)
    else:
        with pytest.raises(RuntimeError, match="connection is closed"):
            while True:
                links.receive(0)
    links.abort()
    dist.barrier()
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
        raise board(rank, "gone").lost(2, "a test")
    dist.barrier()
    if rank == 1:
        try:
            raise ValueError("the cause")
        except ValueError as error:
            board(rank, "d").report(error)
        board(rank, "d").report(KeyError("a consequence"))
    lost = board(rank, "d", patience_s=20.0).lost(1, "a test")
    assert str(lost) == "rank 1 failed: ValueError: the cause"
    assert "test_links.py" in str(lost.__cause__)
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: the cause"):
        board(rank, "d").check()
    board(rank, "c").check()


def test_links_of_two_ranks() -> None:
    run_ranks(2, exchange)


# ---- stages ------------------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Remembers where the memory is of what it returned; for one row, autograd gives both terms one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.address = 0

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight.unsqueeze(0)
        self.address = y.untyped_storage()._cdata
        return y


def test_a_stage_keeps_no_outputs_and_goes_back() -> None:
    layer = Remembering()
    stage = Stage({0: layer}, last=True, seed=0, checkpoint_layers=False, device=torch.device("cpu"))
    way = Pass(step=0, number=0, autocast={})
    outputs, flight = stage.forward(torch.ones(1, 4), [True], way)
    assert outputs.untyped_storage()._cdata == layer.address and not outputs.requires_grad
    watched = torch.multiprocessing.reductions.StorageWeakRef(outputs.untyped_storage())
    del outputs
    assert watched.expired()
    _, other = stage.forward(torch.ones(1, 4), [True], way)
    (grad,) = flight.backward([torch.full((1, 4), 2.0)])
    (later,) = other.backward([torch.full((1, 4), 3.0)])
    assert grad is not None and later is not None and layer.weight.grad is not None
    assert (grad.tolist(), later.tolist()) == ([[2.0] * 4], [[3.0] * 4])
    assert layer.weight.grad.tolist() == [5.0] * 4

    # Nothing wants a gradient: nothing is kept at all, parameters handed out under no_grad included.
    stage = Stage({0: nn.Identity()}, last=True, seed=0, checkpoint_layers=False, device=torch.device("cpu"))
    way = Pass(step=0, number=0, autocast={}, grad_enabled=False)
    outputs, flight = stage.forward(layer.weight, [False], way)
    assert not outputs.requires_grad
    assert flight.output_flags == (False,) and flight.backward(None) == [None]
