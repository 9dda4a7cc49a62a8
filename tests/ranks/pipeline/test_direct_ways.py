"""Payloads that go past the hosts' memory: the same code, with gloo's groups and CPU tensors for NCCL's and GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.pipeline.decide.links import RankDevice
from lightning_hetero.pipeline.decide.schedule import What
from lightning_hetero.pipeline.fit import wires
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWays, rank_device
from lightning_hetero.pipeline.runtime.execute.messages import Message
from lightning_hetero.pipeline.runtime.execute.stage_links import StageLinks
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, regression, single, weights
from tests.ranks.pipeline.kit import SAMPLES, Deep, fit, pipeline
from tests.ranks.pipeline.models import assert_same

CPU = torch.device("cpu")


def board(rank: int, name: str) -> FailureBoard:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return FailureBoard(RunStore(store, b""), rank, patience_s=0.2)


def ways_of(rank: int, pairs: list[tuple[int, int]]) -> DirectWays:
    ways = DirectWays(rank, backend="gloo", timeout=None, device=CPU)
    ways.prepare(pairs)
    return ways


def values() -> list[Any]:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    return [
        x,
        x.to(memory_format=torch.channels_last),
        torch.empty(0, 3),  # nothing goes over the way
        None,
        tuple(torch.full((1,), i) for i in range(100)),  # its header does not fit into the head
        torch.arange(3_000_000, dtype=torch.float64),  # more than the sockets hold
        (x[0], (torch.arange(5), (x[1] > 0, None)), x[0].bfloat16()),
    ]


def exchange(rank: int, world: int) -> None:
    ways = ways_of(rank, [(0, 1), (1, 0)])
    options: dict[str, Any] = {"device": CPU, "failures": board(rank, "a"), "timeout_s": 20.0}
    links = StageLinks(dist.new_group(backend="gloo"), rank, [1 - rank], ways=ways.by_peer, **options)
    way, directly = ways.by_peer[1 - rank], []
    send = way.send
    way.send = lambda payload, announce: directly.append(len(payload)) or send(payload, announce)  # type: ignore[method-assign]
    for step in range(3):
        for m, value in enumerate(values()):  # both at once, unasked, and larger than what is buffered
            links.send(1 - rank, Message(what=What.ACTIVATION, micro_batch=m, value=value))
        for m, value in enumerate(values()):
            message = links.receive(1 - rank)
            assert message.micro_batch == m
            assert_same(message.value, value)
        links.settle()
        assert len(directly) == 5 * step  # a step goes over the hosts first; then all but what is empty
    assert max(directly) == 24_000_000
    links.send(1 - rank, Message(what=What.ACTIVATION, samples=7, value=torch.ones(5)))  # of another kind
    assert_same(links.receive(1 - rank).value, torch.ones(5))
    links.settle()
    assert len(directly) == 10
    links.close()
    ways.close()

    # A neighbour that announces and falls silent; its own end hears of it when the other gives up.
    ways = ways_of(rank, [(0, 1), (1, 0)])
    options = {"device": CPU, "failures": board(rank, "b"), "timeout_s": 20.0 if rank else 1.0}
    links = StageLinks(dist.new_group(backend="gloo"), rank, [1 - rank], ways=ways.by_peer, **options)
    links.send(1 - rank, Message(what=What.ACTIVATION, value=torch.ones(5)))
    links.receive(1 - rank)
    links.settle()
    if rank == 1:
        ways.by_peer[0].send = lambda payload, announce: announce()  # type: ignore[method-assign]
        links.send(0, Message(what=What.ACTIVATION, value=torch.ones(5)))
    options["failures"]
    options["failures"].watch()
    with pytest.raises(RuntimeError, match=r"rank 0 gave up waiting for rank 1, .*sent nothing for 1 s, the timeout"):
        links.receive(1 - rank)
    links.abort()
    links.abort()
    links.close()

    # Who has no room for what comes says so itself.
    ways = ways_of(rank, [(0, 1), (1, 0)])
    options = {"device": CPU, "failures": board(rank, "c"), "timeout_s": 20.0}
    links = StageLinks(dist.new_group(backend="gloo"), rank, [1 - rank], ways=ways.by_peer, **options)
    links.send(1 - rank, Message(what=What.ACTIVATION, value=torch.ones(5)))
    links.receive(1 - rank)
    links.settle()
    if rank == 0:
        ways.by_peer[1].receive = out_of_memory  # type: ignore[method-assign]
    dist.barrier()
    if rank == 0:
        with pytest.raises(torch.OutOfMemoryError, match="nothing left"):
            links.receive(1)
        with pytest.raises(torch.OutOfMemoryError, match="nothing left"):
            links.send(1, Message(what=What.ACTIVATION, value=torch.ones(5)))  # still goes out
        dist.barrier()
        options["failures"].report(torch.OutOfMemoryError("nothing left"))
    else:
        links.send(0, Message(what=What.ACTIVATION, value=torch.ones(5)))
        links.receive(0)
        dist.barrier()
        with pytest.raises(RuntimeError, match="rank 0 failed: OutOfMemoryError: nothing left"):
            links.receive(0)
    links.abort()

    # What is polled, as NCCL's collectives have to be, is looked after likewise.
    own, tensor = board(rank, "d"), torch.ones(1)
    own.wait(dist.all_reduce(tensor, async_op=True), polled=True)
    assert tensor.item() == 2.0
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: the cause"):
            own.wait(work, polled=True)
        dist.distributed_c10d._get_default_store().set("seen", "yes")
        work.wait()
    else:
        own.report(ValueError("the cause"))
        dist.distributed_c10d._get_default_store().wait(["seen"])
        dist.all_reduce(tensor)


def out_of_memory(size_bytes: int, clear: Any) -> Tensor:
    raise torch.OutOfMemoryError("nothing left")


def test_links_with_direct_ways() -> None:
    run_ranks(2, exchange, timeout_s=30.0)


# ---- in a fit ----------------------------------------------------------------------------------------------------


def made_direct(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Takes each rank's CPU for a device of its own, with gloo as its backend."""
    monkeypatch.setattr(wires, "rank_device", lambda *_: RankDevice(identity=f"own-{rank}", backend="gloo"))


def trained(rank: int, world: int, plan: str) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made_direct(monkeypatch, rank)
        connected: list[int] = []
        prepare = DirectWays.prepare

        def noted(ways: DirectWays, pairs: Any) -> None:
            prepare(ways, pairs)
            connected.append(len(ways.by_peer))

        monkeypatch.setattr(DirectWays, "prepare", noted)
        found, _ = fit(rank, world, Deep(), pipeline(plan), max_epochs=1, validate=True)
    assert connected == [1 if plan == "2x2" else 2]
    return found


@cache
def alone() -> Weights:
    module = Deep()
    single(module, regression(SAMPLES), 16, max_epochs=1)
    return weights(module)


@pytest.mark.parametrize("plan", ["1x4", "2x2"])
def test_a_fit_over_direct_ways_trains_the_weights_of_one_process(plan: str) -> None:
    for found in run_ranks(4, trained, plan, timeout_s=120.0):
        assert found.distance(alone()) <= 1e-12


def test_which_devices_have_a_way() -> None:
    assert rank_device(CPU, "nccl") == RankDevice(identity="", backend="")
