"""The stale engine against a single process: in float64, with a barrier, it is the same mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from torch.utils.data import DataLoader

from lightning_hetero.stale.decide import speeds
from lightning_hetero.stale.decide.policy import Bsp, Claim, Flexible, Grant, Hold
from tests.ranks.exact_models import (
    Accumulating,
    Gan,
    Groups,
    Manual,
    SumLoss,
    Tokens,
    TokensByMethod,
    TwoHeads,
    sequences,
    tokens_of,
)
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, single, stale, weights
from tests.ranks.stale.models import (
    ChannelsLast,
    Constant,
    Decaying,
    Frozen,
    GanByParts,
    ManualClip,
    ManualSchedule,
    OneCycle,
    OwnClipping,
    PerEpoch,
    Tied,
    Unfreeze,
    Unfreezing,
    UserOptimizer,
    WithOptimizer,
    ZeroByModule,
)

pytestmark = pytest.mark.ranks
EXACT = 1e-12
SAMPLES, BATCH, EPOCHS = 87, 24, 3  # the last of four batches has 15: shares differ


@dataclass
class Case:
    """A model, and what is changed around it.

    Attributes:
        oracle: the model of the single process, if it is another one; given the number of ranks.
        callbacks: makes fresh ones.
    """

    make: Callable[[], Toy] = Toy
    trainer: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    data: Callable[[], Any] = lambda: regression(SAMPLES)
    oracle: Callable[[int], Toy] | None = None


def optimizer(name: str, **options: Any) -> Callable[[], Toy]:
    return lambda: WithOptimizer(name, **options)


few = partial(sequences, SAMPLES)
AUTOMATIC: dict[str, Case] = {
    "plain": Case(),
    "incomplete batch dropped": Case(loader={"drop_last": True}),
    "accumulation, last window incomplete": Case(trainer={"accumulate_grad_batches": 3}),
    "accumulation that changes": Case(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]),
    "clipping by norm": Case(trainer={"gradient_clip_val": 0.05}),
    "clipping by value": Case(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clipping under accumulation": Case(trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    "clipping by a hook": Case(OwnClipping),
    "zeroing by the module": Case(ZeroByModule),
    "zeroing by the module, accumulation": Case(ZeroByModule, {"accumulate_grad_batches": 2}),
    "groups and scheduler per step": Case(Groups),
    "scheduler per step, accumulation": Case(Groups, {"accumulate_grad_batches": 2}),
    "scheduler per epoch": Case(PerEpoch),
    "one cycle": Case(OneCycle),
    "parameters used in turns": Case(TwoHeads),
    "decay of parameters used in turns": Case(Decaying),
    "frozen parameters": Case(Frozen),
    "parameters unfrozen later": Case(Unfreezing, callbacks=lambda: [Unfreeze()]),
    "weight averaging": Case(callbacks=lambda: [StochasticWeightAveraging(5e-3, 1, annealing_epochs=1)]),
    "tied weights": Case(Tied),
    "channels last": Case(ChannelsLast),
    "mean over tokens": Case(Tokens, strategy={"batch_weight": tokens_of}, data=few),
    "mean over tokens, by method": Case(TokensByMethod, data=few, oracle=lambda world: Tokens()),
    "loss that is a sum": Case(SumLoss, strategy={"loss_reduction": "sum"}, oracle=SumLoss),
    "SGD": Case(optimizer("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "AdamW": Case(optimizer("AdamW", lr=0.01, amsgrad=True)),
    "Adagrad": Case(optimizer("Adagrad", lr=0.05)),
    "RMSprop": Case(optimizer("RMSprop", lr=0.01, momentum=0.5)),
    "a user's optimizer": Case(UserOptimizer),
}
MANUAL: dict[str, Case] = {
    "one optimizer": Case(Manual),
    "two optimizers": Case(Gan),
    "two optimizers, gradients dropped by the module's parts": Case(GanByParts),
    "accumulation": Case(Accumulating),
    "clipping": Case(ManualClip),
    "schedulers, zeroing by the module": Case(ManualSchedule),
}
CASES = {**AUTOMATIC, **{f"manual: {name}": case for name, case in MANUAL.items()}}
IN_TIME = (
    "plain", "accumulation, last window incomplete", "clipping by norm", "groups and scheduler per step", "one cycle",
    "parameters used in turns", "parameters unfrozen later", "mean over tokens", "loss that is a sum",
    "manual: two optimizers", "manual: accumulation",
)  # fmt: skip
IN_PARTS = (
    "plain", "accumulation, last window incomplete", "clipping by norm", "mean over tokens", "loss that is a sum",
    "parameters used in turns",
)  # fmt: skip
OF_THREE = ("plain", "mean over tokens", "loss that is a sum", "manual: accumulation")


# Others have the same and more: accumulation, the module's own parts, decay; optimizers are whatever the module makes.
RARELY = (
    "clipping by norm", "zeroing by the module", "groups and scheduler per step", "parameters used in turns", "Adagrad",
    "RMSprop", "manual: one optimizer",
)  # fmt: skip


class InPieces(Bsp):
    """A barrier whose parts are computed in micro-batches."""

    def claim(self, claim: Claim) -> Grant | Hold:
        verdict = super().claim(claim)
        return replace(verdict, micro=5) if isinstance(verdict, Grant) else verdict


SETTINGS: dict[str, tuple[int, Callable[[], Any]]] = {
    "barrier": (2, lambda: "bsp"),
    "barrier, three": (3, lambda: "bsp"),
    "micro-batches": (2, lambda: InPieces()),
    "flexible, in time": (3, lambda: Flexible(grace=math.inf)),
}
ONLY = {
    "barrier": [name for name in CASES if name not in OF_THREE],
    "barrier, three": OF_THREE,
    "flexible, in time": IN_TIME,
    "micro-batches": IN_PARTS,
}


class Together(Callback):
    """Every rank has its part of a batch before one begins to compute it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        dist.barrier()


