"""A Trainer that believes that SLURM runs it: a signal makes Lightning save a checkpoint and requeue the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import signal_connector

REQUEUED = [["scontrol", "requeue", "77"]]


def ask_to_requeue() -> None:
    """What SLURM does to a process, with ``--signal=SIGUSR1@90``; the handler runs before this returns."""
    os.kill(os.getpid(), signal.SIGUSR1)


@contextmanager
def slurm(trainer: Trainer) -> Iterator[list[list[str]]]:
    """Inside, the Trainer can be requeued; yields the commands that it gives SLURM."""
    commands: list[list[str]] = []
    module: Any = signal_connector
    call, connector = module.call, trainer._accelerator_connector
    before: Any = connector.cluster_environment
    connector.cluster_environment = SLURMEnvironment()
    module.call = lambda command, **_: commands.append(command) or 0
    os.environ["SLURM_JOB_ID"] = "77"
    try:
        yield commands
    finally:
        del os.environ["SLURM_JOB_ID"]
        module.call = call
        connector.cluster_environment = before


def saved_in(folder: str | Path) -> list[str]:
    """Returns the checkpoints for a requeued job."""
    return sorted(str(path) for path in Path(folder).glob("hpc_ckpt_*.ckpt"))
