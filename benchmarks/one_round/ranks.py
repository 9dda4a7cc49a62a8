"""One rank; started by torchrun, rank 0 writes what the collectives took as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.torchrun import as_rank
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.transport.one_node.near_round import NearRound
from lightning_hetero.transport.one_node.neighbours import Neighbours
from lightning_hetero.transport.one_round import start_gather
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.transport.small_sums import start_sums

RANKS = 4
GAP_S = 0.005
PER_TURN = 25  # collectives of a way, one after the other
SUMS = {"4 kB": 1_000, "72 kB": 18_000}  # float32
ROW = 100  # float64
Way = Callable[[], object]


def ways(group: dist.ProcessGroup, near: NearRound) -> dict[str, dict[str, Way]]:
    """Returns what is compared: by what is exchanged, and by way."""
    rank_row, rows = torch.ones(ROW, dtype=torch.float64), [torch.empty(ROW, dtype=torch.float64) for _ in range(RANKS)]
    found: dict[str, dict[str, Way]] = {
        "nothing": {"no collective": lambda: None},
        f"rows of {ROW} numbers": {
            "gloo's": lambda: group.allgather([rows], [rank_row]).wait(),
            "one round": lambda: start_gather(rank_row, group)[0].wait(),
        },
    }
    for name, size in SUMS.items():
        numbers = torch.zeros(size)
        found[f"sum of {name}"] = {
            "gloo's": lambda numbers=numbers: group.allreduce([numbers]).wait(),
            "one round": lambda numbers=numbers: summed(numbers, group),
            "memory": lambda numbers=numbers: summed(numbers, group, near),
        }
    return found


def summed(numbers: Tensor, group: dist.ProcessGroup, near: NearRound | None = None) -> Tensor:
    (total,) = start_sums([numbers], group, near=near)
    total.work.wait()
    return total.result()


def near_round(group: dist.ProcessGroup) -> NearRound:
    """Returns the way through memory, as the pipeline engine makes it; collective."""
    rank = dist.get_rank()
    store = dist.PrefixStore("one round", dist.distributed_c10d._get_default_store())
    node = Neighbours(SideChannel(group), torch.device("cpu"))
    return NearRound(node, rank, RANKS, failures=FailureBoard(store, rank), timeout_s=60.0)


def timed(way: Way) -> tuple[list[float], float]:
    """Returns how long each took, and what one needed of the processor in the mean of ranks [s]."""
    spans_s: list[tuple[float, float]] = []
    dist.barrier()
    used_s = time.process_time()
    for _ in range(PER_TURN):
        time.sleep(GAP_S)
        began_s = time.perf_counter()
        way()
        spans_s.append((began_s, time.perf_counter()))  # one clock for all processes of a machine
    used_s = (time.process_time() - used_s) / PER_TURN
    everyone: list[tuple[list[tuple[float, float]], float]] = [([], 0.0)] * RANKS
    dist.all_gather_object(everyone, (spans_s, used_s))
    together = zip(*(spans for spans, _ in everyone), strict=True)
    taken_s = [max(end for _, end in spans) - max(began for began, _ in spans) for spans in together]
    return taken_s, sum(used for _, used in everyone) / RANKS


def measure(turns: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Returns by what is exchanged and by way: `taken_s` of each, `used_s` of each turn [s]."""
    group = dist.group.WORLD
    assert group is not None
    compared = ways(group, near_round(group))
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        what: {way: {"taken_s": [], "used_s": []} for way in one} for what, one in compared.items()
    }
    for turn in range(turns + 1):
        for what, one in compared.items():
            for way, run in one.items():
                taken_s, used_s = timed(run)
                if turn:  # the first one connects
                    found[what][way]["taken_s"] += taken_s
                    found[what][way]["used_s"].append(used_s)
    return found


if __name__ == "__main__":
    _path, _turns = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(int(_turns)))
