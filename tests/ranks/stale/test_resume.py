"""Checkpoints of the stale engine: stock DDP's plus one key, and resumed at exactly the next sample.

Exact comparisons use ``policy="bsp"``, which equals a single process. Under policies whose updates depend on timing the
samples of an epoch are checked: each one is applied once, before or after the resume.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DistributedSampler

from tests.ranks.harness import run_ranks
from tests.ranks.kit import quiet_trainer, rank_trainer, single, stale
from tests.ranks.resume_kit import (
    BATCH,
    EPOCHS,
    EXACT,
    PER_EPOCH,
    SAMPLES,
    Fault,
    Result,
    Saver,
    check,
    data,
    loader,
    plain_types,
    result,
)
from tests.ranks.stale.resume_kit import Page, Scheduled, applied, check_rest, diary, page, scattered, state_of

pytestmark = pytest.mark.ranks


def bsp(**kwargs: Any) -> Any:
    return stale(policy="bsp", **kwargs)


# ---- exact: a barrier against a single process ---------------------------------------------------------------------


def train(
    rank: int, world: int, strategy: Any, loaders: Any, *, ckpt: str | None = None, after: str | None = None,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """`fit` of a module with schedulers; saves once more to ``after`` when it is over."""
    gc.collect()
    module = Scheduled()
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": EPOCHS, **kwargs})
    trainer.fit(module, *loaders if isinstance(loaders, tuple) else (loaders,), ckpt_path=ckpt)
    if after is not None:
        trainer.save_checkpoint(f"{after}/after.ckpt")
    return result(module)


def reference(**kwargs: Any) -> Result:
    module = Scheduled()
    single(module, data(), BATCH, **{"max_epochs": EPOCHS, **kwargs})
    final, seen = result(module)
    return final, [sorted(batch) for batch in seen]


def saving_job(rank: int, world: int, folder: str) -> list[Result]:
    """Uninterrupted runs that save on their way: with validation inside the epoch, with accumulation, with faults."""
    per_device = BATCH // world
    steps = ModelCheckpoint(
        f"{folder}/steps", filename="{step}", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max",
        save_last=True,
    )  # fmt: skip
    saver = Saver(f"{folder}/plain", [(0, 0), (1, 2), (1, PER_EPOCH - 1)])
    loaders = (loader(per_device), loader(10, samples=20))
    options = {"val_check_interval": 2, "enable_checkpointing": True, "callbacks": [steps, saver]}
    runs = [train(rank, world, bsp(), loaders, **options)]
    saver = Saver(f"{folder}/accumulate", [(1, 1), (2, 3)])
    runs.append(train(rank, world, bsp(), loader(per_device), callbacks=[saver], accumulate_grad_batches=2))
    train(rank, world, bsp(), loader(per_device), max_epochs=1, after=f"{folder}/epochs")
    for after in (False, True):
        keeper = OnExceptionCheckpoint(f"{folder}/fault", filename=f"{after}")
        with pytest.raises(RuntimeError, match="a fault"):
            callbacks = [Fault(1, 3, after=after), keeper]
            train(rank, world, bsp(), loader(per_device), callbacks=callbacks, enable_checkpointing=True)
    return runs


@pytest.fixture(scope="module")
def expected() -> dict[int, Result]:
    return {accumulate: reference(accumulate_grad_batches=accumulate) for accumulate in (1, 2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: dict[int, Result]) -> Path:
    """A folder of checkpoints of two ranks; the runs that made them are right themselves."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = run_ranks(2, saving_job, str(folder))
    check([r[0] for r in ranks], expected[1], 0, "uninterrupted")
    check([r[1] for r in ranks], expected[2], 0, "uninterrupted, accumulated")
    return folder


