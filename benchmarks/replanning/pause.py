"""One rank of the pause part; started by torchrun, rank 0 writes what each change of owner took as JSON.

Layers with Adam's state go from one rank to the other and back, by the engine's own migration. Before each, as many
bytes in one piece by gloo's send, as what a link between them gives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.torchrun import as_rank
from lightning_hetero.pipeline.runtime.ownership.migration import Migration
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.ownership.pruning import prune
from lightning_hetero.types import GroupPlan, PipelinePlan

CPU = torch.device("cpu")
WIDTH = 1024
SIZES = {"12.6 MB": 1, "101 MB": 8, "302 MB": 24}  # layers: 4.2 MB of parameters each, and twice that of Adam's


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Returns how long ``work(*arguments)`` takes until all ranks are done [s]."""
    dist.barrier()
    began_s = time.perf_counter()
    work(*arguments)
    dist.barrier()
    return time.perf_counter() - began_s


def send(data: Tensor, source: int, target: int) -> None:
    """Sends ``data`` from one rank to the other."""
    if dist.get_rank() == source:
        dist.send(data, target)
    else:
        dist.recv(data, source)


def move(migration: Migration, turn: int) -> None:
    """Carries a migration out."""
    migration.stage({"turn": turn})
    migration.commit()


def moves(layers: int, repeats: int) -> list[dict[str, float]]:
    """Moves all layers to the other rank and back."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None

    def held_by(owner: int) -> PipelinePlan:
        whole = GroupPlan(ranks=(owner,), cuts=(0, layers), samples=4, micro_batches=(4,), depths=(1,))
        return PipelinePlan(groups=(whole,))

    model = Model(layers)
    optimizer = torch.optim.Adam(model.parameters())
    held = Ownership(model, list(model.layers), held_by(0), rank=rank)
    prune(model, [optimizer], held)
    if rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    rows: list[dict[str, float]] = []
    for i in range(repeats):
        source, target = i % 2, 1 - i % 2
        size = 3 * sum(4 * (WIDTH + 1) * WIDTH for _ in range(layers))
        data = torch.ones(size, dtype=torch.uint8)  # touched: new memory takes longer than what has been used
        sent_s = timed(send, data, source, target)
        new = Ownership(model, list(model.layers), held_by(target), rank=rank)
        migration = Migration(
            model, [optimizer], held, new, device=CPU, group=group, wait=dist.Work.wait,
            wait_for_peer=lambda work: work.wait(),
        )  # fmt: skip
        rows.append({"pause_s": timed(move, migration, i), "sent_s": sent_s, "size_bytes": migration.size_bytes})
        held = new
    return rows


def measured(repeats: int) -> dict[str, list[dict[str, float]]]:
    """Returns what each size takes."""
    return {name: moves(layers, repeats) for name, layers in SIZES.items()}


if __name__ == "__main__":
    _path, _repeats = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measured(int(_repeats)))
