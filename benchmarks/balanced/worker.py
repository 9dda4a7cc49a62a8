"""One rank of one benchmark group; started by torchrun, writes what it measured as JSON on rank 0."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from benchmarks.balanced.cases import Case, EqualCase, best_static, equal_cases, unequal_cases
from benchmarks.balanced.figures import SETTLED
from benchmarks.emulated import Emulated
from benchmarks.steps import percentile
from benchmarks.torchrun import as_rank
from lightning_hetero import LoadBalancedStrategy, Scenario
from lightning_hetero.emulate.throttle import Throttle

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


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().reshape(-1).clone() for p in model.parameters() if p.grad is not None])


def dataset(samples: int) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=g, dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True) + x[:, :1] * (torch.arange(samples) % 7).unsqueeze(1))


class Stopwatch(Callback):
    """Duration of each step on this rank, and the samples it was given."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []
        self.samples: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.starts_s.append(time.perf_counter())
        self.samples.append(len(batch[0]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts_s.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.starts_s, self.starts_s[1:], strict=False)]


class CountedThrottle(Throttle):
    """A throttle that counts the processor time of the real work within the emulated one [s]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.work_s = self._since_work_s = self._gradient_s = 0.0

    def begin_work(self) -> None:
        super().begin_work()
        self._since_work_s = time.process_time()

    def before_backward(self) -> None:
        self.work_s += time.process_time() - self._since_work_s
        super().before_backward()

    def backward_began(self) -> None:
        super().backward_began()
        self._since_work_s = self._gradient_s = time.process_time()

    def gradient_came(self) -> None:
        super().gradient_came()
        self._gradient_s = time.process_time()

    def after_backward(self) -> None:
        super().after_backward()
        self.work_s += self._gradient_s - self._since_work_s


class ChargedDevice(Emulated):
    """An emulated device, and the processor time of a step that is not the device's: the framework's, and ours."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._measured_throttle: CountedThrottle | None = None
        self._since_s, self._steps_since = 0.0, 0

    def _made(self, *args: Any, **kwargs: Any) -> Throttle:
        self._measured_throttle = throttle = CountedThrottle(*args, **kwargs)
        self.pacer = throttle.pacer
        return throttle

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._measured_throttle is not None
        if batch_idx == SETTLED:  # what comes once is over
            self._since_s, self._measured_throttle.work_s, self._steps_since = time.process_time(), 0.0, 0
        self._steps_since += 1
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._measured_throttle is not None
        self.framework_s = (time.process_time() - self._since_s - self._measured_throttle.work_s) / self._steps_since


class StaticShares(Sampler[list[int]]):
    """What one writes by hand: every rank takes a fixed, uneven slice of each global batch."""

    def __init__(self, samples: int, shares: tuple[int, ...], rank: int) -> None:
        self.samples, self.shares, self.rank = samples, shares, rank

    def __len__(self) -> int:
        return self.samples // sum(self.shares)

    def __iter__(self) -> Iterator[list[int]]:
        total, offset = sum(self.shares), sum(self.shares[: self.rank])
        g = torch.Generator().manual_seed(0)  # the order of torch's DistributedSampler in epoch 0
        order = torch.randperm(self.samples, generator=g).tolist()
        for t in range(len(self)):
            yield order[t * total + offset : t * total + offset + self.shares[self.rank]]


