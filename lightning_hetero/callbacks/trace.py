"""Writes what a run measures and decides as one JSON-lines file per rank (layer L)."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import subprocess
import time
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.callbacks import reporting
from lightning_hetero.record import EventWriter, trace_path
from lightning_hetero.types import Event

_RUNS = "hetero_trace"  # in a checkpoint: the run's id by folder, as given
_SETTINGS = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "num_nodes", "num_devices")
_COMMIT = "git --no-optional-locks describe --always --dirty --abbrev=12 --exclude=*"
_COMMIT_S = 2.0  # to look for changes may take longer in a huge checkout; then the run has no commit


class HeteroTrace(Callback):
    """Records every rank's steps, and its strategy's decisions, under ``dirpath/rank{r}.jsonl``.

    What is written comes from an `EventSource`: the strategy, else the first such callback of this Trainer.
    Without one, e.g. under stock DDP without a `StragglerMonitor`, every batch gives a ``step`` event with
    ``samples`` and ``step_s``, the wall time from the batch's start to its end, waiting for peers included. An
    exception that ends the fit becomes a ``fault`` event. Rank 0 notes what the module logs, too: what has ``loss`` in
    its name every ``log_every_n_steps``, everything at the end of an epoch and of validation; and with what the run
    began: versions, the Trainer's settings, ``hparams``, the commit of the working directory. Read the files with
    `lightning_hetero.cluster.read_events`, which also documents the events.

    Each run has an id, which a checkpoint keeps: a resumed run goes on under it in the same files. Another run that
    writes into the same folder has another id, and readers take one of them. A file that cannot be written, e.g. on a
    full disk, is named in one warning, and training goes on without it.

    Args:
        dirpath: local folder; default ``hetero`` in the logger's folder, or in ``default_root_dir`` without
            one.

    Raises:
        ValueError: ``dirpath`` is a remote address.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = None if dirpath is None else _local(dirpath)
        self._writer: EventWriter | None = None  # opened in fit: the callback is pickled before
        self._source: reporting.EventSource | None = None  # the same to the end, when the strategy measures no more
        self._rank, self._run, self._resumed = 0, "", False
        self._opened_s = self._batch_began_s = 0.0
        self._noted: dict[str, float] = {}  # metrics, as written last
        self._at: tuple[int, int] | None = None  # epoch and batch that ended last

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        dirpath = self.dirpath
        if dirpath is None:
            # log_dir broadcasts rank 0's, so every rank must ask.
            dirpath = os.path.join(_local(trainer.log_dir or trainer.default_root_dir), "hetero")
        reporting.watch_again(self)
        goes_on = self._run if self._resumed or trainer.global_step > 0 else ""
        self._run, self._resumed = trainer.strategy.broadcast(goes_on or secrets.token_hex(4)), False
        self._close()
        self._source = reporting.event_source(trainer)
        measuring, names = reporting.reporting_of(trainer), [f"{platform.node()} {trainer.strategy.root_device}"]
        each = 1 if measuring is None else measuring.ranks_per_part
        self._rank, other = divmod(trainer.global_rank, each)
        self._opened_s = time.perf_counter()
        self._noted, self._at = {}, None
        if other:
            return  # it does what the first rank of its part does
        about = {"strategy": type(trainer.strategy).__name__, **({} if measuring is None else measuring.about())}
        about["unix_s"], path, world = time.time(), trace_path(dirpath, self._rank), trainer.world_size // each
        if self._rank == 0:
            about |= origin() | {"trainer": {name: getattr(trainer, name, None) for name in _SETTINGS}}
            about["hparams"] = {str(name): str(value)[:200] for name, value in dict(pl_module.hparams).items()}
        self._writer = EventWriter(path, rank=self._rank, world_size=world, names=names, about=about, run=self._run)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault(_RUNS, {})[str(self.dirpath)] = self._run

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get(_RUNS, {}).get(str(self.dirpath)) if trainer.training else None
        self._run, self._resumed = kept or self._run, kept is not None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_began_s = time.perf_counter()

    @reporting.never_raises
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._at = trainer.current_epoch, batch_idx
        every = compat.log_interval(trainer)
        if every > 0 and (compat.logging_step(trainer) + 1) % every == 0 and not compat.accumulates_now(trainer):
            self._note_metrics(trainer, "loss")
        if self._writer is None or self._drain() is not False:
            return
        data = {"samples": reporting.count_samples(trainer, batch), "step_s": time.perf_counter() - self._batch_began_s}
        self._write("step", trainer.current_epoch, batch_idx, data)

    @reporting.never_raises
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_metrics(trainer)

    on_validation_end = on_train_end = on_train_epoch_start

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._drain()
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(Exception):  # the strategy may be what broke; its error must not hide the first one
            self._drain()
        with contextlib.suppress(Exception):
            data = {"error": f"{type(exception).__name__}: {exception}"}
            self._write("fault", trainer.current_epoch, max(0, trainer.fit_loop.epoch_loop.batch_idx), data)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _note_metrics(self, trainer: Trainer, only: str = "") -> None:
        """Writes what has changed of the metrics that Lightning has computed; on all ranks, so that one which is not
        computed yet would be so on all. A number on a device is waited for, as Lightning's loggers do."""
        if self._at is None:
            return  # before the first batch
        found = {name: value for name, value in trainer.callback_metrics.items() if only in name.lower()}
        if self._rank == 0 and found:
            known = {name: float(value) for name, value in found.items() if value.numel() == 1}
            if new := {name: value for name, value in known.items() if self._noted.get(name) != value}:
                self._noted |= new
                self._write("metrics", *self._at, new)

    @reporting.never_raises
    def _drain(self) -> bool:
        """Writes what is new; False if nothing here measures."""
        if self._writer is None or self._source is None:
            return self._source is not None
        for event in self._source.step_events():
            self._write(event.kind, event.epoch, event.step, event.data, event.t_s)
        return True

    def _write(self, kind: str, epoch: int, step: int, data: Any, at_s: float = 0.0) -> None:
        """Writes an event that was over at ``at_s`` by the host's clock; now, if it was not since the file is open."""
        if self._writer is not None:
            now_s = time.perf_counter()
            t_s = (at_s if self._opened_s <= at_s <= now_s else now_s) - self._opened_s
            self._writer.write(Event(kind=kind, rank=self._rank, epoch=epoch, step=step, t_s=t_s, data=data))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def origin() -> dict[str, Any]:
    """Returns the versions that run and, where the working directory is in a checkout, its commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    found: dict[str, Any] = {"versions": {**versions, "lightning-hetero": __version__}}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(_COMMIT.split(), capture_output=True, text=True, timeout=_COMMIT_S, check=True)
        found["commit"] = done.stdout.strip()
    return found


def _local(dirpath: str) -> str:
    if "://" in str(dirpath):
        raise ValueError(f"dirpath={dirpath!r} must be a local folder: give HeteroTrace(dirpath=...) one")
    return str(dirpath)
