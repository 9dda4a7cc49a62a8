"""Measures the devices of this machine as training does when it starts: a process per device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.cli.ranks import as_rank, device_of_rank, on_ranks
from lightning_hetero.cluster.spec import cluster_from_plain, cluster_to_plain
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.types import Cluster

__all__ = ["probe_machine"]

_CPU_RANKS = 2  # where nothing tells how many


def probe_machine(*, devices: int | None = None, accelerator: str = "auto") -> Cluster:
    """Returns speeds, free memory and links of this machine's devices; takes some seconds to start.

    Args:
        devices: how many; None: all GPUs, or two processes on a machine without.
        accelerator: ``"cpu"``, ``"gpu"``, or ``"auto"``: GPUs where there are any.

    Raises:
        ValueError: more devices than there are, or no GPU where one is asked for.
        RuntimeError: a rank failed.
    """
    gpus = torch.cuda.device_count() if accelerator != "cpu" else 0
    if accelerator not in ("auto", "cpu", "gpu"):
        raise ValueError(f"accelerator={accelerator!r} must be 'auto', 'cpu' or 'gpu'")
    if accelerator == "gpu" and not gpus:
        raise ValueError("accelerator='gpu', but torch sees no GPU on this machine: is its wheel built for CUDA?")
    if devices is not None and (devices < 1 or (gpus and devices > gpus)):
        raise ValueError(f"devices={devices} must be 1 to {gpus or 'as many processes as you like'}")
    count = devices or gpus or _CPU_RANKS
    kind = "gpu" if gpus else "cpu"
    return cluster_from_plain(on_ranks("lightning_hetero.cli.probe", count, {"accelerator": kind}))


def _probe(setting: dict[str, Any]) -> dict[str, Any]:
    world = dist.group.WORLD
    assert world is not None
    return cluster_to_plain(probe_cluster(world, device_of_rank(setting["accelerator"])))


if __name__ == "__main__":
    as_rank(_probe)
