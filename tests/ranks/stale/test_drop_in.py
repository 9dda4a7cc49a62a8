"""What stock DDP's users do with hooks, optimizers and finders, on two ranks: the weights and counters are stock DDP's.

With the barrier policy, so that equal means equal; and with a rank that is late, for the counters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.stale.decide.policy import Bsp
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, rank_trainer, regression, stale, weights
from tests.ranks.stale.fits import Late
from tests.ranks.stale.models import Norm

pytestmark = pytest.mark.ranks

EXACT = 1e-12
SAMPLES, BATCH = 32, 2  # per device: eight batches of four
Facts = dict[str, Any]


class Counting(Toy):
    """Notes what it logs in every batch, and where each epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[int, int, float]] = []
        self.mine: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mine.append(float(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        loss = float(self.trainer.callback_metrics.get("loss_epoch", 0.0))
        self.ends.append((self.trainer.fit_loop.epoch_loop.batch_idx, self.global_step, round(loss, 12)))

    def facts(self) -> Facts:
        return {"ends": self.ends}


class NoOptimizer(Counting):
    def configure_optimizers(self) -> Any:
        return None


class SkipsTheRest(Counting):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 + self.current_epoch else None


class EverySecond(Counting):
    """Steps in every second batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class AroundTheWrapper(Counting):
    """Steps the optimizer itself and not Lightning's wrapper, which would call hooks and count."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(closure=optimizer_closure)


class ManualEverySecond(Counting):
    """Accumulates by hand."""

    wrapped = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.wrapped)
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualUnwrapped(ManualEverySecond):
    wrapped = False


class TwoFrequencies(Counting):
    """Two optimizers, one of which steps in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = nn.Linear(6, 1, dtype=torch.float64)
        nn.init.constant_(self.second.weight, 0.1)
        nn.init.constant_(self.second.bias, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx % 2 == 0:
            second.zero_grad()
            x, y = batch
            self.manual_backward(nn.functional.mse_loss(self.second(x), y))
            second.step()

    def configure_optimizers(self) -> Any:
        one, other = self.net.parameters(), self.second.parameters()
        return [torch.optim.Adam(one, lr=1e-2), torch.optim.SGD(other, lr=0.05, momentum=0.9)]


class Validated(Counting):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        self.ends.append((-1, self.global_step, round(float(self.trainer.callback_metrics["val"]), 12)))


class Restarting(LearningRateFinder):
    """Looks for a learning rate when the first and second epoch begin, as Lightning's documentation shows."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch < 2:
            self.lr_find(trainer, pl_module)


class Normed(Norm, Validated):
    """With momentum, and validated."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


@dataclass
class Case:
    module: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Callback]] = tuple
    trace: bool = True  # False: the callbacks leave none, stock DDP trains without them
    late: str | None = "middle"  # so are the counters if a rank is late there, see `Late`; None: not tried


def checkpoints() -> list[Callback]:
    return [ModelCheckpoint(Path("saved"), filename="{step}", every_n_train_steps=2, save_top_k=-1)]


UNDECIDED: dict[str, Any] = {"early_stop_threshold": None, "update_attr": False}

CASES: dict[str, Case] = {
    "no optimizer": Case(NoOptimizer),
    "rest of an epoch skipped": Case(SkipsTheRest, {"max_epochs": 2}),
    "every second batch": Case(EverySecond, {"max_epochs": 2}),
    "around the wrapper": Case(AroundTheWrapper),
    "by hand, every second batch": Case(ManualEverySecond),
    "by hand, around the wrapper": Case(ManualUnwrapped),
    "two frequencies": Case(TwoFrequencies),
    "checkpoints by hand": Case(ManualEverySecond, callbacks=checkpoints),
    "validation in a window": Case(
        Validated, {"accumulate_grad_batches": 4, "val_check_interval": 3, "max_epochs": 2}
    ),
    "windows of 5 then 3": Case(
        Counting, {"max_epochs": 3}, lambda: [GradientAccumulationScheduler({0: 5, 1: 1, 2: 3})]
    ),
    "averages with BatchNorm": Case(
        Normed, {"max_epochs": 3}, lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)], late=None
    ),
    "finder": Case(Counting, callbacks=lambda: [LearningRateFinder(num_training_steps=6, **UNDECIDED)]),
    "finder restarts": Case(
        Counting, {"max_epochs": 3}, lambda: [Restarting(num_training_steps=5, **UNDECIDED)], trace=False
    ),
}


def fit(rank: int, world: int, name: str, engine: str) -> tuple[Facts, Weights]:
    case = CASES[name]
    module, late = case.module(), [Late(1, str(case.late), 2)] if engine == "late" else []
    strategy: Any = stale() if late else stale(policy=Bsp())
    if engine == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    watch = list(case.callbacks()) if case.trace or engine != "ddp" else []
    for callback in watch:
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = str(Path(f"{name} {engine}".replace(" ", "_")).absolute())
    trainer = rank_trainer(
        rank, world, strategy, callbacks=[*watch, *late],
        **{"max_epochs": 1, "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in watch), **case.options},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH), DataLoader(regression(8), batch_size=2))
    facts = {**module.facts(), "steps": trainer.global_step, "epochs": trainer.current_epoch}
    for callback in watch:
        if isinstance(callback, ModelCheckpoint):
            facts["files"] = sorted(path.name for path in Path(str(callback.dirpath)).iterdir())
        if isinstance(callback, LearningRateFinder):
            assert callback.optimal_lr is not None
            facts["rates"] = callback.optimal_lr.results["lr"]
    return facts, weights(module)


def fits(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    engines = ("ddp", "barrier", "late")
    return {name: {e: fit(rank, world, name, e) for e in engines if e != "late" or CASES[name].late} for name in names}


@cache
def two_ranks(half: int) -> list[dict[str, Any]]:
    names = tuple(CASES)
    middle = len(names) // 2
    return run_ranks(2, fits, names[middle:] if half else names[:middle], timeout_s=100.0)


@pytest.mark.stock_ddp(
    "no_optimizer", "hooks_step", "manual", "GradientAccumulationScheduler", "epoch_ended",
    "ModelCheckpoint", "StochasticWeightAveraging_norm", "LearningRateFinder", "val_check_interval",
    "stale"
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_counters_and_weights_are_those_of_stock_ddp(name: str) -> None:
    ranks = two_ranks(list(CASES).index(name) >= len(CASES) // 2)
    stock, expected = ranks[0][name]["ddp"]
    for rank in ranks:
        facts, found = rank[name]["barrier"]
        assert facts == stock if CASES[name].trace else facts["steps"] == stock["steps"]
        statistics = {key: found.pop(key) for key in list(found) if key.startswith("norm.")}
        expected = Weights({key: value for key, value in expected.items() if not key.startswith("norm.")})
        assert found.distance(expected) <= EXACT
        if name == "averages with BatchNorm":  # of stock DDP rank 0's samples, here all of them
            mean = regression(SAMPLES).tensors[0].mean(0)
            torch.testing.assert_close(statistics["norm.running_mean"], mean, rtol=0, atol=EXACT)
            assert int(statistics["norm.num_batches_tracked"]) == SAMPLES // (2 * BATCH)
        if "late" in rank[name]:
            late = rank[name]["late"][0]
            assert late["steps"] == stock["steps"]
            assert [e[:2] for e in late["ends"]] == [e[:2] for e in facts["ends"]]


# ---- values of a step ---------------------------------------------------------------------------------------------


class Steps(Counting):
    """Notes what it logs in a step, and what the Trainer shows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(float(self.trainer.callback_metrics["loss_step"]))


def steps(rank: int, world: int) -> tuple[list[float], list[float], float]:
    module = Steps()
    trainer = rank_trainer(rank, world, stale(policy=Bsp()), max_epochs=1)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH))
    return module.mine, module.shown, float(trainer.callback_metrics["loss_epoch"])


