"""Short programs on several ranks of this machine, and what their rank 0 has found; one of them is the probe.

The probe measures the devices of this machine as training does when it starts: a process per device.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.cluster.spec import cluster_from_plain, cluster_to_plain
from lightning_hetero.measure.device import accelerators, device_of
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.pipeline.decide.links import MOST_COMMUNICATORS
from lightning_hetero.types import Cluster

_CPU_RANKS = 2  # where nothing tells how many
_LONGEST_S = 300.0
_TAIL = 1500  # characters of a failed program's output that say why


def on_ranks(module: str, ranks: int, setting: dict[str, Any]) -> Any:
    """Runs ``python -m module`` on so many ranks, started by torchrun; returns what `as_rank` wrote there.

    Args:
        module: calls `as_rank`.
        ranks: processes on this machine.
        setting: plain JSON values for it.

    Raises:
        RuntimeError: a rank failed, with the end of what it said; or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", module, str(path), json.dumps(setting)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LONGEST_S,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{ranks} ranks of {module} did not end within {_LONGEST_S:g} s") from None
        if done.returncode or not path.exists():
            raise RuntimeError(f"{ranks} ranks of {module} failed:\n{(done.stderr or done.stdout)[-_TAIL:].strip()}")
        return json.loads(path.read_text())


def quiet_loggers() -> None:
    """Lets Lightning say errors only."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def as_rank(find: Callable[[dict[str, Any]], Any]) -> None:
    """Runs ``find(setting)`` in a process group, and writes what rank 0's returns. For the program's ``main``."""
    path, setting = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    quiet_loggers()
    device = device_of_rank(setting.get("accelerator", "cpu"))
    device_of(device).make_current()
    dist.init_process_group(backend_of(device))
    try:
        found = find(setting)
        if dist.get_rank() == 0:
            path.write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def device_of_rank(accelerator: str) -> torch.device:
    """Returns this process's device, by its local rank."""
    there = [] if accelerator == "cpu" else accelerators()
    return there[int(os.environ.get("LOCAL_RANK", 0))] if there else torch.device("cpu")


def backend_of(device: torch.device) -> str:
    """Returns torch's backend for ranks on such devices, as the Trainer takes it; gloo, where the wheel has it not."""
    backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return backend if dist.is_backend_available(backend) else "gloo"


# ---- the probe --------------------------------------------------------------------------------------------------


def probe_machine(
    *, devices: int | None = None, accelerator: str = "auto", dtype: torch.dtype = torch.float32
) -> tuple[Cluster, str]:
    """Returns speeds, memory and links of this machine's devices, and the links' backend; takes some seconds to start.

    Args:
        devices: how many; None: all GPUs, or two processes on a machine without.
        accelerator: ``"cpu"``, ``"gpu"``, or ``"auto"``: GPUs where there are any.
        dtype: of the speeds.

    Raises:
        ValueError: more devices than there are, or no GPU where one is asked for.
        RuntimeError: a rank failed.
    """
    gpus = len(accelerators()) if accelerator != "cpu" else 0
    if accelerator not in ("auto", "cpu", "gpu"):
        raise ValueError(f"accelerator={accelerator!r} must be 'auto', 'cpu' or 'gpu'")
    if accelerator == "gpu" and not gpus:
        raise ValueError("accelerator='gpu', but torch sees no GPU on this machine: is its wheel built for CUDA?")
    if devices is not None and (devices < 1 or (gpus and devices > gpus)):
        raise ValueError(f"devices={devices} must be {f'1 to {gpus}' if gpus else '>= 1'}")
    count = devices or gpus or _CPU_RANKS
    kind = "gpu" if gpus else "cpu"
    setting = {"accelerator": kind, "dtype": str(dtype).removeprefix("torch.")}
    found = on_ranks("lightning_hetero.cli.ranks", count, setting)
    return cluster_from_plain(found["cluster"]), found["backend"]


def _probe(setting: dict[str, Any]) -> dict[str, Any]:
    world, device = dist.group.WORLD, device_of_rank(setting["accelerator"])
    assert world is not None
    backend = backend_of(device)
    cluster = probe_cluster(
        world, device, direct="" if backend == "gloo" else backend, communicators=MOST_COMMUNICATORS,
        dtype=getattr(torch, setting["dtype"]),
    )  # fmt: skip
    return {"cluster": cluster_to_plain(cluster), "backend": backend}


if __name__ == "__main__":
    as_rank(_probe)
