"""Process groups: subgroups of one that is bound to a device, and what a communicator of NCCL's takes of the memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.check.found import found, is_dry
from tests.gpu.kit import SharedCards
from tests.gpu.ranks import run_card_ranks

MIB = 2**20


def _bound(rank: int, world: int) -> None:
    """Makes the group as Lightning does for GPUs, also with gloo."""
    device = SharedCards.get_parallel_devices(list(range(world)))[rank]
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", rank=rank, world_size=world, device_id=device)


def _plainly(rank: int, world: int) -> str:
    _bound(rank, world)
    try:
        dist.new_group([0, 1])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "made"


def _ours(rank: int, world: int) -> float:
    from lightning_hetero.transport.groups import make_group

    _bound(rank, world)
    group = make_group([0, 1], None, None)
    ones = torch.ones(4, device="cuda")
    if rank < 2:
        dist.all_reduce(ones, group=group)
    return float(ones[0])


def subgroup() -> None:
    """Passes if the engines' way to make a group of some ranks works where torch's own does or does not."""
    said = run_card_ranks(3, _plainly)
    found(**{"torch's new_group": said[2] if said[2] != "made" else "works"})
    sums = run_card_ranks(3, _ours)
    found(**{"ours": "works" if sums == [2.0, 2.0, 1.0] else sums})
    if sums != [2.0, 2.0, 1.0]:
        raise SystemExit(str(sums))


def _memory(rank: int, world: int) -> dict[str, Any]:
    device = torch.device("cuda", 0)

    def free() -> float:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(device)[0] / MIB

    torch.cuda.set_device(device)
    before = torch.cuda.mem_get_info(device)[0] / MIB
    ones = torch.ones(1024, device=device)
    with_context = free()
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    dist.all_reduce(ones)
    first = free()
    taken = []
    for _ in range(3):
        dist.all_reduce(ones, group=dist.new_group(list(range(world))))
        taken.append(free())
    return {
        "MiB of a first tensor": round(before - with_context),
        "of a first communicator": round(with_context - first),
        "of each further one": round((first - taken[-1]) / 3),
    }


def communicators() -> None:
    """Of one rank: a lower bound, because nothing is kept for peers."""
    found(**run_card_ranks(1, _memory)[0])
    if torch.cuda.device_count() > 1:
        found(**{f"{key}, two ranks": value for key, value in run_card_ranks(2, _memory)[0].items()})
    elif not is_dry():
        found(note="world of 1")
