"""Checkpoints of pipelines: what one process writes, for every plan, every number of devices and every other engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from tests.ranks.harness import close_pools, run_ranks
from tests.ranks.kit import Weights, balanced, rank_trainer, stale, weights
from tests.ranks.pipeline.kit import PLANS, WORLD, Deep, pipeline
from tests.ranks.pipeline.resume_kit import BATCH, EPOCHS, EXACT, PER_EPOCH, Saved, alone, differences, train
from tests.ranks.resume_kit import Fault, Saver, plain_types


def fit(
    rank: int, world: int, strategy: Any, batch_size: int, module: Deep | None = None, *, ckpt: str | None = None,
    **options: Any,
) -> tuple[Weights, int, Trainer]:
    module = module or Saved()
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": EPOCHS, **options})
    trainer.fit(module, train(batch_size), ckpt_path=ckpt)
    return weights(module), getattr(module, "batches", 0), trainer


def savers(folder: str) -> list[Any]:
    steps = ModelCheckpoint(f"{folder}/steps", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    light = ModelCheckpoint(f"{folder}/light", filename="{epoch}", save_weights_only=True, save_top_k=-1)
    return [steps, light, Saver(folder, [(0, 0), (1, 2), (1, PER_EPOCH - 1)])]


def save_afterwards(trainer: Trainer, folder: str) -> None:
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """Checkpoints of one process, and how it ended."""
    folder = tmp_path_factory.mktemp("stock")
    end, _, trainer = alone(callbacks=savers(str(folder)), enable_checkpointing=True)
    save_afterwards(trainer, str(folder))
    return folder, end


@pytest.fixture(scope="module")
def expected(stock: tuple[Path, Weights]) -> dict[int, Weights]:
    return {1: stock[1], 2: alone(accumulate_grad_batches=2)[0]}


def saving_job(rank: int, world: int, plan: str, folder: str) -> Weights:
    options = {"callbacks": savers(folder), "enable_checkpointing": True}
    end, _, trainer = fit(rank, world, pipeline(plan), BATCH // world, **options)
    save_afterwards(trainer, folder)
    return end


def accumulating_job(rank: int, world: int, plan: str, folder: str) -> Weights:
    saver = Saver(f"{folder}/window", [(1, 1), (2, 3)])
    return fit(rank, world, pipeline(plan), BATCH // world, callbacks=[saver], accumulate_grad_batches=2)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: dict[int, Weights]) -> dict[str, Path]:
    """Checkpoints by plan; the runs that wrote them were right themselves."""
    folders = {}
    for plan in ("1x2", "2x2"):
        folders[plan] = tmp_path_factory.mktemp(plan)
        for end in run_ranks(WORLD[plan], saving_job, plan, str(folders[plan])):
            assert end.distance(expected[1]) <= EXACT
    for end in run_ranks(WORLD["2x2"], accumulating_job, "2x2", str(folders["2x2"])):
        assert end.distance(expected[2]) <= EXACT
    return folders


# ---- what is written -----------------------------------------------------------------------------------------------


def test_files_are_those_of_one_process_plus_one_key_of_plain_types(
    saved: dict[str, Path], stock: tuple[Path, Weights]
) -> None:
    theirs = stock[0]
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.ckpt"))
    assert {"after.ckpt", "weights.ckpt", "light/epoch=1.ckpt", "steps/step=4.ckpt", "epoch-2.ckpt"} <= set(names)
    for plan, folder in saved.items():
        assert names == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt") if p.parent.name != "window")
        for name in names:
            ours, wanted = (torch.load(where / name, weights_only=True) for where in (folder, theirs))
            state = ours.pop("lightning_hetero")
            assert plain_types(state), name
            assert (state["format"], state["engine"], state["world_size"]) == (1, "pipeline", WORLD[plan])
            assert (state["global_batch_size"], state["batch_size"]) == (BATCH, BATCH // WORLD[plan])
            assert [group["cuts"] for group in state["plan"]["groups"]] == [g["cuts"] for g in PLANS[plan]["groups"]]
            for found in (ours, wanted):  # each has its folder's name in it
                found.get("callbacks", {}).clear()
            assert differences(ours, wanted) == [], f"{plan} {name}"


def test_a_file_is_no_larger_than_its_tensors(saved: dict[str, Path]) -> None:
    """Nothing of a rank's flattened memory is written along."""
    path = saved["2x2"] / "weights.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    for tensor in state.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


# ---- from plan to plan ---------------------------------------------------------------------------------------------