def fit(rank: int, world: int, name: str, setting: str) -> Any:
    case = CASES[name]
    module = case.make()
    in_time = setting == "flexible, in time"
    strategy = stale(policy=SETTINGS[setting][1](), **case.strategy)
    callbacks = [*case.callbacks(), *([Together()] if in_time else [])]
    trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, **{"max_epochs": EPOCHS, **case.trainer})
    with patch.object(speeds, "Kalman", Constant) if in_time else nullcontext():  # in the forked server, too
        trainer.fit(module, DataLoader(case.data(), batch_size=BATCH // world, shuffle=True, **case.loader))
    return weights(module), trainer.global_step, dict(trainer.callback_metrics)


@pytest.mark.stock_ddp(
    "accumulate_grad_batches", "gradient_clip_val", "manual", "optimizers", "schedulers",
    "find_unused_parameters", "tied", "BaseFinetuning", "token_means", "GradientAccumulationScheduler",
    "StochasticWeightAveraging", "stale"
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(name, setting, marks=[pytest.mark.long] if name in RARELY else [])
        for name in CASES
        for setting, only in ONLY.items()
        if name in only
    ],
)
@pytest.mark.short("barrier", "barrier, three")
def test_weights_are_those_of_one_process(name: str, setting: str) -> None:
    case, world = CASES[name], SETTINGS[setting][0]
    module = case.oracle(world) if case.oracle is not None else case.make()
    untrained = weights(module)
    oracle = single(
        module, case.data(), BATCH, loader_args=case.loader, callbacks=case.callbacks(),
        **{"max_epochs": EPOCHS, **case.trainer},
    )  # fmt: skip
    expected = weights(module)
    assert expected.distance(untrained) > 1e-3
    for result, step, metrics in run_ranks(world, fit, name, setting):
        assert result.distance(expected) <= EXACT
        assert step == oracle.global_step
        if name == "plain":
            assert torch.isclose(metrics["loss_epoch"], oracle.callback_metrics["loss_epoch"], rtol=1e-12)
