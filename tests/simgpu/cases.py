"""Cases of the matrix: an engine, what carries its messages, a precision, a plan and a feature; ten steps of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Weights, quiet_trainer, regression
from tests.ranks.pipeline.kit import PLANS
from tests.ranks.pipeline.replan_kit import Scripted, group, heard, plan
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks

BATCH, EPOCHS = 16, 2
DATA = regression(80, dtype=torch.float32)  # five batches an epoch

# Relative distance of all weights after ten steps of Adam, to one process with the same global batches and precision.
# In mixed precision the ranks' parts of a batch are rounded for themselves.
TOLERANCE = {"32-true": 1e-6, "bf16-mixed": 1e-2, "16-mixed": 1e-3}

# Plans that follow one another in a run of two ranks: layers move, a rank is left alone, all come back.
_MOVES = {
    1: plan(group([0, 1], [0, 3, 6], 16)),
    3: plan(group([1, 0], [0, 4, 6], 16)),
    5: plan(group([0], [0, 6], 9, 9), group([1], [0, 6], 7, 3)),
    7: PLANS["1x2"],
}
# What an engine is given, so that it does the same however fast the ranks are.
_STEADY: dict[str, dict[str, Any]] = {
    "stale": {"policy": "bsp"},
    "federated": {"policy": "fedavg", "local_steps": 2},
    "auto": {"engines": ("balanced", "pipeline")},  # whose weights are exact
}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        engine: short name, see `tests.simgpu.kit.strategy_of`.
        backend: ``"gloo"`` or ``"nccl"``.
        precision: the Trainer's.
        plan: of a pipeline: a name of tests/ranks, ``"moves"``; empty: the planner's.
        feature: ``"accumulation"``, ``"norm"``, ``"validation"``, ``"resume"``; empty: none.
        world: number of ranks.
        gpus: devices that they share; 0: each has its own.
    """

    engine: str
    backend: str = "gloo"
    precision: str = "32-true"
    plan: str = ""
    feature: str = ""
    world: int = 2
    gpus: int = 0

    def __str__(self) -> str:
        shared = f"{self.gpus} shared" if self.gpus else ""
        parts = (self.engine, self.plan, self.backend, self.precision, self.feature, shared)
        return " ".join(part for part in parts if part and part != "32-true")

    @property
    def by_ranks(self) -> bool:
        """Whether one process does not do the same: it is compared with ranks on the host then."""
        return self.engine == "federated" or (self.feature == "norm" and self.engine != "pipeline")


@dataclass
class Found:
    """What came of a run on one rank."""

    weights: Weights
    logged: dict[str, float]
    steps: int
    losses: list[float]


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.found.append(loss.detach().clone())


def _module(case: Case) -> LightningModule:
    if case.engine == "pipeline":
        return kit.DeepPlain()
    return kit.WithNorm(dropout=0.0) if case.feature == "norm" else kit.Plain()


def _options(case: Case) -> dict[str, Any]:
    return {
        "max_steps": -1,
        "max_epochs": EPOCHS,
        **_precision(case.precision),
        "accumulate_grad_batches": 2 if case.feature == "accumulation" else 1,
    }


def _precision(precision: str) -> dict[str, Any]:
    """The scale of float16 begins low: which steps are skipped because of it depends on the size of the parts."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    return {"plugins": [MixedPrecision("16-mixed", "cuda", scaler)]}


def _strategy(case: Case) -> Any:
    options = dict(_STEADY.get(case.engine, {}))
    if case.engine == "balanced" and case.feature == "norm":
        options["rebalance"] = False
    if case.engine == "pipeline" and case.plan:
        options["plan"] = "1x2" if case.plan == "moves" else case.plan
    if case.plan == "moves":
        options |= {"controller": Scripted(_MOVES), "global_batch_size": BATCH}
    return kit.strategy_of(case.engine, case.backend, **options)


def _loaders(case: Case, world: int) -> list[DataLoader]:
    validates = case.feature == "validation"
    return [kit.loader(world, batch=BATCH, data=DATA), *([kit.val_loader()] if validates else [])]


@contextmanager
def _plans_follow(case: Case) -> Iterator[None]:
    with heard(at_once=True) if case.plan == "moves" else nullcontext():
        yield


def trained(rank: int, world: int, case: Case, on_host: bool = False) -> Found:
    """Trains as a rank: on simulated GPUs, or on the host as the oracle of what one process cannot do."""
    losses = _Losses()

    def trainer(**options: Any) -> Trainer:
        options = {**_options(case), "callbacks": [losses], **options}
        if on_host:
            environment = [RankEnvironment(rank, world)]
            return quiet_trainer(devices=world, strategy=_strategy(case), plugins=environment, **options)
        return kit.trainer_on_gpus(world, _strategy(case), **options)

    with _plans_follow(case):
        module, found = _module(case), None
        if case.feature == "resume":
            first = trainer(max_epochs=1)
            kit.fit_quietly(first, module, *_loaders(case, world))
            first.save_checkpoint("half.ckpt")
            module, found = _module(case), "half.ckpt"
        last = trainer()
        kit.fit_quietly(last, module, *_loaders(case, world), ckpt_path=found)
    if case.plan == "moves":
        moved = len(last.strategy.replans)  # type: ignore[attr-defined]
        assert moved == len(_MOVES) or (moved and case.feature == "resume"), moved
    numbers = [float(loss) for loss in losses.found]
    return Found(kit.host_weights(module), kit.scalars(last), last.global_step, numbers)


def _alone(rank: int, world: int, case: Case) -> Found:
    """Trains in one process with the same global batches."""
    losses = _Losses()
    module = _module(case)
    on_gpu = {"accelerator": "gpu"} if case.precision != "32-true" else {}
    trainer = quiet_trainer(devices=1, **{**_options(case), "callbacks": [losses], **on_gpu})
    sampler: Any = DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=True, seed=0)
    loaders = [DataLoader(DATA, batch_size=BATCH, sampler=sampler), *_loaders(case, 1)[1:]]
    kit.fit_quietly(trainer, module, *loaders)
    numbers = [float(loss) for loss in losses.found]
    return Found(kit.host_weights(module), kit.scalars(trainer), trainer.global_step, numbers)


def expected(case: Case) -> list[Found]:
    """Returns what each rank should find: of one process in float32 on the host, in mixed precision on one GPU."""
    if case.by_ranks:
        return _of_ranks(case.engine, case.precision, case.feature, case.world)
    return [_of_one(case.engine == "pipeline", case.precision, case.feature)] * case.world


@lru_cache
def _of_one(pipeline: bool, precision: str, feature: str) -> Found:
    case = Case("pipeline" if pipeline else "ddp", precision=precision, feature=feature)
    if precision == "32-true":
        torch.manual_seed(0)
        return _alone(0, 1, case)
    return run_sim_ranks(1, _alone, case)[0]


@lru_cache
def _of_ranks(engine: str, precision: str, feature: str, world: int) -> list[Found]:
    case = Case(engine, "gloo", precision, feature=feature, world=world)
    if precision == "32-true":
        return run_ranks(world, trained, case, True)
    assert engine != "federated", "there is no other implementation to compare with"
    return run_sim_ranks(world, trained, Case("ddp", "gloo", precision, feature=feature, world=world))


def run(case: Case, **options: Any) -> list[Found]:
    """Runs a case on simulated GPUs."""
    nccl = case.backend == "nccl"
    return run_sim_ranks(case.world, trained, case, gpus=case.gpus or None, nccl=nccl, **options)
