"""One rank of the ablation; started by torchrun."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader

from benchmarks.ablation import contention
from benchmarks.ablation.busy import BusyLoops, Load, Products, Sequences, pin, usable_cores
from benchmarks.ablation.candidates import named
from benchmarks.ablation.real import DDP, REPEATS, case_of, cells, timed
from benchmarks.balanced.worker import Stopwatch, fitted_step_s, gathered, train
from benchmarks.torchrun import as_rank
from lightning_hetero import LoadBalancedStrategy
from lightning_hetero.record import EventWriter, trace_path
from lightning_hetero.types import Event

PER_RANK = 32  # samples of real work
Engines = Mapping[str, Callable[[], Strategy]]


def engines_of(names: Sequence[str]) -> Engines:
    """Returns DDP twice, and the candidates of these names."""
    made: dict[str, Callable[[], Strategy]] = {
        name: partial(DDPStrategy, process_group_backend="gloo") for name in DDP
    }
    for name in names:
        made[name] = partial(_ours, name)
    return made


def _ours(name: str) -> Strategy:
    return LoadBalancedStrategy(process_group_backend="gloo", policy=named(name).make())


def turns(repeats: int, engines: Sequence[str]) -> list[tuple[int, str]]:
    """Returns who runs in which turn: each turn begins with another engine."""
    return [(turn, engines[(turn + k) % len(engines)]) for turn in range(repeats) for k in range(len(engines))]


def real(rank: int, engines: Engines, quick: bool, repeats: int) -> dict[str, Any]:
    """Emulated devices: times, and how true the emulation was, by cell and engine."""
    world_size = dist.get_world_size()
    out: dict[str, Any] = {}
    work_s: dict[int, float] = {}
    for kind, ms in cells(quick):
        if ms not in work_s:
            work_s[ms] = fitted_step_s(ms / 1e3, partial(case_of, "equal", world_size, ms, quick=quick), rank)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for turn, name in turns(repeats or REPEATS[kind], list(engines)):
            case = case_of(kind, world_size, ms, work_s[ms], seed=turn, quick=quick)
            watch, _, emulated = train(name, case, rank, strategy=engines[name]())
            runs[name].append({**timed(case, watch.steps_s()), "taken": max(gathered(emulated.taken()))})
        out[case_of(kind, world_size, ms, 1.0).name] = {"emulated_s": work_s[ms], "runs": runs}
    return out


def busy(rank: int, engines: Engines, quick: bool, repeats: int) -> dict[str, Any]:
    """Real work beside busy loops on rank 1's core: times by kind and engine."""
    out: dict[str, Any] = {}
    for kind in contention.KINDS:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for _, name in turns(repeats, list(engines)):
            loaded, steps = contention.is_loaded(kind), contention.steps_of(kind, quick)
            watch = train_busy(engines[name](), steps, loaded, on=1, rank=rank)
            runs[name].append(contention.timed(watch.steps_s()))
        out[kind] = {"runs": runs}
    return out


def train_busy(
    strategy: Strategy,
    steps: int,
    is_loaded: Callable[[int], bool],
    *,
    on: int,
    rank: int,
    more: Sequence[Callback] = (),
) -> Stopwatch:
    """Trains real work beside busy loops that rank ``on`` starts, on its cores; returns the clock."""
    world_size = dist.get_world_size()
    watch = Stopwatch()
    loader = DataLoader(Sequences(PER_RANK * world_size * (steps + 2)), batch_size=PER_RANK, shuffle=True)
    with BusyLoops(contention.LOOPS) if rank == on else nullcontext() as loops:
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            max_steps=steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Load(loops, is_loaded), watch, *more],
        )
        gc.collect()
        dist.barrier()
        trainer.fit(Products(), loader)
    return watch


class LoadTrace(Callback):
    """Writes what others leave free, once per step; nothing if there is nothing that tells.

    Args:
        folder: of the trace.
        free: returns the free part of processors and memory.
    """

    def __init__(self, folder: Path, free: Callable[[], tuple[float, float]] | None) -> None:
        self._folder, self._free = folder, free
        self._writer: EventWriter | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        self._writer = EventWriter(trace_path(self._folder, rank), rank=rank, world_size=trainer.world_size)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._writer is not None and self._free is not None:
            free_cpu, free_mem = self._free()
            data = {"free_cpu": round(free_cpu, 3), "free_mem": round(free_mem, 3)}
            step = trainer.fit_loop.epoch_loop.batch_idx
            self._writer.write(Event(kind="load", rank=trainer.global_rank, epoch=0, step=step, t_s=0.0, data=data))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._writer is not None:
            self._writer.close()


def _measure(part: str, extent: str, repeats: str, names: Sequence[str], rank: int) -> dict[str, Any]:
    measure = {"real": real, "contention": busy}[part]
    return measure(rank, engines_of(names), extent == "quick", int(repeats))


if __name__ == "__main__":
    _path, _part, _extent, _repeats, *_names = sys.argv[1:]
    if _part == "contention":  # before there are other threads
        pin([usable_cores()[int(os.environ["LOCAL_RANK"])]])
    as_rank(Path(_path), partial(_measure, _part, _extent, _repeats, _names))
