"""Measures the devices of this machine as training does when it starts: a process per device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.cli.ranks import as_rank, backend_of, device_of_rank, on_ranks
from lightning_hetero.cluster.spec import cluster_from_plain, cluster_to_plain
from lightning_hetero.measure.device import accelerators
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.pipeline.decide.links import MOST_COMMUNICATORS
from lightning_hetero.types import Cluster

__all__ = ["probe_machine"]

_CPU_RANKS = 2  # where nothing tells how many


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
        raise ValueError(f"devices={devices} must be 1 to {gpus or 'as many processes as you like'}")
    count = devices or gpus or _CPU_RANKS
    kind = "gpu" if gpus else "cpu"
    setting = {"accelerator": kind, "dtype": str(dtype).removeprefix("torch.")}
    found = on_ranks("lightning_hetero.cli.probe", count, setting)
    return cluster_from_plain(found["cluster"]), found["backend"]


def _probe(setting: dict[str, Any]) -> dict[str, Any]:
    world, device = dist.group.WORLD, device_of_rank(setting["accelerator"])
    assert world is not None
    backend = backend_of(device)
    cluster = probe_cluster(
        world,
        device,
        direct="" if backend == "gloo" else backend,
        communicators=MOST_COMMUNICATORS,
        dtype=getattr(torch, setting["dtype"]),
    )
    return {"cluster": cluster_to_plain(cluster), "backend": backend}


if __name__ == "__main__":
    as_rank(_probe)
