"""Plans that change while a run trains: the weights are those of a run that keeps its plan."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import lightning_compat as compat
from lightning_hetero.emulate import links as emulated_links
from lightning_hetero.pipeline.runtime.ownership import migration as migrating
from lightning_hetero.solvers.plans import plan_from_plain, plan_to_plain
from lightning_hetero.types import Event
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, quiet_trainer, rank_trainer, regression, single, weights
from tests.ranks.pipeline import variants
from tests.ranks.pipeline.kit import Deep, fit, loaders, pipeline
from tests.ranks.pipeline.replan_kit import Scripted, group, heard, plan
from tests.ranks.pipeline.resume_kit import BATCH, EPOCHS, PER_EPOCH, Saved, alone, train
from tests.ranks.resume_kit import Saver

EXACT = 1e-12
BATCHES = 22  # of 16
DATA = regression(16 * BATCHES)


class FrozenHooked(variants.Frozen):
    """The user's hooks on parameters, wherever these are; some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: 0.5 * gradient)


class TiedKeeping(Deep):
    """Two layers share a weight; every second batch adds to the gradients of the one before."""

    def backbone(self) -> nn.Module:
        layers: Any = super().backbone()
        layers[2].linear.weight = layers[1].linear.weight
        return layers

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Buffered(variants.Momentum, variants.Dropping):
    """Dropout, and buffers that a layer updates, saved and not; one that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.full((1,), 0.8, dtype=torch.float64)
        for layer in self.model:  # type: ignore[union-attr]
            layer.register_buffer("scale", scale)
            layer.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
            layer.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)
            layer.register_forward_hook(self.update)

    @staticmethod
    def update(layer: Any, _: Any, y: Any) -> Any:
        if y.requires_grad:
            layer.count += 1
            layer.mean += 0.25 * len(y) / 16
        return y * (layer.scale + layer.mean / (1000 + layer.count))


CASES: dict[str, tuple[Callable[[], Deep], dict[str, Any]]] = {
    "Adam": (Deep, {}),
    "momentum, groups, schedule": (variants.Momentum, {}),
    "frozen, clipped, hooks": (FrozenHooked, {"gradient_clip_val": 0.05}),
    "tied, kept gradients": (TiedKeeping, {}),
    "accumulated": (Deep, {"accumulate_grad_batches": 3}),
}
CHAIN = plan(group([0, 1], [0, 1, 6], 16))
LONGER = plan(group([0, 1], [0, 5, 6], 16))
TURNED = plan(group([1, 0], [0, 3, 6], 16))
APART = plan(group([0], [0, 6], 12), group([1], [0, 6], 4))
UNEVEN = plan(group([0], [0, 6], 4), group([1], [0, 6], 12))
ALONE = plan(group([1], [0, 6], 16))
TWO_RANKS = {1: LONGER, 4: TURNED, 6: APART, 9: UNEVEN, 12: ALONE, 15: CHAIN}
BEGINS = [2, 6, 7, 10, 14, 17]  # batches after which they hold: one later where samples were read for another rank

SQUARE = plan(group([2, 0], [0, 3, 6], 12), group([1, 3], [0, 4, 6], 4))
FOUR_RANKS = {
    1: plan(group([2, 1, 0, 3], [0, 1, 3, 5, 6], 16)),  # merged
    4: plan(group([2, 1], [0, 3, 6], 8), group([0, 3], [0, 5, 6], 8)),  # split
    8: plan(*(group([r], [0, 6], 4) for r in range(4))),
    11: plan(group([3], [0, 6], 16)),  # the others rest
    14: SQUARE,
    18: plan(group([0, 2], [0, 3, 6], 4), group([1, 3], [0, 5, 6], 12)),
}


def job(
    rank: int, world: int, names: list[str], first: Any, script: dict[int, Any], at_once: bool = True
) -> dict[str, Any]:
    with heard(at_once=at_once):
        return _job(rank, world, names, first, script)


def _job(rank: int, world: int, names: list[str], first: Any, script: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for name in names:
        make, options = CASES[name]
        strategy = pipeline(first, controller=Scripted(script), global_batch_size=16)
        trained, _ = fit(rank, world, make(), strategy, data=DATA, max_epochs=1, **options)
        found[name] = trained, strategy.replans, strategy.plan
    return found


@cache
def expected(name: str) -> Weights:
    make, options = CASES[name]
    module = make()
    single(module, DATA, 16, max_epochs=1, **options)
    return weights(module)


def test_two_ranks_end_on_the_weights_of_one_process() -> None:
    names = [name for name in CASES if name != "Adam"]  # which others of these are trained with, too
    ranks = run_ranks(2, job, names, CHAIN, TWO_RANKS, timeout_s=100.0)
    for name in names:
        whole = expected(name)
        for found in ranks:
            trained, replans, last = found[name]
            assert trained.distance(whole) <= EXACT, name
            assert [g.cuts for g in last.groups] == [(0, 1, 6)]
            if name == "accumulated":  # layers move where a window begins; shares are free
                assert [r.step for r in replans] == [3, 6, 9, 10, 15, 18]
            else:
                assert [r.step for r in replans] == BEGINS, name
            assert [r.kind for r in replans] == ["plan", "plan", "plan", "shares", "plan", "plan"]
            assert [r.generation for r in replans] == [1, 2, 3, 4, 5, 6]
            assert all(r.pause_s > 0 and r.reason.startswith("scripted") for r in replans)
            assert all(r.predicted_gain == pytest.approx(0.1) and r.realised_gain is not None for r in replans)
            assert [r.bytes > 0 for r in replans] == [True, True, True, False, False, True]


def test_what_is_decided_while_nothing_jumps_holds_two_batches_later() -> None:
    for found in run_ranks(2, job, ["Adam"], CHAIN, TWO_RANKS, False, timeout_s=100.0):
        trained, replans, _ = found["Adam"]
        assert trained.distance(expected("Adam")) <= EXACT
        assert [r.step for r in replans] == [4, 8, 8, 12, 16, 19], "the third was told along with the second"
        assert [r.generation for r in replans] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["momentum, groups, schedule", pytest.param("Adam", marks=pytest.mark.long)])
def test_groups_merge_and_split_on_four_ranks(name: str) -> None:
    for found in run_ranks(4, job, [name], SQUARE, FOUR_RANKS, timeout_s=100.0):
        trained, replans, last = found[name]
        assert trained.distance(expected(name)) <= EXACT
        assert len(replans) == len(FOUR_RANKS) and [g.ranks for g in last.groups] == [(0, 2), (1, 3)]


@heard(at_once=True)
def validated(rank: int, world: int, first: Any, script: dict[int, Any]) -> list[Any]:
    """Validates in between; and a second fit of the same module goes on with the plan that the first one ended with."""
    module, strategy = Deep(), pipeline(first, controller=Scripted(script), global_batch_size=16)
    options: dict[str, Any] = {"data": DATA, "max_epochs": 1, "val_check_interval": 5, "validate": True}
    trained, trainer = fit(rank, world, module, strategy, **options)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    last = strategy.plan
    strategy.controller = Scripted({})
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders(regression(80), 16 // world, validate=True))  # validated once
    assert trainer.current_epoch == 2
    assert strategy.plan is last and strategy.replans == []
    return [trained, metrics]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_evaluations_follow_the_plan_in_force(world: int) -> None:
    module = Deep()
    trainer = quiet_trainer(devices=1, max_epochs=1, val_check_interval=5)
    sampler: Any = DistributedSampler(DATA, num_replicas=1, rank=0, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(DATA, batch_size=16, sampler=sampler), DataLoader(regression(40, seed=9), 5))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    first, script = (CHAIN, TWO_RANKS) if world == 2 else (SQUARE, FOUR_RANKS)
    for trained, metrics in run_ranks(world, validated, first, script):
        assert trained.distance(weights(module)) <= EXACT
        assert metrics == pytest.approx(logged, rel=1e-9)


# ---- against a run that keeps its plan: what is drawn, and what layers count -----------------------------------------


@heard(at_once=True)
def kept_or_not(rank: int, world: int, first: Any, script: dict[int, Any]) -> list[tuple[Weights, list[float]]]:
    found = []
    for changes in ({}, script):
        module, strategy = Buffered(), pipeline(first, controller=Scripted(changes), global_batch_size=16)
        trained, _ = fit(rank, world, module, strategy, data=DATA, max_epochs=1)
        found.append((trained, [float(t) for n, t in module.named_buffers() if n.endswith("count")]))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_dropout_and_buffers_are_those_of_a_run_that_keeps_its_plan(world: int) -> None:
    one_group = {1: LONGER, 4: TURNED, 12: ALONE, 15: CHAIN}  # statistics of a group are its own
    four = {1: plan(group([2, 1, 0, 3], [0, 1, 3, 5, 6], 16)), 9: plan(group([3], [0, 6], 16)), 12: CHAIN}
    ranks = run_ranks(world, kept_or_not, CHAIN, one_group if world == 2 else four, timeout_s=100.0)
    for (kept, counts), (moved, moved_counts) in ranks:
        assert moved.distance(kept) <= EXACT
        assert moved["model.3.mean"].max() > 1
        assert counts == moved_counts == [4.0 * BATCHES] * 6  # not saved: of 4 micro-batches each


# ---- checkpoints, averages, loaders that read ahead ------------------------------------------------------------------


class Decisions(Callback):
    """Collects what a trace would have."""

    def __init__(self) -> None:
        self.found: list[Event] = []
        self.queues: list[float] = []
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        events = trainer.strategy.step_events()
        self.found += [event for event in events if event.kind in ("decision", "outcome")]
        self.queues += [event.data["queues"]["money"] for event in events if event.kind == "queue"]
        self.metrics = trainer.strategy.engine_metrics()


@heard(at_once=True)
def saving(rank: int, world: int, folder: str) -> tuple[Weights, list[Event], dict[str, float]]:
    """The plan changes after batches 4 and 8; epochs have six."""
    strategy = pipeline(CHAIN, controller=Scripted({3: TURNED, 7: APART}))
    saver, decisions = Saver(folder, [(0, 5), (1, 2)]), Decisions()
    callbacks = [saver, decisions]
    trainer = rank_trainer(rank, world, strategy, max_epochs=EPOCHS, callbacks=callbacks, enable_checkpointing=True)
    module = Saved()
    trainer.fit(module, train(BATCH // world))
    assert decisions.queues == ([float(batch) for batch in range(EPOCHS * PER_EPOCH)] if rank == 0 else [])
    return weights(module), decisions.found, decisions.metrics


@heard(at_once=True)
def resuming(rank: int, world: int, folder: str) -> list[Weights]:
    found = []
    for name, first in (("batch-0-5", CHAIN), ("batch-1-2", TURNED), ("epoch-1", CHAIN)):
        strategy = pipeline(first, controller=Scripted({10: LONGER, 14: UNEVEN}))
        module = Saved()
        trainer = rank_trainer(rank, world, strategy, max_epochs=EPOCHS)
        trainer.fit(module, train(BATCH // world), ckpt_path=f"{folder}/{name}.ckpt")
        found.append(weights(module))
        if rank == 0 and name != "epoch-1":  # which was saved at the end of the run's second epoch, after 12 batches
            assert strategy.controller.resumed == {  # type: ignore[union-attr]
                "observed": {"batch-0-5": 6, "batch-1-2": 9}[name],
                "plan": plan_to_plain(plan_from_plain(first)),
            }
    return found


def test_a_checkpoint_written_after_a_change_is_resumed(tmp_path: Any) -> None:
    whole = alone()[0]
    ranks = run_ranks(2, saving, str(tmp_path))
    assert all(found.distance(whole) <= EXACT for found, *_ in ranks)
    assert ranks[1][1] == []
    (_, events, metrics), others = ranks[0], ranks[1][2]
    assert [(event.kind, event.epoch, event.step) for event in events] == [
        ("decision", 0, 5), ("outcome", 1, 1), ("decision", 1, 2), ("outcome", 1, 4),
    ]  # fmt: skip
    decided, outcomes = [e.data for e in events[::2]], [e.data for e in events[1::2]]
    assert all(data["kind"] == "plan" and data["bytes"] > 0 and data["pause_s"] > 0 for data in decided)
    assert decided[1]["plan"]["groups"][1]["ranks"] == [1] and decided[1]["predicted_s"] == 0.9
    assert [data["generation"] for data in outcomes] == [1, 2]
    assert all(data["predicted_gain"] == pytest.approx(0.1) and data["measured_s"] > 0.0 for data in outcomes)
    table = (Path(__file__).parents[3] / "docs/reference/controller.md").read_text()
    for event in events:
        row = next(line for line in table.splitlines() if line.startswith(f"| `{event.kind}` |"))
        assert {f"`{name}`" for name in event.data} <= set(re.findall(r"`\w+`", row)), "documented"
    assert metrics == others and metrics["replans"] == 2.0
    assert metrics["moved_bytes"] == sum(data["bytes"] for data in decided)
    assert metrics["realised_gain"] == outcomes[1]["realised_gain"] and metrics["predicted_gain"] == pytest.approx(0.1)
    state = torch.load(tmp_path / "batch-1-2.ckpt", weights_only=True)["lightning_hetero"]
    assert [g["ranks"] for g in state["plan"]["groups"]] == [[0], [1]]
    assert state["controller"] == {"observed": 9}, "what has been learned is kept"
    for found in run_ranks(2, resuming, str(tmp_path)):
        assert all(each.distance(whole) <= EXACT for each in found)
    assert alone(ckpt=str(tmp_path / "epoch-1.ckpt"))[0].distance(whole) <= EXACT
    assert EPOCHS * PER_EPOCH == 18  # every script above is reached


def average() -> WeightAveraging:
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.8))


@heard(at_once=True)
def averaging(rank: int, world: int) -> tuple[Weights, Weights]:
    module, strategy = Deep(), pipeline(CHAIN, controller=Scripted(TWO_RANKS))
    workers: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 2, "multiprocessing_context": "fork"}
    trainer = rank_trainer(rank, world, strategy, max_epochs=1, callbacks=[average()])
    trainer.fit(module, DataLoader(DATA, batch_size=16 // world, shuffle=True, **workers))
    ((_, copy),) = compat.averaging_callbacks(trainer)
    begins = [r.step for r in strategy.replans]
    assert begins == [2, 8, 8, 10, 16, 19]  # two are read ahead, for a leader that may be another
    return weights(module), weights(copy)


def test_averaged_weights_move_along_and_loaders_may_read_ahead() -> None:
    module = Deep()
    trainer = single(module, DATA, 16, max_epochs=1, callbacks=[average()])
    ((_, copy),) = compat.averaging_callbacks(trainer)
    for trained, averaged in run_ranks(2, averaging):
        assert trained.distance(weights(module)) <= EXACT and averaged.distance(weights(copy)) <= EXACT


# ---- what is measured ------------------------------------------------------------------------------------------------


@heard(at_once=True)
def measured(rank: int, world: int, first: Any, script: dict[int, Any]) -> list[Any]:
    scripted = Scripted(script)
    fit(rank, world, Deep(), pipeline(first, controller=scripted), data=DATA, max_steps=16)
    return scripted.observed


def test_the_controller_is_told_of_links_and_layers() -> None:
    seen, nothing = run_ranks(2, measured, CHAIN, {10: APART})
    assert nothing == [], "rank 0 decides"
    assert len(seen) == 16
    # What has come before it was needed is not timed, and of the first batch nobody knows what the clocks are.
    assert {(link.source, link.target) for one in seen[1:11] for link in one.links} == {(0, 1), (1, 0)}
    for one in seen[1:11]:
        for link in one.links:  # of 4 micro-batches, there and on to the head; of each the faster half is taken
            assert 1 <= link.messages <= 4 and link.size_bytes == 256 * link.messages and link.seconds > 0.0
        assert {rank: len(layers) for rank, layers in one.layer_s.items()} == {0: 1, 1: 5}
        assert all(sum(layers) > 0.0 for layers in one.layer_s.values())
    for one in seen[12:]:  # two groups take turns
        assert one.links == [] and {rank: len(layers) for rank, layers in one.layer_s.items()} == {one.batch % 2: 6}
    seen, *_ = run_ranks(4, measured, FOUR_RANKS[1], {})
    ways = {(2, 1), (1, 2), (1, 0), (0, 1), (0, 3), (3, 0), (3, 2), (2, 3)}
    assert {(link.source, link.target) for one in seen[1:] for link in one.links} == ways
    assert all({rank: len(found) for rank, found in one.layer_s.items()} == {2: 1, 1: 2, 0: 2, 3: 1} for one in seen)


# ---- emulated links and devices --------------------------------------------------------------------------------------

SLOW_LINKS = {"devices": [{"count": 2}], "link": {"bandwidth": "1 kB/s", "latency": "250 ms"}}


@heard(at_once=True)
def emulating(rank: int, world: int) -> dict[str, Any]:
    """One stage each, so that no activation is waited for; rank 0 gets everything, and then gradients are summed."""
    slept: list[float] = []
    strategy = pipeline(ALONE, controller=Scripted({1: APART}), cluster=SLOW_LINKS, emulate_links=True)
    module, at_once = Deep(), SimpleNamespace(sleep=slept.append, monotonic=lambda: 0.0)
    with patch.object(emulated_links, "time", at_once):
        trained, _ = fit(rank, world, module, strategy, data=DATA, max_steps=6)
    (replan,) = strategy.replans
    gradients = sum(p.nbytes for p in module.parameters())
    return {"weights": trained, "slept": slept, "sent": replan.bytes, "gradients": gradients, "from": replan.step}


def test_emulated_links_carry_sums_and_layers_that_move() -> None:
    module = Deep()
    single(module, DATA, 16, max_steps=6)
    for rank, found in enumerate(run_ranks(2, emulating)):
        assert found["weights"].distance(weights(module)) <= EXACT
        sums_s = 2 * (found["gradients"] / 2 / 1e3 + 0.25)
        alone = found["from"]
        assert alone in (2, 3) and found["sent"] > 2 * found["gradients"]  # with Adam's state
        move_s = 0.25 + found["sent"] / 1e3
        assert found["slept"] == pytest.approx([0.0] * alone + [move_s] + [sums_s] * (6 - alone)), rank


# ---- a change that cannot be carried out -----------------------------------------------------------------------------


@heard(at_once=True)
def short_of_memory(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    rooms, calls = migrating._rooms, []

    def none(described: Any, device: Any) -> Any:
        calls.append(rank)
        if rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("no room for this layer")
        return rooms(described, device)

    migrating._rooms = none
    try:
        scripted = Scripted({1: APART, 4: LONGER, 8: CHAIN})  # rank 1 gets something by the first and the third
        strategy = pipeline(CHAIN, controller=scripted)
        found.append(fit(rank, world, Deep(), strategy, data=DATA, max_epochs=1)[0])
        found += [[(r.step, r.kind, r.cancelled) for r in strategy.replans], scripted.withdrawn]
        calls.append(rank)
        strategy = pipeline(CHAIN, controller=Scripted({3: TURNED}))
        calls[:] = calls[:1] if rank == 1 else []
        with pytest.raises(RuntimeError) as error:
            fit(rank, world, Deep(), strategy, data=DATA, max_epochs=1)
        found.append(str(error.value))
    finally:
        migrating._rooms = rooms
    return found


def test_a_change_that_a_rank_has_no_room_for_is_given_up_by_all() -> None:
    whole = expected("Adam")
    for rank, (trained, records, withdrawn, said) in enumerate(run_ranks(2, short_of_memory)):
        assert trained.distance(whole) <= EXACT
        assert [(step, kind) for step, kind, _ in records] == [(2, "plan"), (6, "plan"), (9, "plan")]
        assert [bool(why) for _, _, why in records] == [False, False, True]
        assert "rank 1: OutOfMemoryError: no room for this layer" in records[2][2]
        assert withdrawn == ([3] if rank == 0 else [])
        assert "have read samples to lead a group, but the change of plan had to be given up" in said


class Keeper(Callback):
    """Keeps a copy of the backbone from one batch to another."""

    def __init__(self) -> None:
        self.copy: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.copy = copy.deepcopy(module.model) if batch_idx in range(1, 6) else None


@heard(at_once=True)
def with_a_copy(rank: int, world: int) -> tuple[Weights, list[Any], list[int]]:
    scripted = Scripted({3: TURNED, 7: ALONE})  # samples are read for rank 1, which leads no group, until then
    strategy = pipeline(CHAIN, controller=scripted, global_batch_size=16)
    trained, _ = fit(rank, world, Deep(), strategy, data=DATA, max_epochs=1, callbacks=[Keeper()])
    return trained, [(r.step, r.kind, r.cancelled) for r in strategy.replans], scripted.withdrawn


def test_a_change_for_which_somebody_keeps_copies_is_given_up_before_samples_are_read_for_it() -> None:
    whole = expected("Adam")
    for rank, (trained, records, withdrawn) in enumerate(run_ranks(2, with_a_copy)):
        assert trained.distance(whole) <= EXACT, "each sample once"
        assert [(step, kind) for step, kind, _ in records] == [(4, "plan"), (9, "plan")]
        assert "somebody keeps copies of model.0" in records[0][2] and not records[1][2]
        assert withdrawn == ([1] if rank == 0 else [])
