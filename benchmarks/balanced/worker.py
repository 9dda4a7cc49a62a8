"""One rank of one case; writes what it measured as JSON on rank 0."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.balanced.busy import REAL, BusyLoops, Load, pin, usable_cores
from benchmarks.balanced.cases import Case, Contention, EqualCase, best_static, contended, equal_cases, unequal_cases
from benchmarks.emulated import Emulated
from benchmarks.kit.figures import percentile
from benchmarks.kit.training import (
    Clock,
    Compared,
    StaticShares,
    first_gradient,
    fit,
    flat_gradient,
    forgetting,
    gathered,
    gloo,
    synthetic,
)
from benchmarks.ranks import as_rank
from lightning_hetero import BoundedStalenessStrategy, LoadBalancedStrategy, Scenario

FEATURES = 16


class Model(LightningModule):
    """A small float64 MLP, so that emulated work dominates and gradients can be compared to 1e-12."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        self.first_gradient: Tensor | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.first_gradient is None:
            self.first_gradient = flat_gradient(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(name: str, case: Case, rank: int) -> tuple[Clock, Model, Emulated]:
    """Runs one training with ``"ddp"``, ``"folk"`` or ``"ours"``; returns its clock, its model and the device."""
    samples = case.global_batch * (case.steps + 2)
    data, clock, model, emulated = synthetic(samples, FEATURES), Clock(), Model(), Emulated(case.scenario)
    loader = DataLoader(data, batch_size=case.per_rank, shuffle=True)
    strategy = gloo(LoadBalancedStrategy, min_samples=case.min_samples) if name == "ours" else gloo(DDPStrategy)
    if name == "folk":
        caps = [case.global_batch] * case.world_size
        shares = best_static(case.scenario, case.per_rank, case.steps, caps)
        loader = DataLoader(data, batch_sampler=StaticShares(samples, shares, rank))
    fit(strategy, model, loader, steps=case.steps, callbacks=[clock, emulated], use_distributed_sampler=name != "folk")
    return clock, model, emulated


def run_case(case: Case, repeats: int, rank: int) -> dict[str, Any]:
    """Runs every engine ``repeats`` times, interleaved; returns raw steps, shares and gradient errors of rank 0."""
    engines = ("ddp", "folk", "ours", "ours again")
    data = synthetic(case.global_batch * (case.steps + 2), FEATURES)
    compared = Compared(engines, first_gradient(Model().net, data, case.global_batch))
    for _ in range(repeats):
        with forgetting():
            for name in engines:
                if not (case.equal and name in ("folk", "ours again")):  # nothing to divide, or to know beforehand
                    clock, model, emulated = train(name.split()[0], case, rank)
                    compared.add(name, clock, emulated.taken(), model.first_gradient)
    return compared.found


def equal_case(case: EqualCase, step_s: float) -> Case:
    """Returns devices whose work, real work included, takes ``step_s``."""
    scenario = Scenario(speeds=[1.0], step_s=step_s)
    return Case(name=case.name, world_size=case.world_size, scenario=scenario, per_rank=8, steps=case.steps)


def run_equal(case: EqualCase, repeats: int, rank: int) -> dict[str, Any]:
    """Steps of stock DDP, stock DDP again (the noise) and ours, interleaved: median, p95 and longest of each run."""
    step_s = case.ddp_step_s
    for _ in range(3):  # until a step of stock DDP takes that long, as far as it can
        clock, *_ = train("ddp", equal_case(case, step_s), rank)
        ddp_s = max(gathered(statistics.median(clock.steps_s()[5:])))
        step_s = max(1e-4, step_s + case.ddp_step_s - ddp_s)  # real work remains, and what is no work
    engines = ("ddp", "ddp again", "ours")
    out: dict[str, Any] = {name: {e: [] for e in engines} for name in ("median_s", "p95_s", "longest_s", "taken")}
    for _ in range(repeats):
        for name in engines:
            clock, _, emulated = train(name.split()[0], equal_case(case, step_s), rank)
            steps_s = clock.steps_s()[5:]
            out["median_s"][name].append(statistics.median(steps_s))
            out["p95_s"][name].append(percentile(steps_s, 95))
            out["longest_s"][name].append(max(steps_s))
            out["taken"][name].append(max(gathered(emulated.taken())))
    return {**out, "emulated_s": step_s}


CONTENDERS: dict[str, Callable[[], Strategy]] = {
    "DDP": lambda: gloo(DDPStrategy),
    "DDP again": lambda: gloo(DDPStrategy),
    "static split": lambda: gloo(DDPStrategy),
    "free core alone": lambda: SingleDeviceStrategy("cpu"),
    "balanced": lambda: gloo(LoadBalancedStrategy),
    "balanced, narx": lambda: gloo(LoadBalancedStrategy, predictor="narx"),
    "stale": lambda: gloo(BoundedStalenessStrategy),
}


def run_contended(case: Contention, repeats: int, rank: int) -> dict[str, Any]:
    """Real work beside busy loops on rank 1's core: the seconds of whole runs and of steady steps by engine."""
    names: Sequence[str] = [name for name in CONTENDERS if name != case.left_out]
    out: dict[str, Any] = {name: {"whole_s": [], "steady_s": []} for name in names}
    for turn in range(repeats):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            with forgetting(), BusyLoops(case.loops) if rank == 1 else nullcontext() as loops:
                dist.barrier()
                took = contend(name, case, Load(loops, case.is_loaded), rank)
            for field, seconds in zip(out[name], zip(*gathered(took), strict=True), strict=True):
                out[name][field].append(max(seconds))
    return out


def contend(name: str, case: Contention, load: Load, rank: int) -> tuple[float, float]:
    """Trains by a contender; returns the time of the run and of a steady step, 0.0 of a rank that is left out [s]."""
    alone, clock, model = name == "free core alone", Clock(), REAL[case.model]
    if alone and rank > 0:
        return 0.0, 0.0
    total = case.per_rank * case.world_size
    data, size = model.dataset(total * (case.steps + 2)), total if alone else case.per_rank
    loader = DataLoader(data, batch_size=size, shuffle=True)
    if name == "static split":
        loader = DataLoader(data, batch_sampler=StaticShares(len(data), case.shares, rank))
    fit(
        CONTENDERS[name](), model.make(), loader, steps=case.steps, callbacks=[load, clock], ranks=1 if alone else None,
        use_distributed_sampler=name != "static split", plugins=[LightningEnvironment()] if alone else None,
    )  # fmt: skip
    return clock.fit_s, clock.steady_s()


def measure(rank: int, name: str, repeats: int, quick: bool) -> dict[str, Any]:
    every = [*unequal_cases(), *equal_cases(), *contended()]
    case = next(case.quick() if quick else case for case in every if case.name == name)
    if isinstance(case, Contention):
        return run_contended(case, repeats, rank)
    return run_equal(case, repeats, rank) if isinstance(case, EqualCase) else run_case(case, repeats, rank)


if __name__ == "__main__":
    _path, _name, _repeats, _extent = sys.argv[1:]
    if "busy loop" in _name:  # a core for each rank; before there are other threads
        pin([usable_cores()[int(os.environ["LOCAL_RANK"])]])
    as_rank(Path(_path), lambda rank: measure(rank, _name, int(_repeats), _extent == "quick"))
