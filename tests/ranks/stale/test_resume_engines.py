"""Checkpoints between engines, one version for all in validation, averages, and a Trainer's uses besides fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, balanced, quiet_trainer, rank_trainer, regression, single, stale, weights
from tests.ranks.resume_kit import (
    BATCH,
    EPOCHS,
    EXACT,
    PER_EPOCH,
    SAMPLES,
    Noting,
    Result,
    Saver,
    check,
    data,
    fit,
    loader,
    oracle,
)
from tests.ranks.stale.models import Watched, pair
from tests.ranks.stale.resume_kit import applied, check_rest, diary, page, scattered, state_of

pytestmark = pytest.mark.ranks
EVEN = 96  # samples that divide evenly: stock DDP pads nothing, so all engines train alike


def bsp(**kwargs: Any) -> Any:
    return stale(policy="bsp", **kwargs)


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


ENGINES = {"stock": ddp, "balanced": balanced, "stale": bsp}


# ---- from engine to engine -----------------------------------------------------------------------------------------


def saving_job(rank: int, world: int, folder: str) -> None:
    for name, strategy in ENGINES.items():
        saver = Saver(f"{folder}/{name}", [(1, 2), (1, PER_EPOCH - 1)])
        fit(rank, world, strategy(), loader(BATCH // world, samples=EVEN), callbacks=[saver])


def crossing_job(
    rank: int, world: int, folder: str, cases: Sequence[tuple[str, str, int, str]]
) -> list[Result]:
    runs = []
    for before, name, _, now in cases:
        ckpt = f"{folder}/{before}/{name}.ckpt"
        runs.append(fit(rank, world, ENGINES[now](), loader(BATCH // 2, samples=EVEN), ckpt=ckpt))
    return runs


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crossed")
    run_ranks(2, saving_job, str(folder))
    return folder


# written by, checkpoint, batches trained until then, resumed by
CROSSINGS = [
    ("stock", "batch-1-2", 9, "stale"),
    ("stock", "batch-1-5", 12, "stale"),
    ("stock", "epoch-0", 6, "stale"),
    ("balanced", "batch-1-2", 9, "stale"),
    ("balanced", "epoch-1", 12, "stale"),
    ("stale", "batch-1-2", 9, "balanced"),
    ("stale", "batch-1-5", 12, "balanced"),
    ("stale", "epoch-0", 6, "balanced"),
    ("stale", "epoch-1", 12, "stock"),
]


@pytest.mark.stock_ddp("from_ddp", "to_ddp", "stale")
def test_every_engine_continues_every_others_checkpoint(crossed: Path) -> None:
    expected = oracle(samples=EVEN)
    ranks = run_ranks(2, crossing_job, str(crossed), CROSSINGS)
    for i, (before, name, done, now) in enumerate(CROSSINGS):
        check([r[i] for r in ranks], expected, done, f"{name}: {before} -> {now}")


def test_stock_ddp_finishes_what_was_begun_within_an_epoch(crossed: Path) -> None:
    ranks = run_ranks(2, crossing_job, str(crossed), [("stale", "batch-1-2", 9, "stock")])
    assert {len(r[0][1]) for r in ranks} == {EPOCHS * PER_EPOCH - 9}


def on_one_device(ckpt: str | None = None, **kwargs: Any) -> Result:
    module = Noting()
    sampler = DistributedSampler(data(EVEN), num_replicas=1, rank=0, seed=0)
    trainer = quiet_trainer(devices=1, **{"max_epochs": EPOCHS, **kwargs})
    trainer.fit(module, DataLoader(data(EVEN), batch_size=BATCH, sampler=sampler), ckpt_path=ckpt)
    return weights(module), module.seen  # type: ignore[return-value]


def test_a_single_device_goes_both_ways(crossed: Path, tmp_path: Path) -> None:
    expected = oracle(samples=EVEN)
    check([on_one_device(str(crossed / "stale" / "epoch-0.ckpt"))], expected, 6, "stale -> one device")
    on_one_device(callbacks=[Saver(str(tmp_path / "one"), [(1, 2)])])
    cases = [("one", "batch-1-2", 9, "stale"), ("one", "epoch-0", 6, "stale")]
    for world in (1, 2):
        ranks = run_ranks(world, whole_job, str(tmp_path), cases)
        for i, (_, name, done, _) in enumerate(cases):
            check([r[i] for r in ranks], expected, done, f"{name}: one device -> {world} ranks")


def whole_job(rank: int, world: int, folder: str, cases: Sequence[tuple[str, str, int, str]]) -> list[Result]:
    """A checkpoint that knows no global batch: the strategy is told."""
    runs = []
    for before, name, _, _ in cases:
        ckpt, train = f"{folder}/{before}/{name}.ckpt", loader(BATCH // world, samples=EVEN)
        runs.append(fit(rank, world, bsp(global_batch_size=BATCH), train, ckpt=ckpt))
    return runs


def chain_job(rank: int, world: int, folder: str) -> Any:
    """Within one epoch: samples out of order (stale), two batches balanced, the rest stale."""
    saver = Saver(folder, [(1, 4)])
    between = diary(rank, world, balanced(), ckpt=f"{folder}/scattered.ckpt", callbacks=[saver])
    return between.epochs, page(diary(rank, world, stale(), ckpt=f"{folder}/batch-1-4.ckpt"))


def odd_job(rank: int, world: int, folder: str) -> None:
    diary(rank, world, bsp(), callbacks=[Saver(folder, [(1, 2)])], max_epochs=2)


def test_stale_balanced_stale_within_an_epoch(tmp_path: Path) -> None:
    run_ranks(2, odd_job, str(tmp_path))
    start = scattered(tmp_path / "batch-1-2.ckpt", tmp_path / "scattered.ckpt")
    ranks = run_ranks(2, chain_job, str(tmp_path))
    check_rest([r[1] for r in ranks], tmp_path / "batch-1-4.ckpt")
    before, after = (applied(path)[1] for path in (start, tmp_path / "batch-1-4.ckpt"))
    seen = list(chain.from_iterable(r[0][1] for r in ranks))
    assert sorted(seen) == sorted(set(range(SAMPLES)) - before) and before < after
    # What balanced had trained when it saved: batches 3 and 4, of samples not trained before.
    first, second = (state_of(p)["lightning_hetero"]["applied"] for p in (start, tmp_path / "batch-1-4.ckpt"))
    size = [sum(end - begin for begin, end in a["spans"]) for a in (first, second)]
    assert (second["tick"], size) == (5, [51, 5 * BATCH])


# ---- one version in validation, whatever happens -------------------------------------------------------------------


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.8))


def watched_job(rank: int, world: int, folder: str, policy: str) -> tuple[Any, float, Weights, float]:
    module = Watched(rank, slow_s=0.03)
    best = ModelCheckpoint(folder, monitor="val", save_top_k=1, save_last=True)
    options = {
        "callbacks": [Ema(), best],
        "enable_checkpointing": True,
        "val_check_interval": 5,
        "max_epochs": 2,
    }
    trainer = rank_trainer(rank, world, stale(policy=policy), **options)
    trainer.fit(module, *pair())
    (found,) = trainer.validate(ckpt_path=best.best_model_path, dataloaders=pair()[1], verbose=False)
    return module.sums, found["val"], weights(module), float(best.best_model_score or 0.0)


@pytest.mark.parametrize("policy", ["asp", pytest.param("flexible", marks=pytest.mark.long)])
def test_validation_sees_one_version_on_all_ranks(tmp_path: Path, policy: str) -> None:
    """With averaged weights and running statistics; the best checkpoint is what was validated."""
    first, second = run_ranks(2, watched_job, str(tmp_path), policy)
    assert first[0] == second[0]
    in_fit = first[0][:-3]
    assert len(in_fit) == 3 * 2 * 3
    starts, epochs, ends = (
        dict((step, s) for w, step, s in in_fit if w == what) for what in ("start", "epoch", "end")
    )
    assert starts == ends and starts.keys() == epochs.keys()
    assert all(starts[step] != epochs[step] for step in starts)  # averages are validated
    assert first[1] == second[1] == pytest.approx(first[3], rel=1e-12)
    assert first[2].distance(second[2]) == 0.0


def test_averages_are_those_of_one_process_and_resume(tmp_path: Path) -> None:
    """One rank: BatchNorm's statistics are a batch's; an average of two ranks' is another thing."""
    module = Watched(0)
    single(module, regression(), 24, max_epochs=2, callbacks=[Ema()])
    (runs,) = run_ranks(1, ema_job, str(tmp_path))
    for run in runs:
        assert run.distance(weights(module)) <= EXACT
    state = state_of(tmp_path / "batch-0-9.ckpt")
    averaged, current = state["state_dict"], state["current_model_state"]
    assert averaged.keys() == current.keys()
    assert not torch.equal(averaged["net.0.weight"], current["net.0.weight"])


def ema_job(rank: int, world: int, folder: str) -> list[Weights]:
    saver = Saver(folder, [(0, 9)])
    runs = []
    for callbacks, ckpt in (([Ema(), saver], None), ([Ema()], f"{folder}/batch-0-9.ckpt")):
        module = Watched(rank)
        trainer = rank_trainer(rank, world, bsp(global_batch_size=24), max_epochs=2, callbacks=callbacks)
        trainer.fit(module, pair(1)[0], ckpt_path=ckpt)
        runs.append(weights(module))
    return runs
