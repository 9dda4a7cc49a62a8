"""What a strategy is to Lightning before and around a fit: names, checkpoint key, own memory, monitor (layer L)."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING

from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.glue.checks import refuse_fabric, refuse_other_package

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.strategy import _StrategyRegistry

__all__ = ["CHECKPOINT_KEY", "add_monitor", "own_memory", "refuse_elsewhere", "register"]

CHECKPOINT_KEY = "lightning_hetero"
"""The one top-level key added to a checkpoint; stock Lightning ignores it."""


def add_monitor(trainer: Trainer) -> None:
    """Adds a `StragglerMonitor` if the user has not given one."""
    from lightning_hetero.callbacks.straggler import StragglerMonitor

    callbacks = compat.trainer_callbacks(trainer)
    if not any(isinstance(c, StragglerMonitor) for c in callbacks):
        callbacks.append(StragglerMonitor())


def own_memory(module: nn.Module) -> None:
    """Gives this process its own copy of parameters and buffers that came to it through shared memory.

    Lightning 2.6.6 does so under ``start_method="spawn"`` only. Under ``"forkserver"`` on CPU all ranks, stock DDP's
    too, would update one copy together: wrong weights without an error.
    """
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def register(cls: type[DDPStrategy], registry: _StrategyRegistry, name: str, description: str) -> None:
    """Registers ``name`` and its launchers, each also with DDP's ``find_unused_parameters`` spelt out.

    Launchers are ``_spawn``, ``_fork``, ``_forkserver`` and ``_notebook``; the names are built as DDP's are.

    Args:
        cls: the strategy.
        registry: Lightning's registry of the Trainer's strategies.
        name: the alias, e.g. ``hetero_balanced``.
        description: a few words; the launcher is added to them.
    """
    for suffix, start_method in (
        ("", "popen"),
        ("_spawn", "spawn"),
        ("_fork", "fork"),
        ("_forkserver", "forkserver"),
        ("_notebook", "fork"),
    ):
        for unused, more in (
            ("", {}),
            ("_find_unused_parameters_true", {"find_unused_parameters": True}),
            ("_find_unused_parameters_false", {"find_unused_parameters": False}),
        ):
            registry.register(
                f"{name}{suffix}{unused}",
                cls,
                description=f"{description} with `start_method` '{start_method}' {more or ''}".strip(),
                start_method=start_method,
                **more,
            )


def refuse_elsewhere(name: str) -> None:
    """Puts a reason under ``name`` where it cannot work: in Fabric, and in ``pytorch_lightning`` if it is imported."""
    STRATEGY_REGISTRY.register(name, refuse_fabric, description="for the Trainer only")
    if (other := sys.modules.get("pytorch_lightning.strategies")) is not None:
        other.StrategyRegistry.register(name, refuse_other_package, description="for lightning.pytorch only")
