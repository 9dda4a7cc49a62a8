"""``python -m benchmarks.ablation.recorder``: records step times of real processes beside busy loops that come and go.

Writes `recorded/*.json`, on which `benchmarks.ablation` plays every candidate; some minutes. Shares stay equal.

- *pinned*: two ranks, a core each, two busy loops on rank 1's;
- *crowded*: four ranks on all cores, and two busy loops in the session of rank 1, which systems weigh with it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.ablation.recordings import FOLDER, from_events
from benchmarks.torchrun import launch

RANKS = {"pinned": 2, "crowded": 4}
STEPS = 400
MEAN_PHASE = 40.0
_HOST_LOAD = ("lightning_hetero.measure.host_load", "HostLoad")


def phases(seed: int, steps: int = STEPS) -> list[bool]:
    """Returns in which steps the loops run: stretches of random length, by turns without and with them."""
    rng, out, busy = Random(seed), list[bool](), False
    while len(out) < steps:
        out += [busy] * (1 + int(rng.expovariate(1.0 / MEAN_PHASE)))
        busy = not busy
    return out[:steps]


def host_load() -> Callable[[], tuple[float, float]] | None:
    """Returns what tells the free part of processors and memory; None: this version has nothing that does."""
    try:
        return getattr(importlib.import_module(_HOST_LOAD[0]), _HOST_LOAD[1])().free
    except ModuleNotFoundError:
        return None


def record(name: str, steps: int, folder: Path, rank: int) -> dict[str, Any]:
    """Trains once, with equal shares, and returns the recording on rank 0."""
    import torch.distributed as dist

    from benchmarks.ablation.busy import usable_cores
    from benchmarks.ablation.worker import LoadTrace, train_busy
    from lightning_hetero import HeteroTrace, LoadBalancedStrategy
    from lightning_hetero.record import read_events

    loaded = phases(len(name), steps)
    strategy = LoadBalancedStrategy(process_group_backend="gloo", rebalance=False, exchange_every=1)
    more = [HeteroTrace(str(folder / "steps")), LoadTrace(folder / "load", host_load())]
    train_busy(strategy, steps, loaded.__getitem__, on=1, rank=rank, more=more)
    dist.barrier()
    if rank:
        return {}
    events = [*read_events(folder / "steps"), *read_events(folder / "load")]
    return {"ranks": RANKS[name], "cores_of_rank_0": len(usable_cores()), **from_events(events)}


def main() -> None:
    import tempfile

    for name, ranks in RANKS.items():
        with tempfile.TemporaryDirectory() as folder:
            recording = launch("benchmarks.ablation.recorder", ranks, name, STEPS, folder)
        FOLDER.mkdir(exist_ok=True)
        rows = {key: recording.pop(key) for key in ("compute_s", "free_cpu")}
        lines = [f' "{key}": {json.dumps(value)}' for key, value in recording.items()]
        for key, values in rows.items():
            if values is not None:
                lines.append(f' "{key}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in values) + "\n ]")
        (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"{name}: {len(rows['compute_s'])} steps of {ranks} ranks")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        from benchmarks.torchrun import as_rank

        _path, _name, _steps, _folder = sys.argv[1:]
        if _name == "pinned":  # before there are other threads
            from benchmarks.ablation.busy import pin, usable_cores

            pin([usable_cores()[int(os.environ["LOCAL_RANK"])]])
        as_rank(Path(_path), partial(record, _name, int(_steps), Path(_folder)))