# checkpoint, batches trained when it was made, and how it is resumed
PLAN: list[tuple[str, int, dict[str, Any]]] = [
    ("plain/batch-0-0.ckpt", 1, {}),
    ("plain/batch-1-2.ckpt", 9, {"val_check_interval": 2}),
    ("plain/batch-1-5.ckpt", 12, {"val_check_interval": 2}),
    ("plain/val-8.ckpt", 8, {"val_check_interval": 2}),
    ("plain/epoch-0.ckpt", 6, {}),
    ("plain/epoch-1.ckpt", 12, {"val_check_interval": 2}),
    ("steps/step=16.ckpt", 16, {}),
    ("steps/last.ckpt", 16, {}),
    ("accumulate/batch-1-1.ckpt", 8, {"accumulate_grad_batches": 2}),
    ("accumulate/epoch-0.ckpt", 6, {"accumulate_grad_batches": 2}),
    ("epochs/after.ckpt", 6, {}),
    ("fault/False.ckpt", 9, {}),
    ("fault/True.ckpt", 10, {}),
]


def resuming_job(
    rank: int, world: int, folder: str, cases: Sequence[tuple[str, int, dict[str, Any]]]
) -> list[Result]:
    runs = []
    for name, _, options in cases:
        loaders: Any = loader(BATCH // 2)
        if "val_check_interval" in options:
            loaders = (loaders, loader(10, samples=20))
        runs.append(train(rank, world, bsp(), loaders, ckpt=f"{folder}/{name}", **options))
    return runs


@pytest.mark.stock_ddp("other_devices", "stale")
@pytest.mark.parametrize(("now", "cases"), [(2, PLAN), (3, PLAN[1::3]), (1, PLAN[::4])], ids=["2", "3", "1"])
@pytest.mark.short("2")
def test_every_kind_of_checkpoint_resumes_at_the_next_sample(
    saved: Path, expected: dict[int, Result], now: int, cases: list[Any]
) -> None:
    """More or fewer ranks keep the checkpoint's global batch although batch_size x devices would be another one."""
    ranks = run_ranks(now, resuming_job, str(saved), cases)
    for i, (name, done, options) in enumerate(cases):
        truth = expected[options.get("accumulate_grad_batches", 1)]
        check([r[i] for r in ranks], truth, done, f"{name} 2 -> {now}")


def stock_job(rank: int, world: int, folder: str) -> None:
    loaders = (loader(BATCH // world, samples=96), loader(10, samples=20))
    saver = Saver(folder, [(1, 2)])
    train(
        rank,
        world,
        DDPStrategy(process_group_backend="gloo"),
        loaders,
        callbacks=[saver],
        val_check_interval=2,
    )


def test_a_checkpoint_is_stock_ddps_plus_one_key_of_plain_types(saved: Path, tmp_path: Path) -> None:
    run_ranks(2, stock_job, str(tmp_path))
    for name in ("batch-1-2", "epoch-1"):
        stock, ours = state_of(tmp_path / f"{name}.ckpt"), state_of(saved / "plain" / f"{name}.ckpt")
        state = ours.pop("lightning_hetero")
        assert plain_types(state)
        assert (state["format"], state["engine"], state["world_size"]) == (1, "stale", 2)
        assert (state["global_batch_size"], state["batch_size"]) == (BATCH, BATCH // 2)
        assert state["server"]["version"] == ours["global_step"] == stock["global_step"]
        assert shape(ours) == shape(stock)


def shape(value: Any) -> Any:
    """A checkpoint without its numbers: keys, types, and what each tensor looks like in the file."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items() if not (isinstance(k, str) and "Checkpoint" in k)}
    if isinstance(value, list | tuple):
        return [shape(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.untyped_storage().nbytes()
    return type(value)


def test_the_optimizer_in_the_checkpoint_is_the_servers(saved: Path, tmp_path: Path) -> None:
    """State, learning rates and counters of each kind of checkpoint are a single process's."""
    module = Scheduled()
    saver = Saver(str(tmp_path), [(1, 2)])
    sampler = DistributedSampler(data(), num_replicas=1, rank=0, seed=0)
    trainer = quiet_trainer(devices=1, max_epochs=EPOCHS, callbacks=[saver])
    trainer.fit(module, loader(BATCH, sampler=sampler))
    for name in ("batch-1-2", "epoch-1"):
        theirs, ours = state_of(tmp_path / f"{name}.ckpt"), state_of(saved / "plain" / f"{name}.ckpt")
        (one,), (other,) = theirs["optimizer_states"], ours["optimizer_states"]
        assert one["param_groups"] == other["param_groups"]
        assert one["state"].keys() == other["state"].keys()
        for key, values in one["state"].items():
            assert values.keys() == other["state"][key].keys()
            for k, v in values.items():
                torch.testing.assert_close(other["state"][key][k], v, rtol=EXACT, atol=EXACT)
        assert theirs["lr_schedulers"] == ours["lr_schedulers"]
        assert theirs["global_step"] == ours["global_step"] and theirs["epoch"] == ours["epoch"]


# ---- each sample once, whatever the timing -------------------------------------------------------------------------


def timed_job(rank: int, world: int, folder: str, policy: str) -> Page:
    saver = Saver(folder, [(1, 1), (1, 3)])
    return page(diary(rank, world, stale(policy=policy, liveness_s=60.0), slow_s=0.04, callbacks=[saver]))


def rest_job(rank: int, world: int, paths: Sequence[str], policies: Sequence[str]) -> list[Page]:
    strategies = [stale(policy=policy, liveness_s=60.0) for policy in policies]
    return [page(diary(rank, world, s, ckpt=p)) for s, p in zip(strategies, paths, strict=True)]


@pytest.mark.parametrize(("first", "then"), [("flexible", ["asp", "flexible"]), ("asp", ["bsp", "saps"])])
def test_every_sample_counts_once_before_or_after_the_resume(
    tmp_path: Path, first: str, then: list[str]
) -> None:
    """Rank 1 is late in every third batch, so samples are applied out of order; another policy goes on."""
    pages = run_ranks(2, timed_job, str(tmp_path), first)
    assert all(p[1] == EPOCHS * SAMPLES for p in pages)
    paths = [tmp_path / "batch-1-1.ckpt", tmp_path / "batch-1-3.ckpt"]
    for path in paths:
        assert applied(path)[1] <= set(chain.from_iterable(p[0][1] for p in pages))
    ranks = run_ranks(3, rest_job, [str(p) for p in paths], then)
    for i, path in enumerate(paths):
        check_rest([r[i] for r in ranks], path)


def test_samples_applied_out_of_order_are_left_out(saved: Path, tmp_path: Path) -> None:
    path = scattered(saved / "plain" / "batch-1-2.ckpt", tmp_path / "scattered.ckpt")
    policies = ["flexible", "bsp", "asp"]
    ranks = run_ranks(2, rest_job, [str(path)] * 3, policies)
    for i in range(len(policies)):
        check_rest([r[i] for r in ranks], path)


# ---- failures ------------------------------------------------------------------------------------------------------


def failing_job(rank: int, world: int, folder: str, failing: int) -> tuple[str, str]:
    """One rank alone fails; the state at that moment is saved all the same, and nobody waits for anybody."""
    callbacks: list[Callback] = [
        OnExceptionCheckpoint(folder, filename="exception"),
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_last=True),
    ]
    options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True}
    with pytest.raises(RuntimeError) as error:
        diary(rank, world, stale(liveness_s=60.0), fails=rank == failing, **options)
    return str(error.value), str(error.value.__cause__)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_run_that_failed_resumes_from_its_last_moment(tmp_path: Path, failing: int) -> None:
    messages = run_ranks(2, failing_job, str(tmp_path), failing)
    assert messages[failing] == ("a fault", "None")
    text, cause = messages[1 - failing]
    assert text == "a fault" and f"rank {failing}" in cause
    paths = [tmp_path / "exception.ckpt", tmp_path / "last.ckpt"]
    ranks = run_ranks(2, rest_job, [str(p) for p in paths], ["flexible"] * 2)
    for i, path in enumerate(paths):
        check_rest([r[i] for r in ranks], path)