@pytest.mark.stock_ddp("log_step", "stale", differs="the value is the mean over the rank's own samples")
def test_the_value_of_a_step_is_the_ranks_own() -> None:
    (mine, shown, epoch), (others, shown_there, epoch_there) = run_ranks(2, steps)
    assert shown == mine and shown_there == others and mine != others
    assert epoch == epoch_there == pytest.approx((sum(mine) + sum(others)) / (2 * len(mine)), rel=EXACT)


# ---- errors of the user's -----------------------------------------------------------------------------------------


class MineError(Exception):
    """An exception whose constructor wants something."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(what)
        self.code = code


class Raises(Callback):
    """Raises in one hook, on some ranks."""

    def __init__(self, hook: str, ranks: Sequence[int], make: Callable[[], BaseException]) -> None:
        def fail(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.global_rank in ranks:
                raise make()

        setattr(self, hook, fail)


ERRORS: dict[str, tuple[str, tuple[int, ...], Callable[[], BaseException]]] = {
    "before training": ("on_fit_start", (0, 1), lambda: MineError("too early", code=1)),
    "a batch begins": ("on_train_batch_start", (0, 1), lambda: MineError("the batch's", code=2)),
    "a batch ends": ("on_train_batch_end", (0, 1), lambda: ValueError("a value", 3)),
    "before a step": ("on_before_optimizer_step", (1,), lambda: KeyError("key")),
    "one rank": ("on_train_batch_end", (1,), lambda: MineError("of rank 1 alone", code=4)),
    "rank 0": ("on_train_epoch_end", (0,), lambda: OSError(28, "no room")),
    "validation": ("on_validation_batch_start", (0, 1), lambda: RuntimeError("not valid")),
}


class Keyword(Toy):
    """Passes an argument to the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step(scale=0.5)  # type: ignore[union-attr]


def errors(rank: int, world: int) -> dict[str, tuple[str, str]]:
    said = {}
    for name, (hook, ranks, make) in ERRORS.items():
        trainer = rank_trainer(rank, world, stale(policy=Bsp()), callbacks=[Raises(hook, ranks, make)], max_epochs=1)
        try:
            loaders = DataLoader(regression(SAMPLES), batch_size=BATCH), DataLoader(regression(8), batch_size=2)
            trainer.fit(Validated(), *loaders)
        except BaseException as error:
            said[name] = type(error).__name__, str(error)
    with pytest.raises(TypeError, match=r"step\(scale=\.\.\.\) of Adam: the parameter server steps"):
        fitting = rank_trainer(rank, world, stale(policy=Bsp()), max_epochs=1)
        fitting.fit(Keyword(), DataLoader(regression(SAMPLES), batch_size=BATCH))
    return said


@pytest.mark.stock_ddp("exceptions", "stale")
def test_an_error_of_the_users_reaches_every_rank_as_it_is() -> None:
    for said in run_ranks(2, errors):
        assert said == {name: (type(make()).__name__, str(make())) for name, (_, _, make) in ERRORS.items()}
