"""The cells: which engine meets which fault under which launcher, and in which hooks it raises. Nothing here runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.faults.table import ENGINES, FAULTS, LAUNCHERS, LIVENESS_S, TIMEOUT_S, Fault

RANKS = 3


@dataclass(frozen=True)
class Cell:
    """One training: an engine, a launcher, a fault; `more` are further arguments of the program, said in `label`."""

    engine: str
    launcher: str
    fault: Fault
    ranks: int = RANKS
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.launcher}: {self.fault.name}" + (f"; {self.label}" if self.label else "")

    def __str__(self) -> str:
        return self.name

    @property
    def asked(self) -> dict[str, Any]:
        """Returns what the program is told."""
        said = {"engine": self.engine, "ranks": self.ranks, "liveness_s": LIVENESS_S, "ranks_hit": self.fault.hit}
        return {**said, **self.fault.asked, **self.more}


# ---- the hooks of a user's program -----------------------------------------------------------------------------------

MODULE_HOOKS = (
    "setup", "configure_model", "configure_optimizers", "configure_callbacks", "on_fit_start", "on_train_start",
    "on_train_epoch_start", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_train_batch_start", "training_step", "forward", "on_before_zero_grad", "optimizer_zero_grad",
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_validation_model_eval", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end", "on_validation_model_train", "on_save_checkpoint",
    "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown",
)  # fmt: skip
CALLBACK_HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "state_dict", "on_save_checkpoint", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "teardown",
)  # fmt: skip
DATA_HOOKS = (
    "Data.prepare_data", "Data.setup", "Data.train_dataloader", "Data.val_dataloader", "Data.teardown",
    "Numbers.__len__", "Numbers.__getitem__", "collate",
)  # fmt: skip
BEFORE = ("Model.configure_callbacks", "Data.prepare_data")  # before the ranks have met
AFTER = ("on_train_end", "on_fit_end", "teardown")  # the training is over, and saved
_OFTEN = ("batch", "step", "backward", "forward", "zero_grad", "clipping", "__getitem__", "collate", "__len__")
# called in each batch: the third call is in the middle of the training


def places() -> list[str]:
    """Returns every place of a user's code."""
    return [*(f"Model.{n}" for n in MODULE_HOOKS), *(f"Hooks.{n}" for n in CALLBACK_HOOKS), *DATA_HOOKS]


def hook_cells() -> Iterator[Cell]:
    """Yields an exception in every hook, on rank 1 of 2; each rank has a screen of its own."""
    for engine in ENGINES:
        for place in places():
            often = any(word in place for word in _OFTEN) and "validation" not in place
            often = often and place not in ("Model.lr_scheduler_step", "Numbers.__len__")
            asked = {"kind": "exception", "place": place, "call": 3 if often else 1, "save_every": 5}
            if place == "Numbers.__getitem__":  # a few are looked at before training, and what fails there is no matter
                asked["call"] = 12
            if place in BEFORE:
                asked["timeout_s"] = TIMEOUT_S
            hit = (0,) if place == "Data.prepare_data" else (1,)  # which is called on one rank of a node
            yield Cell(engine, "SLURM", Fault(f"exception in {place}", asked, hit), ranks=2)


def launchers_of(engine: str) -> tuple[str, ...]:
    """Returns those under which an engine trains: Lightning starts ranks with sharded models as scripts only."""
    return tuple(way for way in LAUNCHERS if engine != "sharded" or way not in ("spawn", "fork"))


def cells() -> Iterator[Cell]:
    """Yields the table, without the hooks."""
    for fault in FAULTS.values():
        for engine in fault.engines:
            for launcher in fault.launchers:
                if launcher in launchers_of(engine):
                    yield Cell(engine, launcher, fault, more=_more(engine, launcher, fault))
    for name in _LOSES:
        for launcher in FAULTS[name].launchers:
            more = {"options": {"min_ranks": 2}}
            yield Cell("balanced", launcher, FAULTS[name], more=more, label="min_ranks=2")


_LOSES = (
    "none", "SIGKILL of a worker", "SIGKILL of rank 0", "SIGKILL of two ranks at once", "segmentation fault",
    "stopped for 1.5 s", "stopped for ever", "SIGTERM to a worker", "exception in a step",
    "SIGKILL of a worker as rank 0 writes a checkpoint",
)  # fmt: skip
"""Faults that ranks may be lost by."""


def _more(engine: str, launcher: str, fault: Fault) -> dict[str, Any]:
    if engine in ("balanced", "sharded") and "out of memory" in fault.name:  # one sample cannot be divided
        return {"options": {"min_samples": 2}}
    if launcher == "SLURM" and "import_s" in fault.asked:  # torch waits twice for who never comes
        return {"timeout_s": TIMEOUT_S / 3}
    return {}


QUICK = (
    "balanced, script: SIGKILL of a worker; min_ranks=2",
    "stale, SLURM: SIGKILL of two ranks at once",
    "stale, script: SIGUSR1 to a worker",
    "balanced, fork: SIGTERM to all ranks",
    "federated, SLURM: SIGUSR1 to all ranks: requeue",
)
"""What the suite runs each time; the rest needs ``--matrix``."""
