"""`controller=`: ranks rest and wake, and what is trained stays what one process trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hetero import BalancePolicy, BatchRebalancer, LoadBalancedStrategy, LyapunovController
from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.types import Event, PipelinePlan
from tests.ranks.exact_models import PoisonedDummy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, single, weights
from tests.ranks.resume_kit import Saver

SAMPLES, BATCH, EPOCHS = 400, 16, 2  # 50 steps
EXACT = 1e-12
TURNS = ((0, 5, 6, 5), (4, 0, 0, 12), (0, 0, 16, 0), (4, 4, 4, 4), (16, 0, 0, 0), (1, 1, 13, 1))


class Turns:
    """Decides for the next of `TURNS` after every second batch."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def __repr__(self) -> str:
        return "Turns()"

    def start(self, model: Any, cluster: Any, plan: PipelinePlan, **options: Any) -> Turns:
        self.generation, self.plan, self.options = 0, plan, options
        return self

    def step(self, seen: Observation) -> Decision:
        self.seen.append(seen)
        kind: Any = "keep"
        if seen.batch % 2:
            kind, self.generation = "plan", self.generation + 1
            self.plan = replicas(1, TURNS[self.generation % len(TURNS)])
        return Decision(
            batch=seen.batch, generation=self.generation, kind=kind, plan=self.plan, reason="its turn",
            predicted_s=0.9, gain_s=0.1,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state


class Watch(Callback):
    """Notes each batch's samples, the events, and what is said in the end."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.events: list[Event] = []
        self.summary = ""
        self.metrics: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(trainer.strategy.current_samples())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.events += trainer.strategy.step_events()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.summary = trainer.strategy.summary()
        self.metrics = trainer.strategy.engine_metrics()
        assert self.metrics.get("replans", 0) == len(trainer.strategy.replans)


def fitted(rank: int, world: int, controller: Any, **options: Any) -> tuple[Any, Any, Watch]:
    module, watch = PoisonedDummy(), Watch()
    ckpt_path, more = options.pop("ckpt_path", None), options.pop("more", [])
    options = {"max_epochs": EPOCHS, "callbacks": [watch, *more], **options}
    trainer = rank_trainer(rank, world, balanced(policy=None, controller=controller), **options)
    loader = DataLoader(regression(SAMPLES), batch_size=BATCH // world, shuffle=True)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer, module, watch


# ---- mathematics ----------------------------------------------------------------------------------------------


def turning(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    controller = Turns()
    trainer, module, watch = fitted(rank, world, controller, **options)
    return {
        "weights": weights(module),
        "loss": float(trainer.callback_metrics["loss_epoch"]),
        "samples": watch.samples,
        "replans": trainer.strategy.replans,
        "shares": trainer.strategy.shares,
        "metrics": watch.metrics,
        "worked": [sorted(seen.work_s) for seen in controller.seen],
        "events": [event.data for event in watch.events if event.kind == "decision"],
        "planned": controller.options["planned_batches"],
    }


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["each", "accumulated"])
def test_weights_and_logs_are_those_of_one_process_while_ranks_rest_and_wake(options: dict[str, Any]) -> None:
    outcomes = run_ranks(4, turning, options)
    expected = PoisonedDummy()
    reference = single(expected, regression(SAMPLES), BATCH, max_epochs=EPOCHS, **options)
    for outcome in outcomes:
        assert outcome["weights"].distance(weights(expected)) <= EXACT
        assert outcome["loss"] == pytest.approx(float(reference.callback_metrics["loss_epoch"]), rel=1e-12)
        assert outcome["replans"] == outcomes[0]["replans"] and outcome["worked"] == outcomes[0]["worked"]
        assert outcome["planned"] == 50
        assert outcome["metrics"]["replans"] > 1
        assert outcome["metrics"].keys() <= {"replans", "predicted_gain", "realised_gain"}
    steps = set(zip(*(outcome["samples"] for outcome in outcomes), strict=True))
    assert steps.issuperset(TURNS[1:3] if options else TURNS) and all(sum(step) == BATCH for step in steps)
    assert [0, 3] in outcomes[0]["worked"] and [2] in outcomes[0]["worked"]
    assert outcomes[0]["shares"] in TURNS
    event = next(data for data in outcomes[0]["events"] if data.get("kind") == "plan")
    assert event["resting"] == [1, 2] and event["reason"] == "its turn"
    assert event["predicted_gain"] == pytest.approx(0.1)


# ---- decisions, checkpoints -----------------------------------------------------------------------------------


def costly(world: int) -> LyapunovController:
    """Of all ranks but the first, each second is far beyond the budget; however slow a batch, nothing is taken back."""
    prices = [1.0] + [1e6] * (world - 1)
    return LyapunovController(budget={"money_per_sample": 1e-9}, prices=prices, margin=10.0)


def saving(rank: int, world: int, path: str) -> Watch:
    trainer, _, watch = fitted(rank, world, costly(world), more=[Saver(path, [(1, 4)])])
    assert trainer.strategy.shares == (BATCH, 0)
    assert "controller LyapunovController" in repr(trainer.strategy)
    return watch


def resuming(rank: int, world: int, path: str) -> tuple[Weights, list[int]]:
    _, module, watch = fitted(rank, world, costly(world), max_steps=33, ckpt_path=path)
    return weights(module), watch.samples


def test_a_rank_beyond_the_budget_rests_and_rests_on_in_a_resumed_run(tmp_path: Path) -> None:
    first, second = run_ranks(2, saving, str(tmp_path))
    path = str(tmp_path / "batch-1-4.ckpt")
    assert second.samples[0] == BATCH // 2 and second.samples[-1] == 0
    assert "; without rank 1 a batch takes" in first.summary and "of money_per_sample less" in first.summary
    event = next(event.data for event in first.events if event.kind == "decision" and "kind" in event.data)
    assert event["resting"] == [1] and event["queues"]["money_per_sample"] > 0.0
    assert any(event.kind == "queue" and event.data["queues"]["money_per_sample"] > 0.0 for event in first.events)
    assert not any(event.kind == "queue" for event in second.events)
    assert any(event.kind == "outcome" and event.data["kept"] for event in first.events)
    state = torch.load(path, weights_only=True)["lightning_hetero"]["policy"]["controller"]
    assert state["units"] == [BATCH, 0]
    expected = PoisonedDummy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=EPOCHS, max_steps=33)
    for world in (2, 4):
        outcomes = run_ranks(world, resuming, path)
        steps = list(zip(*(taken for _, taken in outcomes), strict=True))
        assert steps == [(BATCH, 0)] * 3 if world == 2 else len(steps) == 3 and all(map(all, steps))
        assert all(trained.distance(weights(expected)) <= EXACT for trained, _ in outcomes)


# ---- what it is not combined with -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"policy": BalancePolicy()},
        {"predictor": "last"},
        {"dead_band": 0.1},
        {"cooldown": 3},
        {"min_samples": 1},
        {"rebalance": False},
    ],
    ids=lambda other: next(iter(other)),
)
def test_arguments_that_a_controller_would_ignore_are_refused(other: dict[str, Any]) -> None:
    (name,) = other
    with pytest.raises(ValueError, match=f"rules of its own, so {name} would be ignored: drop it"):
        LoadBalancedStrategy(controller="lyapunov", **other)


def test_what_is_no_controller_or_cannot_be_kept_is_refused() -> None:
    with pytest.raises(TypeError, match="controller='greedy' must be 'lyapunov', None, or a LyapunovController"):
        LoadBalancedStrategy(controller="greedy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"traffic_per_hour.* cannot be kept by LoadBalancedStrategy"):
        LoadBalancedStrategy(controller=LyapunovController(budget={"traffic_per_hour": 1e9, "money_per_hour": 1.0}))
    strategy = LoadBalancedStrategy(controller="lyapunov", max_samples=8, quantum=2)
    assert strategy.replans == [] and "controller lyapunov" in repr(strategy)
    assert "controller" not in repr(LoadBalancedStrategy())


def another_policy(rank: int, world: int) -> None:
    strategy = balanced(policy=None, controller="lyapunov")
    trainer = rank_trainer(rank, world, strategy, callbacks=[BatchRebalancer(BalancePolicy())])
    with pytest.raises(ValueError, match="would decide in the place of LoadBalancedStrategy"):
        trainer.fit(Toy(), DataLoader(regression(8), batch_size=4))
    with pytest.raises(ValueError, match=r"prices=...\) lists 3 ranks, but there are 2"):
        rank_trainer(rank, world, balanced(policy=None, controller=LyapunovController(prices=[1.0, 2.0, 3.0])))


def test_two_that_decide_and_prices_of_other_ranks_are_refused() -> None:
    run_ranks(2, another_policy)
