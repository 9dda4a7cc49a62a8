"""One of two ranks that send tensors to and fro; rank 0 writes how long each was on its way, as JSON.

As a rank: ``python -m benchmarks.wire.ranks PATH ROUNDS``, under torchrun or with its variables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.torchrun import as_rank
from lightning_hetero.pipeline.decide.schedule import What
from lightning_hetero.pipeline.runtime.execute.messages import Message
from lightning_hetero.pipeline.runtime.execute.stage_links import StageLinks
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore

SIZES = {"16 kB": 16 * 2**10, "64 kB": 64 * 2**10, "1 MB": 2**20}
WARM_UP = 20
Turn = Callable[[], object]


def bare(peer: int, size_bytes: int) -> tuple[Turn, Turn]:
    """Returns how to send a tensor and how to receive one, by `torch.distributed`."""
    out, room = torch.zeros(size_bytes // 4), torch.empty(size_bytes // 4)
    return lambda: dist.send(out, peer), lambda: dist.recv(room, peer)


def ours(links: StageLinks, peer: int, size_bytes: int) -> tuple[Turn, Turn]:
    """Returns how to send a tensor and how to receive one, as a stage does."""
    out = torch.zeros(size_bytes // 4)

    def send() -> None:
        links.send(
            peer, Message(what=What.ACTIVATION, micro_batches=1, samples=8, value=out, requires_grad=(True,))
        )

    return send, lambda: links.receive(peer)


def timed(turns: tuple[Turn, Turn], rank: int) -> float:
    """Sends to and fro once; returns half of what it took [s]."""
    send, receive = turns
    began_s = time.perf_counter()
    for turn in (send, receive) if rank == 0 else (receive, send):
        turn()
    return 0.5 * (time.perf_counter() - began_s)


def measure(rank: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns how long each message took, by size and way, which take turns [s]."""
    peer, wire = 1 - rank, dist.new_group(backend="gloo")
    assert isinstance(wire, dist.ProcessGroup)
    store = RunStore(dist.PrefixStore("wire", dist.distributed_c10d._get_default_store()), b"")
    links = StageLinks(
        wire, rank, [peer], device=torch.device("cpu"), failures=FailureBoard(store, rank), timeout_s=60.0
    )
    found: dict[str, dict[str, list[float]]] = {}
    for name, size_bytes in SIZES.items():
        ways = {"gloo": bare(peer, size_bytes), "link": ours(links, peer, size_bytes)}
        each: list[dict[str, float]] = [
            {way: timed(turns, rank) for way, turns in ways.items()} for _ in range(WARM_UP + rounds)
        ]
        found[name] = {way: [one[way] for one in each[WARM_UP:]] for way in ways}
    links.close()
    return found


if __name__ == "__main__":
    _path, _rounds = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(rank, int(_rounds)))
