"""One rank: trains by one peer after the other, and writes what it saw as JSON; rank 0 judges its models afterwards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import PEERS, Run
from benchmarks.peers.task import Curve, distance, judged
from benchmarks.ranks import quietly


def main() -> None:
    os.setsid()  # a library's own daemons end with their rank
    quietly()
    found = [trained(Run(**run), int(os.environ["RANK"])) for run in json.loads(sys.argv[1])]
    Path(sys.argv[2]).write_text(json.dumps(found))
    os._exit(0)  # some libraries' threads and servers do not end by themselves, or with an error


def trained(run: Run, rank: int) -> dict[str, Any]:
    """Returns what this rank saw of a training; on rank 0 with its judged models."""
    peer, curve = next(p for p in PEERS if p.name == run.peer), Curve()
    if peer.lightning:
        from benchmarks.peers.under_lightning import train
    else:
        from benchmarks.peers.plain import train
    seen: dict[str, Any] = {**train(run, rank, curve), "fit_s": curve.fit_s}
    if rank == 0:
        seen |= {"curve": judged(curve), "distance": distance(curve, run.seed, run.updates)}
    return seen


if __name__ == "__main__":
    main()
