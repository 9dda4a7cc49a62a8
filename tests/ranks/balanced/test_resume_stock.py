"""Checkpoints to and from stock Lightning: DDP and a single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, quiet_trainer
from tests.ranks.resume_kit import (
    BATCH,
    EPOCHS,
    PER_EPOCH,
    Noting,
    Other,
    Result,
    Saver,
    check,
    data,
    fit,
    loader,
    oracle,
    result,
)


def cross_job(rank: int, world: int, folder: str) -> list[list[Result]]:
    """Stock and ours save, and each resumes the other's; 96 samples divide evenly, so they train alike."""
    per_device = BATCH // world
    stock = DDPStrategy(process_group_backend="gloo")
    for name, strategy in (("stock", stock), ("ours", balanced())):
        saver = Saver(f"{folder}/{name}", [(1, 2)])
        fit(rank, world, strategy, loader(per_device, samples=96), callbacks=[saver])

    def resumed(strategy: Any, ckpt: str) -> Result:
        return fit(rank, world, strategy, loader(per_device, samples=96), ckpt=f"{folder}/{ckpt}")

    return [
        [
            resumed(balanced(policy=Other()), "stock/batch-1-2.ckpt"),
            resumed(balanced(), "stock/epoch-1.ckpt"),
        ],
        [resumed(DDPStrategy(process_group_backend="gloo"), "ours/epoch-0.ckpt")],
        [resumed(DDPStrategy(process_group_backend="gloo"), "ours/batch-1-2.ckpt")],
    ]


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[Result]]]]:
    folder = tmp_path_factory.mktemp("cross")
    return folder, run_ranks(2, cross_job, str(folder))


@pytest.mark.stock_ddp("from_ddp", "to_ddp", "balanced")
def test_a_stock_checkpoint_is_continued_exactly_even_mid_epoch(crossed: tuple[Path, Any]) -> None:
    _, ranks = crossed
    expected = oracle(samples=96)
    for i, done in enumerate((9, 12)):
        check([r[0][i] for r in ranks], expected, done, f"stock checkpoint after {done} batches")


@pytest.mark.stock_ddp("from_ddp", "to_ddp", "balanced")
def test_stock_ddp_continues_our_checkpoint(crossed: tuple[Path, Any]) -> None:
    """From an epoch's end exactly; mid-epoch stock DDP starts the epoch's order over, but it does finish."""
    _, ranks = crossed
    check([r[1][0] for r in ranks], oracle(samples=96), 6, "ours into stock DDP")
    (mid,) = {len(r[2][0][1]) for r in ranks}
    assert mid == 3 * PER_EPOCH - 9


def test_one_device_continues_our_checkpoint(crossed: tuple[Path, Any]) -> None:
    folder, _ = crossed
    expected = oracle(samples=96)
    for name, done, exact in (("epoch-0", 6, True), ("epoch-1", 12, True), ("batch-1-2", 9, False)):
        module = Noting()
        sampler = DistributedSampler(data(96), num_replicas=1, rank=0, seed=0)
        quiet_trainer(devices=1, max_epochs=EPOCHS).fit(
            module,
            DataLoader(data(96), batch_size=BATCH, sampler=sampler),
            ckpt_path=str(folder / "ours" / f"{name}.ckpt"),
        )
        final, seen = result(module)
        assert len(seen) == 3 * PER_EPOCH - done
        if exact:
            check([(final, seen)], expected, done, name)
