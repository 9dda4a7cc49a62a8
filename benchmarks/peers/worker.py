"""One rank of one training: writes what it saw as JSON; rank 0 judges its models when the clock has stopped."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import PEERS, Run
from benchmarks.peers.task import Curve, distance, judged
from benchmarks.torchrun import quietly


def main() -> None:
    run, path, rank = Run(**json.loads(sys.argv[1])), Path(sys.argv[2]), int(os.environ["RANK"])
    quietly()
    peer, curve = next(p for p in PEERS if p.name == run.peer), Curve()
    if peer.lightning:
        from benchmarks.peers.under_lightning import train
    else:
        from benchmarks.peers.plain import train
    seen: dict[str, Any] = {**train(run, rank, curve), "fit_s": curve.fit_s}
    if rank == 0:
        seen |= {"curve": judged(curve), "distance": distance(curve, run.seed, run.updates)}
    path.write_text(json.dumps(seen))
    os._exit(0)  # some libraries' threads and servers do not end by themselves, or with an error


if __name__ == "__main__":
    main()
