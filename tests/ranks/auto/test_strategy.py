"""`AutoStrategy`: what stands in the Trainer, what a warm-up leaves behind, and what a user has of it."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import AutoStrategy, HeteroPipelineStrategy, LoadBalancedStrategy, Scenario, ThrottleCallback
from lightning_hetero.auto import strategy as auto_strategy
from lightning_hetero.auto import warm_up
from lightning_hetero.auto.loop import loop_s
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.pipeline.fit import planning
from lightning_hetero.pipeline.runtime.measure import around_backbone
from lightning_hetero.plan.setup import Setup, whole_step
from lightning_hetero.types import AffineCost, Link
from tests.ranks.exact_models import Manual
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES, Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH, EXACT = 128, 16, 1e-12


def loader(world: int) -> DataLoader:
    return DataLoader(regression(SAMPLES), batch_size=BATCH // world, shuffle=True)


def auto(**kwargs: Any) -> AutoStrategy:
    return AutoStrategy(**{"monitor": False, "process_group_backend": "gloo", **kwargs})


class Drawing(Toy):
    """Draws random numbers, counts, and has statistics: all that a warm-up could leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False).double()
        self.drawn: list[float] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.drawn.append(float(torch.rand(())))
        self.norm(x)
        return super().training_step((x, y), batch_idx)


class Seen(Callback):
    """Which strategy callbacks meet, and with which numbers."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def note(self, trainer: Trainer) -> None:
        self.kinds.append(type(trainer.strategy).__name__)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.note(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.note(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.note(trainer)


def chosen_job(rank: int, world: int) -> tuple[Weights, list[str], int, list[float], str, bool]:
    module, seen, strategy = Drawing(), Seen(), auto(engines=("balanced", "stale"))
    # Emulated, so that what is taken does not depend on what else this machine does.
    callbacks = [seen, ThrottleCallback(Scenario(sample_s=1e-4))]
    trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=2)
    trainer.fit(module, loader(world))
    assert strategy.choice is not None and isinstance(trainer.strategy, LoadBalancedStrategy)
    same = trainer.strategy is strategy.chosen and repr(strategy) == repr(trainer.strategy)
    trainer.fit(module, loader(world))  # a second fit goes on with the engine: it has reached its last epoch
    return weights(module), seen.kinds, module.steps, module.drawn, strategy.choice.line, same


def ddp_job(rank: int, world: int) -> tuple[int, list[float]]:
    module = Drawing()
    trainer = rank_trainer(rank, world, balanced(policy=None, rebalance=False), max_epochs=2)
    trainer.fit(module, loader(world))
    return module.steps, module.drawn


def test_a_warm_up_leaves_nothing_behind_and_the_engine_is_in_its_place() -> None:
    expected = Drawing()
    single(expected, regression(SAMPLES), BATCH, max_epochs=2)
    outcomes = run_ranks(2, chosen_job)
    stock = run_ranks(2, ddp_job)
    lines = set()
    for (trained, kinds, steps, drawn, line, same), (stock_steps, stock_drawn) in zip(outcomes, stock, strict=True):
        net = {k: v for k, v in trained.items() if k.startswith("net")}
        assert Weights(net).distance({k: v for k, v in weights(expected).items() if k.startswith("net")}) <= EXACT
        assert kinds[:3] == ["AutoStrategy", "LoadBalancedStrategy", "LoadBalancedStrategy"] and same
        assert steps == stock_steps and drawn == stock_drawn
        lines.add(line)
    assert len(lines) == 1 and "hetero_auto takes" in lines.pop()


def scenario_job(rank: int, world: int, scenario: Scenario, engines: Any) -> tuple[str, bool, Weights]:
    module, strategy = Toy(), auto(engines=engines)
    throttle = ThrottleCallback(scenario)
    trainer = rank_trainer(rank, world, strategy, callbacks=[throttle], max_epochs=1)
    with no_loop():
        trainer.fit(module, loader(world))
    return type(trainer.strategy).__name__, throttle._taken_over, weights(module)


def no_loop() -> Any:
    """Inside, Lightning's loop takes no time, whatever else this machine does."""
    return mock.patch.object(warm_up, "loop_s", lambda: 0.0)


SPELLS = {"factor": 20.0, "steps": 1, "probability": 0.2}


@pytest.mark.parametrize(
    ("scenario", "engines", "expected"),
    [
        (Scenario(speeds=[1.0, 0.5], sample_s=2e-4), ("balanced", "stale"), "LoadBalancedStrategy"),
        (Scenario(sample_s=2e-3, step_s=4e-3, spells=SPELLS), ("balanced", "stale"), "BoundedStalenessStrategy"),
        (Scenario(sample_s=2e-4), ("pipeline",), "HeteroPipelineStrategy"),
    ],
    ids=["unequal", "spells", "pipeline alone"],
)
def test_an_emulated_cluster_is_what_decides(scenario: Scenario, engines: Any, expected: str) -> None:
    kinds = run_ranks(2, scenario_job, scenario, engines)
    for kind, taken_over, _ in kinds:
        assert kind == expected
        assert taken_over == (kind == "HeteroPipelineStrategy")  # whoever trains is asked who sleeps