Resumed = tuple[str, str, int, int]  # plan that wrote it, checkpoint, batches trained until then, accumulated batches
CASES: list[Resumed] = [
    ("1x2", "batch-0-0.ckpt", 1, 1),
    ("2x2", "batch-1-2.ckpt", 9, 1),
    ("1x2", "batch-1-5.ckpt", 12, 1),
    ("2x2", "epoch-0.ckpt", 6, 1),
    ("1x2", "steps/step=16.ckpt", 16, 1),
    ("2x2", "window/batch-1-1.ckpt", 8, 2),
    ("2x2", "window/batch-2-3.ckpt", 16, 2),
]


def resuming_job(rank: int, world: int, plan: str, cases: Sequence[Resumed], folders: dict[str, str]) -> list[Any]:
    found = []
    for before, name, _, window in cases:
        size = BATCH // WORLD[before]  # unchanged, on another number of devices
        ckpt = f"{folders[before]}/{name}"
        end, batches, trainer = fit(rank, world, pipeline(plan), size, ckpt=ckpt, accumulate_grad_batches=window)
        planned = trainer.strategy.planned  # none on one device
        found.append((end, batches, sum(group.samples for group in planned.plan.groups) if planned else BATCH))
    return found


@pytest.mark.stock_ddp("other_devices", "pipeline")
@pytest.mark.parametrize("plan", ["1x2", "2x2", "1x1"])
@pytest.mark.short("1x2", "1x1")
def test_a_run_goes_on_under_any_plan(saved: dict[str, Path], expected: dict[int, Weights], plan: str) -> None:
    folders = {name: str(path) for name, path in saved.items()}
    for found in run_ranks(WORLD[plan], resuming_job, plan, CASES, folders):
        for (before, name, done, window), (end, batches, size) in zip(CASES, found, strict=True):
            assert batches == EPOCHS * PER_EPOCH - done and size == BATCH
            assert end.distance(expected[window]) <= EXACT, f"{before} {name} -> {plan}"


# ---- from engine to engine -----------------------------------------------------------------------------------------


def engine(name: str) -> Any:
    if name == "stock":
        return DDPStrategy(process_group_backend="gloo")
    return {"balanced": balanced, "stale": lambda: stale(policy="bsp"), "pipeline": lambda: pipeline("1x2")}[name]()


