"""Trains in a loop by hand: plain DDP, Accelerate, torchft, hivemind; each as its own documentation does it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from benchmarks.peers.cases import (
    CLUSTERS,
    GLOBAL_BATCH,
    LIMIT_S,
    PER_RANK,
    QUICK_LIMIT_S,
    SYNC_EVERY,
    UPDATES,
    WORLD,
    Run,
)
from benchmarks.peers.device import Device
from benchmarks.peers.task import Curve, datasets, net_of, optimizer_of, recipe, schedule_of

MATCHMAKING_S = 0.5  # of hivemind; its documentation has 3 to 5 s for small local runs

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How a library does what a loop is made of.

    Attributes:
        forward: images to logits.
        backward: of the loss.
        zero: makes ready for a batch.
        step: after the backward pass, told the samples.
        batches: without an end.
        updates: made so far; None: one per batch.
        limit_s: ends the loop, whatever has been done [s].
        servers: that end if nobody holds them.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], None]
    zero: Callable[[], None]
    step: Callable[[int], None]
    batches: Batches
    updates: Callable[[], int] | None = None
    limit_s: float = math.inf
    servers: tuple[Any, ...] = ()


def train(run: Run, rank: int, curve: Curve) -> dict[str, Any]:
    """Trains; returns what this rank saw."""
    dist.init_process_group("gloo")
    net = net_of(run.seed)
    device = Device(net, next(c for c in CLUSTERS if c.name == run.cluster), run.seed, rank)
    parts = _PARTS[run.peer](run, rank, net)
    seen: list[int] = []
    dist.barrier()
    curve.begin()
    while (updates := len(seen) if parts.updates is None else parts.updates()) < run.updates:
        if curve.running_s() > parts.limit_s:
            break
        curve.look(updates, net.parameters())
        images, labels = next(parts.batches)
        with device.batch(len(seen), len(labels)):
            parts.zero()
            loss = cross_entropy(parts.forward(images), labels)
            with device.backward(loss):
                parts.backward(loss)
            parts.step(len(labels))
        seen.append(len(labels))
    curve.end()
    curve.close(updates, net.parameters())
    dist.barrier()
    return {"updates": updates, "samples": seen, "taken": device.taken()}


def _endless(loader: Any, sampler: Any) -> Batches:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def _equal(run: Run, rank: int) -> Batches:
    """The batches of stock DDP."""
    data = datasets()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(data, WORLD, rank, seed=run.seed)
    return _endless(DataLoader(data, batch_size=PER_RANK, sampler=sampler), sampler)


def _stepping(optimizer: Any, schedule: LRScheduler) -> Callable[[int], None]:
    def step(samples: int) -> None:
        optimizer.step()
        schedule.step()

    return step


def _ddp(run: Run, rank: int, net: nn.Module) -> Parts:
    optimizer, schedule = recipe(net.parameters(), run.updates)
    return Parts(
        forward=DistributedDataParallel(net),
        backward=Tensor.backward,
        zero=optimizer.zero_grad,
        step=_stepping(optimizer, schedule),
        batches=_equal(run, rank),
    )


def _accelerate(run: Run, rank: int, net: nn.Module) -> Parts:
    """Batches of unequal sizes, dealt in turn."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from benchmarks.peers.under_lightning import Dealt, shares_of

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    optimizer, schedule = recipe(net.parameters(), run.updates)
    dealt = Dealt(run.seed, shares_of(run), rank=None)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(datasets()[0], batch_sampler=dealt))
    return Parts(
        forward=model,
        backward=accelerator.backward,
        zero=optimizer.zero_grad,
        step=_stepping(optimizer, schedule),
        batches=itertools.chain.from_iterable(itertools.repeat(loader)),
    )


def _torchft(run: Run, rank: int, net: nn.Module) -> Parts:
    """Every rank is a replica of its own; gradients are averaged, or every few steps the weights."""
    from torchft import DistributedDataParallel as ReplicatedModel
    from torchft import Manager, ProcessGroupGloo
    from torchft import Optimizer as CommittingOptimizer
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    local = run.peer.endswith("LocalSGD")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=WORLD) if rank == 0 else None
    where: list[Any] = [lighthouse and lighthouse.address()]
    dist.broadcast_object_list(where)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    optimizer, schedule = recipe(net.parameters(), run.updates)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: None,  # nobody is lost, and all begin with the same weights
        state_dict=dict,
        min_replica_size=WORLD,
        use_async_quorum=not local,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=where[0],
        replica_id=f"rank{rank}",
        hostname="127.0.0.1",
    )
    model: nn.Module = net
    stepping: Any = optimizer
    if local:
        LocalSGD(manager, net, optimizer, sync_every=SYNC_EVERY).__enter__()  # to the end of the process
    else:
        model, stepping = ReplicatedModel(manager, net), CommittingOptimizer(manager, optimizer)
    return Parts(
        forward=model,
        backward=Tensor.backward,
        zero=stepping.zero_grad,
        step=_stepping(stepping, schedule),
        batches=_equal(run, rank),
        servers=(lighthouse, store, manager),
    )


def _hivemind(run: Run, rank: int, net: nn.Module) -> Parts:
    """Peers add samples to an update until there are enough; each draws its own, without an end."""
    import hivemind

    where: list[Any] = [None]
    if rank == 0:
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        where = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(where)
    if rank != 0:
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=where[0])
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        target_batch_size=GLOBAL_BATCH,
        batch_size_per_step=PER_RANK,
        params=net.parameters(),
        optimizer=lambda parameters: optimizer_of(parameters),
        scheduler=lambda own: schedule_of(own, run.updates),
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=10.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
    )

    data = datasets()[0]
    sampler: RandomSampler = RandomSampler(data, generator=torch.Generator().manual_seed(run.seed * WORLD + rank))
    loader = DataLoader(data, batch_size=PER_RANK, sampler=sampler)
    return Parts(
        forward=net,
        backward=Tensor.backward,
        zero=optimizer.zero_grad,
        step=lambda samples: optimizer.step(batch_size=samples),
        batches=itertools.chain.from_iterable(itertools.repeat(loader)),
        updates=lambda: optimizer.local_epoch,
        limit_s=LIMIT_S if run.updates >= UPDATES else QUICK_LIMIT_S,
        servers=(dht,),
    )


_PARTS: dict[str, Callable[[Run, int, nn.Module], Parts]] = {
    "DDP, plain loop": _ddp,
    "Accelerate, uneven batches": _accelerate,
    "torchft DDP": _torchft,
    "torchft LocalSGD": _torchft,
    "hivemind": _hivemind,
}