def measured_job(rank: int, world: int) -> tuple[Weights, tuple[str, int]]:
    module, strategy = Toy(), auto(engines=("balanced", "pipeline"))
    trainer = rank_trainer(rank, world, strategy, max_epochs=2)
    trainer.fit(module, loader(world))
    assert strategy.choice is not None and strategy.choice.plan is not None
    return weights(module), (strategy.choice.engine, strategy.choice.plan.setup.series)


def test_what_is_measured_decides_and_both_exact_engines_are_exact() -> None:
    """Which of them it is depends on how long this machine takes for a sum of gradients."""
    expected = Toy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=2)
    outcomes = run_ranks(2, measured_job)
    assert len({agreed for _, agreed in outcomes}) == 1
    assert all(series >= 8 and trained.distance(weights(expected)) <= EXACT for trained, (_, series) in outcomes)


CALLED: list[str] = []  # nothing that a trial puts back
FOUND: list[Setup] = []


class Counting(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CALLED.append("step")
        return super().training_step(batch, batch_idx)


def tried_out(self: warm_up.WarmUp) -> Setup:
    """A trial that tells how many steps it takes."""
    found = measure(self)
    CALLED.append("tried")
    FOUND[:] = [found]
    return found


measure = warm_up.WarmUp.measure


def planned_job(rank: int, world: int, enough_s: float) -> tuple[Weights, int, str, bool, AffineCost]:
    """Gradients take long, and links are slow: the pipeline's layers are measured and planned for, once."""
    CALLED.clear()
    slow = Link(bandwidth_bytes_per_s=1e5)
    links = replace(equal_cluster(world), links=((slow,) * world,) * world)
    module, still = Counting(), {"hetero_pipeline": {"controller": None}}  # the plan stays what it was at first
    strategy = auto(engines=("balanced", "pipeline"), options=still)
    callbacks = [ThrottleCallback(Scenario(sample_s=2e-4))]
    trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=2)
    exchange = mock.patch.object(warm_up.WarmUp, "_exchange", lambda *_: 1.0)
    again = mock.patch.object(planning, "measure_model", side_effect=AssertionError("measured again"))
    trial = mock.patch.object(warm_up.WarmUp, "measure", tried_out)
    long = mock.patch.object(around_backbone, "_ENOUGH_S", enough_s)
    with exchange, again, trial, long, mock.patch.object(warm_up, "probed", lambda *_, **__: links):
        trainer.fit(module, loader(world))
    engine, choice = trainer.strategy, strategy.choice
    assert isinstance(engine, HeteroPipelineStrategy) and choice is not None and choice.plan is not None
    assert choice.plan.chosen is not None and choice.plan.chosen.plan is not None and engine.planned is not None
    same = engine.planned.plan.groups == choice.plan.chosen.plan.groups
    profile = type(engine.plan_settings.profile).__name__
    return weights(module), CALLED.index("tried"), profile, same, whole_step(FOUND[0].model)


@pytest.mark.parametrize(("enough_s", "whole"), [(math.inf, 12), (0.0, 4)], ids=["short steps", "long steps"])
def test_a_trial_is_at_most_twenty_steps_and_a_pipelines_plan_is_made_once(enough_s: float, whole: int) -> None:
    expected = Toy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=2)
    for rank, (trained, tried, profile, same, step) in enumerate(run_ranks(2, planned_job, enough_s)):
        assert trained.distance(weights(expected)) <= EXACT
        assert warm_up.STEPS == 20 and tried == 4 + whole + (4 if rank == 0 else 0)
        assert profile == "ModelCost" and same
        assert (step.fixed_s, step.per_sample_s) == pytest.approx((0.0, 2e-4), abs=1e-9)  # emulated, for every size