class CriticalPathProbe(Callback):
    """Seconds per step of what the engine does on a rank besides DDP's own work, after a warm-up.

    ``fetch``: waiting for the last exchange and deciding, before the batch is drawn: everybody waits for it.
    ``beside``: sending and evaluating when the rank's own gradients are complete, while those of all are summed.
    Whether the sums hide it is looked up in DDP's communication: where they were over before it was, all of it counts.
    """

    KINDS = ("fetch_s", "beside_s", "critical_s")
    WARM_UP = 20

    def __init__(self) -> None:
        self.fetch_s: list[float] = []
        self.beside_s: list[float] = []
        self.critical_s: list[float] = []
        self.hidden: list[bool] = []
        self._spent_s = {"full_shares": 0.0, "step_over": 0.0}
        self._sums: list[Any] = []
        self._over, self._looks = True, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        model.register_comm_hook(dist.group.WORLD, self._sum)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # there is a controller since the first batch
            run = trainer.strategy._run  # type: ignore[attr-defined]
            self._wrap(run.binder.controller, "full_shares")
            self._wrap(run, "step_over")
            self._looks = True

    def _sum(self, group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations and knows no words for them
        """What DDP does without a hook; Python is told of the end only after `_look`, or it would delay that."""
        mean = bucket.buffer().div_(group.size())
        told: torch.futures.Future[Tensor] = torch.futures.Future()
        self._sums.append((dist.all_reduce(mean, group=group, async_op=True), told))
        if not self._looks:
            self._look()
        return told

    def _look(self) -> None:
        """Whether DDP's sums are over."""
        self._over = all(work.is_completed() for work, _ in self._sums)
        for work, told in self._sums:
            work.get_future().then(lambda future, told=told: told.set_result(future.value()[0]))
        self._sums = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx >= self.WARM_UP:
            fetch_s, beside_s = self._spent_s["full_shares"], self._spent_s["step_over"]
            self.fetch_s.append(fetch_s)
            self.beside_s.append(beside_s)
            self.hidden.append(not self._over)
            self.critical_s.append(fetch_s + (beside_s if self._over else 0.0))
        self._spent_s = dict.fromkeys(self._spent_s, 0.0)
        self._over = True

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before_s = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._spent_s[name] += time.perf_counter() - before_s
                if name == "step_over":
                    self._look()

        setattr(owner, name, timed)


def train(
    engine: str,
    case: Case,
    rank: int,
    *,
    strategy: Strategy | None = None,
    probe: CriticalPathProbe | None = None,
) -> tuple[Stopwatch, Model, ChargedDevice]:
    """Runs one training and returns its clock, its model and the emulated device.

    Args:
        engine: ``"ddp"``, ``"folk"`` or ``"ours"``.
        case: to train.
        rank: this one.
        strategy: instead of the engine's.
        probe: of the critical path.
    """
    samples = case.global_batch * (case.steps + 2)
    data, watch, model = dataset(samples), Stopwatch(), Model()
    kwargs: dict[str, Any] = {}
    loader = DataLoader(data, batch_size=case.per_rank, shuffle=True)
    if strategy is not None:
        kwargs["strategy"] = strategy
    elif engine == "ours":
        kwargs["strategy"] = LoadBalancedStrategy(process_group_backend="gloo", min_samples=case.min_samples)
    else:
        kwargs["strategy"] = DDPStrategy(process_group_backend="gloo")
    if engine == "folk":
        caps = [case.global_batch] * case.world_size
        sampler = StaticShares(samples, best_static(case.scenario, case.per_rank, case.steps, caps), rank)
        loader = DataLoader(data, batch_sampler=sampler)
        kwargs["use_distributed_sampler"] = False
    emulated = ChargedDevice(case.scenario)
    callbacks: list[Callback] = [watch, emulated]
    trainer = Trainer(
        accelerator="cpu",
        devices=case.world_size,
        max_steps=case.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks + ([probe] if probe else []),
        **kwargs,
    )
    gc.collect()  # of the imports' and the last run's, or it comes in some step of some engine
    trainer.fit(model, loader)
    return watch, model, emulated


@contextmanager
def forgetting() -> Iterator[None]:
    """Inside, our engines know the speeds of the runs inside."""
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", LIGHTNING_HETERO_CACHE=folder):
        yield


def true_gradient(case: Case) -> Tensor:
    """Gradient of the mean over the first global batch, in one process."""
    data = dataset(case.global_batch * (case.steps + 2))
    g = torch.Generator().manual_seed(0)
    first = torch.randperm(len(data), generator=g)[: case.global_batch]
    model = Model()
    x, y = data.tensors
    nn.functional.mse_loss(model.net(x[first]), y[first]).backward()
    return flat_gradient(model)


def gathered(own: Any) -> list[Any]:
    """Returns every rank's value, by rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def run_case(case: Case, repeats: int, rank: int) -> dict[str, Any]:
    """Runs every engine ``repeats`` times, interleaved; returns raw steps, shares and gradient errors of rank 0."""
    engines = ("ddp", "folk", "ours", "ours again")
    fields = ("steps_s", "samples", "gradient_error", "taken", "framework_s")
    out: dict[str, Any] = {engine: {field: [] for field in fields} for engine in engines}
    reference = true_gradient(case)
    for _ in range(repeats):
        with forgetting():
            for engine in engines:
                if case.equal and engine in ("folk", "ours again"):
                    continue  # there is nothing to divide unevenly, and nothing to know beforehand
                watch, model, emulated = train(engine.split()[0], case, rank)
                assert model.first_gradient is not None
                error = float((model.first_gradient - reference).norm() / reference.norm())
                samples = gathered(watch.samples)
                out[engine]["steps_s"].append(watch.steps_s())
                out[engine]["samples"].append([list(step) for step in zip(*samples, strict=True)])
                out[engine]["gradient_error"].append(error)
                out[engine]["taken"].append(max(gathered(emulated.taken())))
                out[engine]["framework_s"].append(sum(gathered(emulated.framework_s)))
    return out


def equal_case(case: EqualCase, step_s: float) -> Case:
    """Returns devices whose work, real work included, takes ``step_s``."""
    scenario = Scenario(speeds=[1.0], step_s=step_s)
    return Case(name=case.name, world_size=case.world_size, scenario=scenario, per_rank=8, steps=case.steps)


def fitted_step_s(ddp_step_s: float, case_of: Callable[[float], Case], rank: int, tries: int = 3) -> float:
    """Returns the emulated work with which a step of stock DDP takes so long, as far as it can [s].

    Args:
        ddp_step_s: what a step is to take, all in all [s].
        case_of: makes the case of this much work in a step [s].
        rank: this one.
        tries: runs of it.
    """
    step_s = ddp_step_s
    for _ in range(tries):
        watch, *_ = train("ddp", case_of(step_s), rank)
        ddp_s = max(gathered(statistics.median(watch.steps_s()[5:])))
        step_s = max(1e-4, step_s + ddp_step_s - ddp_s)  # real work remains, and what is no work
    return step_s


def run_equal(case: EqualCase, repeats: int, rank: int) -> dict[str, Any]:
    """Steps of stock DDP, stock DDP again (the noise) and ours, interleaved: median, p95 and longest of each run."""
    step_s = fitted_step_s(case.ddp_step_s, partial(equal_case, case), rank)
    engines = ("ddp", "ddp again", "ours")
    out: dict[str, Any] = {name: {e: [] for e in engines} for name in ("median_s", "p95_s", "longest_s", "taken")}
    for _ in range(repeats):
        for engine in engines:
            watch, _, emulated = train(engine.split()[0], equal_case(case, step_s), rank)
            steps_s = watch.steps_s()[5:]
            out["median_s"][engine].append(statistics.median(steps_s))
            out["p95_s"][engine].append(percentile(steps_s, 95))
            out["longest_s"][engine].append(max(steps_s))
            out["taken"][engine].append(max(gathered(emulated.taken())))
    return {**out, "emulated_s": step_s}


def run_critical_path(case: Case, rank: int) -> dict[str, list[list[Any]]]:
    """Seconds per step of exchange and decision, per kind and rank, and whether DDP's sums hid what is beside them."""
    probe = CriticalPathProbe()
    train("ours", case, rank, probe=probe)
    return {kind: gathered(getattr(probe, kind)) for kind in (*CriticalPathProbe.KINDS, "hidden")}


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def measure(rank: int, repeats: int, quick: bool) -> dict[str, Any]:
    world_size = dist.get_world_size()
    cases = [c.quick() if quick else c for c in unequal_cases() if c.world_size == world_size]
    result: dict[str, Any] = {"cores": usable_cores(), "cases": {c.name: run_case(c, repeats, rank) for c in cases}}
    equals = [e.quick() if quick else e for e in equal_cases() if e.world_size == world_size]
    result["equal"] = {e.name: run_equal(e, max(repeats, 2 if quick else 9), rank) for e in equals}
    if world_size == 4:
        paths = (cases[0], equal_case(equals[1], equals[1].ddp_step_s))
        steps = 60 if quick else 320
        result["critical_path"] = {c.name: run_critical_path(replace(c, steps=steps), rank) for c in paths}
    return result


if __name__ == "__main__":
    _path, _repeats, _extent = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(rank, int(_repeats), _extent == "quick"))