def all_saving_job(rank: int, world: int, folder: str) -> None:
    for name in ("stock", "balanced", "stale"):
        saver = Saver(f"{folder}/{name}", [(1, 2)])
        fit(rank, world, engine(name), BATCH // 2, max_epochs=2, callbacks=[saver])


Crossing = tuple[str, str, str]  # who began, checkpoint, who goes on


def crossing_job(
    rank: int, world: int, crossings: list[Crossing], folders: dict[str, Path]
) -> dict[Crossing, tuple[Weights, int]]:
    return {
        (before, name, now): fit(rank, world, engine(now), BATCH // 2, ckpt=f"{folders[before]}/{name}.ckpt")[:2]
        for before, name, now in crossings
    }


CROSSINGS = [
    *((before, "batch-1-2", "pipeline") for before in ("stock", "balanced", "stale")),
    *(("pipeline", "batch-1-2", now) for now in ("balanced", "stale", "stock")),
    ("stock", "epoch-0", "pipeline"),
    ("pipeline", "epoch-0", "stock"),
]
MORE_CROSSINGS = [
    *((before, "epoch-0", "pipeline") for before in ("balanced", "stale")),
    *(("pipeline", "epoch-0", now) for now in ("balanced", "stale")),
]
DONE = {"batch-1-2": 9, "epoch-0": 6}


@pytest.fixture(scope="module")
def begun(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by the engine that wrote them."""
    folder = tmp_path_factory.mktemp("begun")
    run_ranks(2, all_saving_job, str(folder))
    return {name: folder / name for name in ("stock", "balanced", "stale")} | {"pipeline": saved["1x2"]}


@pytest.mark.stock_ddp("from_ddp", "to_ddp", "pipeline")
@pytest.mark.parametrize("crossings", [CROSSINGS, MORE_CROSSINGS], ids=["within epochs", "at their ends"])
@pytest.mark.short("within epochs")
def test_every_engine_continues_what_a_pipeline_began_and_the_other_way_round(
    crossings: list[Crossing], begun: dict[str, Path], stock: tuple[Path, Weights]
) -> None:
    expected = stock[1]
    for found in run_ranks(2, crossing_job, crossings, begun):
        for (before, name, now), (end, batches) in found.items():
            assert batches == EPOCHS * PER_EPOCH - DONE[name]
            if (name, now) != ("batch-1-2", "stock"):  # which starts the epoch's order over
                assert end.distance(expected) <= EXACT, f"{before} {name} -> {now}"


@pytest.mark.parametrize("name", DONE)
def test_one_device_continues_what_a_pipeline_began(
    name: str, saved: dict[str, Path], stock: tuple[Path, Weights]
) -> None:
    end, batches, _ = alone(ckpt=f"{saved['1x2']}/{name}.ckpt")
    assert batches == EPOCHS * PER_EPOCH - DONE[name]
    assert name == "batch-1-2" or end.distance(stock[1]) <= EXACT


@pytest.mark.parametrize("name", DONE)
@pytest.mark.short("batch-1-2")
def test_a_pipeline_continues_what_one_device_began(name: str, stock: tuple[Path, Weights]) -> None:
    folder, expected = stock
    for end, batches in run_ranks(4, from_one_job, f"{folder}/{name}.ckpt"):
        assert end.distance(expected) <= EXACT and batches == EPOCHS * PER_EPOCH - DONE[name]


def from_one_job(rank: int, world: int, path: str) -> tuple[Weights, int]:
    """A checkpoint that knows no global batch: the strategy is told."""
    return fit(rank, world, pipeline("2x2", global_batch_size=BATCH), BATCH, ckpt=path)[:2]


# ---- on an exception -----------------------------------------------------------------------------------------------

FAULTS = {"after": (1, 1, 8), "one rank": (1, 1, 7), "one rank, after": (1, 1, 8)}  # of two epochs


class OnOne(Fault):
    """The others hear of it while they wait for this rank."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1:
            super().on_train_batch_start(trainer, *args)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1:
            super().on_train_batch_end(trainer, *args)


def fault_job(rank: int, world: int, plan: str, folder: str, name: str) -> str:
    epoch, batch, _ = FAULTS[name]
    fault = (OnOne if "one" in name else Fault)(epoch, batch, after="after" in name)
    keeper = OnExceptionCheckpoint(folder, filename=name)
    with pytest.raises(RuntimeError) as error:
        fit(rank, world, pipeline(plan), BATCH // world, callbacks=[fault, keeper], enable_checkpointing=True)
    return str(error.value)


def lonely_job(rank: int, world: int, plan: str, folder: str) -> list[str]:
    """Only rank 0 would save."""
    keeper = OnExceptionCheckpoint(folder, filename="alone") if rank == 0 else Checkpoint()
    callbacks = [Fault(0, 1, after=True), keeper]
    with pytest.raises(RuntimeError, match="a fault"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        strategy = pipeline(plan, timeout=timedelta(seconds=3))
        fit(rank, world, strategy, BATCH // world, callbacks=callbacks, enable_checkpointing=True)
    return [str(w.message) for w in warned if "did not come to save" in str(w.message)]


def after_fault_job(rank: int, world: int, plan: str, folder: str) -> list[tuple[Weights, int]]:
    """On half as many devices, with the batches of before."""
    size, paths = BATCH // WORLD["2x2"], [f"{folder}/{name}.ckpt" for name in FAULTS]
    return [fit(rank, world, pipeline(plan), size, ckpt=path, max_epochs=2)[:2] for path in paths]


def test_what_an_exception_saves_is_resumed(tmp_path: Path) -> None:
    """Also if it is raised on one rank: the others come to save when they hear of it."""
    for name in FAULTS:
        said = run_ranks(4, fault_job, "2x2", str(tmp_path), name, timeout_s=40.0)
        close_pools()  # processes end after a failure: what was under way between them ends with them
        assert all("a fault" in text for text in said), said
    lonely = run_ranks(2, lonely_job, "1x2", str(tmp_path), timeout_s=40.0)
    close_pools()
    assert "rank(s) [1] did not come to save" in lonely[0][0] and lonely[1] == []
    assert not (tmp_path / "alone.ckpt").exists()
    left = alone(max_epochs=2)[0]
    del left["model.4.seen"]  # other ranks had begun the next batch, and what hooks do before it had been done there
    for found in run_ranks(2, after_fault_job, "1x2", str(tmp_path)):
        for (end, batches), (name, (_, _, done)) in zip(found, FAULTS.items(), strict=True):
            del end["model.4.seen"]
            assert batches == 2 * PER_EPOCH - done and end.distance(left) <= EXACT, name