def looked_again_job(rank: int, world: int) -> tuple[list[str], str]:
    """The trial meets no slow spell, the training many."""
    data = DataLoader(regression(60 * BATCH), batch_size=BATCH // world)
    told = {"hetero_balanced": {"exchange_every": 1}}  # of each step, else of as many as are worth a message
    strategy, kinds = auto(engines=("balanced", "stale"), options=told), []
    scenario = Scenario(sample_s=5e-4, step_s=1e-3, spells={"factor": 20.0, "steps": 1, "probability": 0.2})
    trainer = rank_trainer(rank, world, strategy, callbacks=[ThrottleCallback(scenario)], max_epochs=1)
    calm = mock.patch.object(
        warm_up, "_emulated", lambda *_: (AffineCost(fixed_s=1e-3, per_sample_s=5e-4), (1.0,) * 12)
    )
    module = Toy()
    counted = mock.patch.object(auto_strategy, "gloo_group", wraps=auto_strategy.gloo_group)
    with calm, no_loop(), counted as groups:
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            if epochs == 2:  # which engine it is
                trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 2
            trainer.fit(module, data)
            kinds.append(type(trainer.strategy).__name__)
    assert groups.call_count == 1  # a rank that closes a second one at once ends a rank that still connects
    assert strategy.choice is not None
    return kinds, strategy.choice.line


def test_records_that_contradict_the_trial_choose_the_next_fits_engine() -> None:
    for kinds, line in run_ranks(2, looked_again_job):
        assert kinds == ["LoadBalancedStrategy", "BoundedStalenessStrategy"]
        assert line.startswith("hetero_auto: by the steps so far hetero_stale would take")


class Unready(Toy):
    """Cannot be tried before training has begun."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.train_dataloader is None:
            raise RuntimeError("no loader yet")
        return super().training_step(batch, batch_idx)


def unready_job(rank: int, world: int, make: Any) -> tuple[str, str, Weights, list[str]]:
    module, strategy = make(), auto()
    trainer = rank_trainer(rank, world, strategy, max_epochs=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, loader(world))
    assert strategy.choice is not None
    said = [str(one.message) for one in warned if "hetero_auto" in str(one.message)]
    return type(trainer.strategy).__name__, strategy.choice.line, weights(module), said


@pytest.mark.parametrize(
    ("make", "why"), [(Unready, "no loader yet"), (Manual, "manual optimization")], ids=["unready", "manual"]
)
def test_what_cannot_be_tried_trains_all_the_same_and_says_why(make: Any, why: str) -> None:
    expected = make()
    single(expected, regression(SAMPLES), BATCH, max_epochs=1)
    for rank, (kind, line, trained, warned) in enumerate(run_ranks(2, unready_job, make)):
        assert kind == "LoadBalancedStrategy" and why in line
        assert trained.distance(weights(expected)) <= EXACT
        # A trial that failed is worth a warning, which says where and why; one that was not made is not.
        assert warned == ([line] if make is Unready and rank == 0 else [])
    if make is Unready:
        assert "hetero_balanced without a warm-up: rank 0 could not try the training step: RuntimeError: no" in line


def resumed_job(rank: int, world: int, folder: str) -> tuple[Weights, tuple[int, ...], tuple[int, ...]]:
    path = str(Path(folder) / "first.ckpt")
    first, strategy = Toy(), balanced()
    trainer = rank_trainer(rank, world, strategy, max_epochs=1)
    trainer.fit(first, loader(world))
    trainer.save_checkpoint(path, weights_only=False)
    kept = strategy.shares
    module, strategy = Toy(), auto(engines=("balanced", "stale"))
    unequal = ThrottleCallback(Scenario(speeds=[1.0, 0.5], sample_s=2e-4))
    trainer = rank_trainer(rank, world, strategy, max_epochs=2, callbacks=[unequal])
    noted: list[tuple[int, ...]] = []

    class Start(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            noted.append(trainer.strategy._run.policy.state_dict()["seen"])  # type: ignore[attr-defined]

    trainer.callbacks.append(Start())  # type: ignore[attr-defined]
    trainer.fit(module, loader(world), ckpt_path=path, weights_only=False)
    return weights(module), kept, tuple(noted)  # type: ignore[return-value]


def test_a_checkpoint_goes_to_the_engine(tmp_path: Path) -> None:
    expected = Toy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=2)
    for trained, _, seen in run_ranks(2, resumed_job, str(tmp_path)):
        assert trained.distance(weights(expected)) <= EXACT
        assert seen[0] > 0  # what the first run has learned of the devices


def evaluated_job(rank: int, world: int) -> tuple[str, bool]:
    strategy = auto()

    class Val(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    trainer = rank_trainer(rank, world, strategy)
    trainer.validate(Val(), DataLoader(regression(32), batch_size=8), verbose=False)
    return type(trainer.strategy).__name__, strategy.chosen is None


def test_an_evaluation_alone_chooses_nothing() -> None:
    assert run_ranks(2, evaluated_job) == [("AutoStrategy", True)] * 2


def one_device_job(rank: int, world: int) -> tuple[Weights, Weights]:
    trained: list[Weights] = []
    for strategy in (auto(), "ddp"):
        module = Toy()
        trainer = rank_trainer(rank, world, strategy, max_epochs=1)
        trainer.fit(module, loader(world))
        trained.append(weights(module))
        if isinstance(strategy, AutoStrategy):
            assert strategy.chosen is None and trainer.strategy is strategy
    return trained[0], trained[1]


def test_lightnings_loop_is_timed_in_silence_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert 0.0 < loop_s() < 1.0
    assert rank_zero_only.rank == 0 and capfd.readouterr() == ("", "") and not caplog.records


def test_on_one_device_it_is_ddp() -> None:
    [(ours, stock)] = run_ranks(1, one_device_job)
    assert ours.distance(stock) == 0.0


def test_arguments_are_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"engines=\('fast',\) must be one or more of hetero_balanced, hetero_pipe"):
        AutoStrategy(engines=("fast",))
    with pytest.raises(ValueError, match="options="):
        AutoStrategy(engines=("balanced",), options={"stale": {"bound": 1}})
    with pytest.raises(TypeError, match="bnd"):
        AutoStrategy(options={"stale": {"bnd": 1}})
    made = AutoStrategy(options={"hetero_stale": {"bound": 1}, "balanced": {"dead_band": 0.1}})
    assert "hetero_auto" in repr(made) and made.chosen is None
