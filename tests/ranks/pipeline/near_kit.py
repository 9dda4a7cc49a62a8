"""Ways between the ranks of a test, which are all of one node, as the strategy makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.transport.one_node.near_round import NearRound
from lightning_hetero.transport.one_node.neighbours import Neighbours
from lightning_hetero.transport.side_channel import SideChannel


def board(rank: int) -> FailureBoard:
    store = dist.PrefixStore("near", dist.distributed_c10d._get_default_store())
    return FailureBoard(store, rank, patience_s=0.2)


@contextmanager
def near_round(rank: int, world: int, timeout_s: float = 60.0) -> Iterator[NearRound]:
    """Makes one; collective."""
    assert dist.group.WORLD is not None
    node = Neighbours(SideChannel(dist.group.WORLD), torch.device("cpu"))
    try:
        near = NearRound(node, rank, world, failures=board(rank), timeout_s=timeout_s)
    finally:
        node.close()
    try:
        yield near
    finally:
        near.close()
