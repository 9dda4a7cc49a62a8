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
def expected() -> dict[int, Weights]:
    return {window: alone(accumulate_grad_batches=window)[0] for window in (1, 2)}


def saving_job(rank: int, world: int, plan: str, folder: str) -> list[Weights]:
    size = BATCH // world
    first, _, trainer = fit(rank, world, pipeline(plan), size, callbacks=savers(folder), enable_checkpointing=True)
    save_afterwards(trainer, folder)
    saver = Saver(f"{folder}/window", [(1, 1), (2, 3)])
    return [first, fit(rank, world, pipeline(plan), size, callbacks=[saver], accumulate_grad_batches=2)[0]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: dict[int, Weights]) -> dict[str, Path]:
    """Checkpoints by plan; the runs that wrote them were right themselves."""
    folders = {}
    for plan in ("1x2", "2x2"):
        folders[plan] = tmp_path_factory.mktemp(plan)
        for first, second in run_ranks(WORLD[plan], saving_job, plan, str(folders[plan])):
            assert first.distance(expected[1]) <= EXACT and second.distance(expected[2]) <= EXACT
    return folders


# ---- what is written -----------------------------------------------------------------------------------------------


def test_files_are_those_of_one_process_plus_one_key_of_plain_types(saved: dict[str, Path], tmp_path: Path) -> None:
    trainer = alone(callbacks=savers(str(tmp_path)), enable_checkpointing=True)[2]
    save_afterwards(trainer, str(tmp_path))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt"))
    assert {"after.ckpt", "weights.ckpt", "light/epoch=1.ckpt", "steps/step=4.ckpt", "epoch-2.ckpt"} <= set(names)
    for plan, folder in saved.items():
        assert names == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt") if p.parent.name != "window")
        for name in names:
            ours, stock = (torch.load(where / name, weights_only=True) for where in (folder, tmp_path))
            state = ours.pop("lightning_hetero")
            assert plain_types(state), name
            assert (state["format"], state["engine"], state["world_size"]) == (1, "pipeline", WORLD[plan])
            assert (state["global_batch_size"], state["batch_size"]) == (BATCH, BATCH // WORLD[plan])
            assert [group["cuts"] for group in state["plan"]["groups"]] == [g["cuts"] for g in PLANS[plan]["groups"]]
            for found in (ours, stock):  # each has its folder's name in it
                found.get("callbacks", {}).clear()
            assert differences(ours, stock) == [], f"{plan} {name}"


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
    ("1x2", "window/batch-2-3.ckpt", 16, 2),
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
    for name in ("stock", "balanced", "stale", "pipeline"):
        saver = Saver(f"{folder}/{name}", [(1, 2)])
        fit(rank, world, engine(name), BATCH // 2, max_epochs=2, callbacks=[saver])


def crossing_job(rank: int, world: int, folder: str) -> dict[tuple[str, str, str], tuple[Weights, int]]:
    return {
        (before, name, now): fit(rank, world, engine(now), BATCH // 2, ckpt=f"{folder}/{before}/{name}.ckpt")[:2]
        for before, name, now in CROSSINGS
    }


CROSSINGS = [
    *((before, name, "pipeline") for before in ("stock", "balanced", "stale") for name in ("batch-1-2", "epoch-0")),
    *(("pipeline", name, now) for now in ("balanced", "stale") for name in ("batch-1-2", "epoch-0")),
    ("pipeline", "epoch-0", "stock"),
    ("pipeline", "batch-1-2", "stock"),
]
DONE = {"batch-1-2": 9, "epoch-0": 6}


@pytest.mark.stock_ddp("from_ddp", "to_ddp", "pipeline")
def test_every_engine_continues_what_a_pipeline_began_and_the_other_way_round(tmp_path: Path) -> None:
    expected = alone()[0]
    folder = str(tmp_path)
    alone(max_epochs=2, callbacks=[Saver(f"{folder}/one", [(1, 2)])])
    run_ranks(2, all_saving_job, folder)
    for found in run_ranks(2, crossing_job, folder):
        for (before, name, now), (end, batches) in found.items():
            assert batches == EPOCHS * PER_EPOCH - DONE[name]
            if (name, now) != ("batch-1-2", "stock"):  # which starts the epoch's order over
                assert end.distance(expected) <= EXACT, f"{before} {name} -> {now}"
    for name in ("batch-1-2", "epoch-0"):
        end, batches, _ = alone(ckpt=f"{folder}/pipeline/{name}.ckpt")
        assert batches == EPOCHS * PER_EPOCH - DONE[name]
        assert name == "batch-1-2" or end.distance(expected) <= EXACT
    for found in run_ranks(4, from_one_job, folder):
        for end, batches in found:
            assert end.distance(expected) <= EXACT and batches in (9, 12)


def from_one_job(rank: int, world: int, folder: str) -> list[tuple[Weights, int]]:
    """A checkpoint that knows no global batch: the strategy is told."""
    paths = [f"{folder}/one/{name}.ckpt" for name in ("batch-1-2", "epoch-0")]
    return [fit(rank, world, pipeline("2x2", global_batch_size=BATCH), BATCH, ckpt=path)[:2] for path in paths]


# ---- on an exception -----------------------------------------------------------------------------------------------

FAULTS = {"after": (1, 3, 10), "one rank": (1, 3, 9), "one rank, after": (1, 3, 10)}


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
    return [fit(rank, world, pipeline(plan), BATCH // world, ckpt=f"{folder}/{name}.ckpt")[:2] for name in FAULTS]


def test_what_an_exception_saves_is_resumed(tmp_path: Path, expected: dict[int, Weights]) -> None:
    """Also if it is raised on one rank: the others come to save when they hear of it."""
    for name in FAULTS:
        said = run_ranks(4, fault_job, "2x2", str(tmp_path), name, timeout_s=40.0)
        close_pools()  # processes end after a failure: what was under way between them ends with them
        assert all("a fault" in text for text in said), said
    lonely = run_ranks(2, lonely_job, "1x2", str(tmp_path), timeout_s=40.0)
    close_pools()
    assert "rank(s) [1] did not come to save" in lonely[0][0] and lonely[1] == []
    assert not (tmp_path / "alone.ckpt").exists()
    for found in run_ranks(4, after_fault_job, "2x2", str(tmp_path)):
        for (end, batches), (name, (_, _, done)) in zip(found, FAULTS.items(), strict=True):
            # Other ranks had begun the next batch, and what hooks do before it had been done there.
            left = {key: value for key, value in expected[1].items() if key != "model.4.seen"}
            del end["model.4.seen"]
            assert batches == EPOCHS * PER_EPOCH - done and end.distance(left) <= EXACT, name
