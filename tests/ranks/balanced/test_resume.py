"""Checkpoints: a resumed run trains exactly the next sample and ends with the weights of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_hetero import BalancePolicy
from lightning_hetero.balanced.fit.beforehand import EarlierRuns
from lightning_hetero.measure.device import device_of
from lightning_hetero.shares.policy import Learned, ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced
from tests.ranks.resume_kit import (
    BATCH,
    PER_EPOCH,
    SAMPLES,
    Fault,
    Other,
    Result,
    Saver,
    check,
    fit,
    joined,
    loader,
    oracle,
    plain_types,
)

# ---- ours to ours ------------------------------------------------------------------------------------------


def saving_job(rank: int, world: int, folder: str) -> list[Result]:
    """Uninterrupted runs that save on their way: with validation inside the epoch, with accumulation, with faults."""
    runs = []
    per_device = BATCH // world
    steps = ModelCheckpoint(f"{folder}/steps", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    saver = Saver(f"{folder}/plain", [(0, 0), (1, 2), (1, PER_EPOCH - 1)])
    loaders = (loader(per_device, workers=2 if world == 2 else 0), loader(10, samples=40))
    options = {"val_check_interval": 2, "enable_checkpointing": True, "callbacks": [steps, saver]}
    runs.append(fit(rank, world, balanced(), loaders, **options))

    saver = Saver(f"{folder}/accumulate", [(1, 1), (2, 3)])
    runs.append(
        fit(rank, world, balanced(), loader(per_device), callbacks=[saver], accumulate_grad_batches=2)
    )
    for after in (False, True):
        keeper = OnExceptionCheckpoint(f"{folder}/fault", filename=f"{after}")
        with pytest.raises(RuntimeError, match="a fault"):
            callbacks = [Fault(1, 3, after=after), keeper]
            fit(rank, world, balanced(), loader(per_device), callbacks=callbacks, enable_checkpointing=True)
    return runs


def resuming_job(rank: int, world: int, plan: Sequence[dict[str, Any]]) -> list[Result]:
    runs = []
    for one in plan:
        kwargs = {"policy": Other(), **one.get("strategy", {})}
        options = {"accumulate_grad_batches": one.get("accumulate", 1), **one.get("trainer", {})}
        loaders = loader(one["batch_size"], one.get("workers", 0))
        if "val_check_interval" in options:
            loaders = (loaders, loader(10, samples=40))
        runs.append(fit(rank, world, balanced(**kwargs), loaders, ckpt=one["ckpt"], **options))
    return runs


@pytest.fixture(scope="module")
def expected() -> dict[int, Result]:
    return {accumulate: oracle(accumulate) for accumulate in (1, 2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: dict[int, Result]) -> dict[int, Path]:
    """A folder of checkpoints per world size; the runs that made them are right themselves."""
    folders = {}
    for world in (4, 2):
        folders[world] = tmp_path_factory.mktemp(f"world{world}")
        ranks = run_ranks(world, saving_job, str(folders[world]))
        check([r[0] for r in ranks], expected[1], 0, "uninterrupted")
        check([r[1] for r in ranks], expected[2], 0, "uninterrupted, accumulated")
    return folders


VALIDATING = {"val_check_interval": 2}
# checkpoint, batches trained when it was made, and how it is resumed
PLAN: list[tuple[str, int, dict[str, Any]]] = [
    ("plain/batch-0-0.ckpt", 1, {}),
    ("plain/batch-1-2.ckpt", 9, {"workers": 2}),
    ("plain/batch-1-5.ckpt", 12, {"trainer": VALIDATING}),
    ("plain/val-8.ckpt", 8, {"trainer": VALIDATING}),
    ("plain/val-10.ckpt", 10, {"workers": 2, "strategy": {"rebalance": False}}),
    ("plain/epoch-0.ckpt", 6, {"workers": 2, "strategy": {"policy": BalancePolicy()}}),
    ("plain/epoch-1.ckpt", 12, {"trainer": VALIDATING}),
    ("steps/step=4.ckpt", 4, {"trainer": VALIDATING, "strategy": {"exchange_every": 3}}),
    ("steps/step=16.ckpt", 16, {"workers": 2}),
    ("accumulate/batch-1-1.ckpt", 8, {"accumulate": 2}),
    ("accumulate/batch-2-3.ckpt", 16, {"accumulate": 2, "workers": 2}),
    ("accumulate/epoch-0.ckpt", 6, {"accumulate": 2}),
    ("fault/False.ckpt", 9, {}),
    ("fault/True.ckpt", 10, {"workers": 2}),
]


@pytest.mark.stock_ddp("other_devices", "balanced")
@pytest.mark.parametrize(("before", "now"), [pytest.param(4, 4, marks=pytest.mark.long), (4, 2), (2, 4)])
def test_every_kind_of_checkpoint_resumes_at_the_next_sample(
    saved: dict[int, Path], expected: dict[int, Result], before: int, now: int
) -> None:
    """Fewer or more ranks keep the checkpoint's global batch although batch_size x devices would be another one."""
    cases = PLAN if now == 2 else PLAN[1::2] + PLAN[-2:] if before == 4 else PLAN[::2]
    plan = [
        {**how, "ckpt": str(saved[before] / name), "batch_size": BATCH // before} for name, _, how in cases
    ]
    ranks = run_ranks(now, resuming_job, plan, timeout_s=45.0)
    for i, (name, done, how) in enumerate(cases):
        check([r[i] for r in ranks], expected[how.get("accumulate", 1)], done, f"{name} {before} -> {now}")


def stock_job(rank: int, world: int, folder: str) -> Result:
    strategy = DDPStrategy(process_group_backend="gloo")
    saver = Saver(folder, [(1, 2)])
    return fit(rank, world, strategy, loader(BATCH // world, samples=96), callbacks=[saver])


def test_a_checkpoint_is_stock_ddps_plus_one_key_of_plain_types(
    saved: dict[int, Path], tmp_path: Path
) -> None:
    run_ranks(2, stock_job, str(tmp_path))
    stock = torch.load(tmp_path / "batch-1-2.ckpt", weights_only=True)
    for name in ("plain/batch-1-2.ckpt", "plain/epoch-1.ckpt"):
        ours = torch.load(saved[4] / name, weights_only=True)
        state = ours.pop("lightning_hetero")
        assert ours.keys() == stock.keys()
        assert ours["state_dict"].keys() == stock["state_dict"].keys()
        assert plain_types(state)
        assert (state["format"], state["engine"], state["world_size"]) == (1, "balanced", 4)
        assert (state["global_batch_size"], state["batch_size"]) == (BATCH, 4)
        fit_loop = ours["loops"]["fit_loop"]
        assert fit_loop.keys() == stock["loops"]["fit_loop"].keys()
        assert fit_loop["state_dict"] == stock["loops"]["fit_loop"]["state_dict"]  # no loader state of ours


# ---- samplers, data modules, refusals ----------------------------------------------------------------------


class Module(LightningDataModule):
    """Counts its epochs in the checkpoint, as users' data modules do."""

    def __init__(self, batch_size: int, folder: str) -> None:
        super().__init__()
        self.batch_size, self.folder, self.loaded = batch_size, folder, -1

    def train_dataloader(self) -> DataLoader:
        return loader(self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"epoch": self.trainer.current_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["epoch"]


def data_module_job(rank: int, world: int, folder: str) -> tuple[Result, int]:
    per_device = BATCH // world
    fit(rank, world, balanced(), Module(per_device, folder), callbacks=[Saver(folder, [(1, 2)])])
    again = Module(per_device, folder)
    done = fit(rank, world, balanced(policy=Other()), again, ckpt=f"{folder}/batch-1-2.ckpt")
    return done, again.loaded


def test_a_data_module_resumes_with_its_own_state(tmp_path: Path, expected: dict[int, Result]) -> None:
    ranks = run_ranks(2, data_module_job, str(tmp_path))
    check([r[0] for r in ranks], expected[1], 9, "data module")
    assert [r[1] for r in ranks] == [1, 1]


def weighted(seed: int | None) -> DataLoader:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    chances = [float(i) for i in range(1, SAMPLES + 1)]
    return loader(BATCH // 2, sampler=WeightedRandomSampler(chances, SAMPLES, generator=generator))


def sampler_job(rank: int, world: int, folder: str, seed: int | None) -> list[Result]:
    saver = Saver(folder, [(1, 2)])
    runs = [fit(rank, world, balanced(), weighted(seed), callbacks=[saver])]
    torch.manual_seed(1234 + rank)  # the global stream has moved on in a new process
    for name in ("batch-1-2", "epoch-0"):
        runs.append(fit(rank, world, balanced(policy=Other()), weighted(seed), ckpt=f"{folder}/{name}.ckpt"))
    return runs


@pytest.mark.parametrize("seed", [None, 7])
def test_a_random_sampler_resumes_exactly(tmp_path: Path, seed: int | None) -> None:
    ranks = run_ranks(2, sampler_job, str(tmp_path), seed)
    whole: Result = (ranks[0][0][0], joined([r[0] for r in ranks]))
    assert whole[1][:PER_EPOCH] != whole[1][PER_EPOCH : 2 * PER_EPOCH]  # every epoch draws anew
    for i, done in ((1, 9), (2, 6)):
        check([r[i] for r in ranks], whole, done, f"WeightedRandomSampler, {done} batches done")
    torch.load(tmp_path / "batch-1-2.ckpt", weights_only=True)


def other_batch_job(rank: int, world: int, folder: str) -> tuple[str, int]:
    with pytest.raises(ValueError) as error:
        fit(rank, world, balanced(), loader(5), ckpt=f"{folder}/plain/batch-1-2.ckpt")
    final, seen = fit(rank, world, balanced(), loader(5), ckpt=f"{folder}/plain/epoch-0.ckpt")
    del final
    return str(error.value), len(seen)


def test_another_global_batch_is_refused_mid_epoch_and_taken_at_its_end(saved: dict[int, Path]) -> None:
    for message, batches in run_ranks(2, other_batch_job, str(saved[2])):
        assert "after 9 batches of 16" in message or "after 3 batches of 16" in message
        assert (
            "with batches of 10" in message
            and "global_batch_size=16" in message
            and "end of an epoch" in message
        )
        assert batches == 2 * 9


# ---- what was learned --------------------------------------------------------------------------------------


class Given(BalancePolicy):
    """Sees ranks of known speeds, whatever the clock says; rank 1 takes three times as long."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first: tuple[int, ...] = ()

    def start(self, **kwargs: Any) -> None:
        super().start(**kwargs)
        self.first = self.shares

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        times = (0.1 * r.samples * (3 if r.rank == 1 else 1) for r in records)
        given = [
            SpeedSample(rank=r.rank, step=r.step, samples=r.samples, compute_s=t)
            for r, t in zip(records, times, strict=True)
        ]
        return super().observe(given)


def learned_job(rank: int, world: int, folder: str) -> list[tuple[int, ...]]:
    policies = [Given(), Given(), Given(predictor="ewma"), Given()]
    saver = Saver(folder, [(1, 2)])
    fit(rank, world, balanced(policy=policies[0]), loader(BATCH // 2), callbacks=[saver], max_steps=9)
    for policy, rebalance in zip(policies[1:], (True, True, False), strict=True):
        strategy = balanced(policy=policy, rebalance=rebalance)
        fit(rank, world, strategy, loader(BATCH // 2), ckpt=f"{folder}/batch-1-2.ckpt", max_steps=10)
    return [policy.first for policy in policies]


def test_the_first_allocation_after_a_resume_uses_learned_speeds(tmp_path: Path) -> None:
    """Another predictor class cannot use them and starts equal; with rebalance=False shares are always equal."""
    assert run_ranks(2, learned_job, str(tmp_path)) == [[(8, 8), (12, 4), (8, 8), (8, 8)]] * 2


def known_job(rank: int, world: int, folder: str) -> list[tuple[int, ...]]:
    """The first shares of fits, one after another, of which each may know what those before have learned."""
    first: list[tuple[int, ...]] = []

    def then(*, predictor: Any = "kalman", rebalance: bool = True, **options: Any) -> None:
        policy = Given(predictor=predictor)
        strategy = balanced(policy=policy, rebalance=rebalance)
        fit(rank, world, strategy, loader(BATCH // 2), max_steps=PER_EPOCH, **options)
        first.append(policy.first)

    with patch.dict("os.environ", LIGHTNING_HETERO_CACHE=folder):
        then()
        then()
        then(predictor="ewma")  # cannot use them
        then(precision="64-true")
        then(rebalance=False)
        (own,) = (path for path in Path(folder).iterdir() if path.stem.endswith(f"-{rank}"))
        if rank == 1:
            own.write_text(own.read_text().replace("0.1", "NaN"))
        then()
        then()
    return first


def test_a_fit_begins_with_the_shares_that_the_same_work_had_before(tmp_path: Path) -> None:
    """Not at another precision or with another predictor, nor where one rank's speed is damaged."""
    equal, known = (8, 8), (12, 4)
    assert run_ranks(2, known_job, str(tmp_path)) == [[equal, known, equal, equal, equal, equal, known]] * 2
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


def test_a_folder_that_cannot_be_written_changes_nothing() -> None:
    assert run_ranks(2, learned_twice) == [[(8, 8), (8, 8)]] * 2


def learned_twice(rank: int, world: int) -> list[tuple[int, ...]]:
    policies = [Given(), Given()]
    for policy in policies:
        fit(rank, world, balanced(policy=policy), loader(BATCH // 2), max_steps=PER_EPOCH)
    return [policy.first for policy in policies]


def test_what_a_module_is_like_is_looked_at_when_it_is_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lazy layers have no size before; and a process without a home keeps nothing."""
    monkeypatch.setenv("LIGHTNING_HETERO_CACHE", str(tmp_path))
    module: Any = torch.nn.LazyLinear(2)
    trainer: Any = SimpleNamespace(
        lightning_module=module, local_rank=0, world_size=2, precision="32-true", callbacks=[]
    )
    earlier = EarlierRuns(trainer, device_of(torch.device("cpu")), counts=True)
    module(torch.zeros(1, 3))
    assert earlier.read() is None
    learned: Learned = ("Kalman", {"updates": 9}, {"credit": 1.0})
    earlier.write(learned)
    assert earlier.read() == learned and len(list(tmp_path.iterdir())) == 1

    monkeypatch.delenv("LIGHTNING_HETERO_CACHE")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    homeless = EarlierRuns(trainer, device_of(torch.device("cpu")), counts=True)
    homeless.write(learned)
    assert homeless.read() is None and len(list(tmp_path.iterdir())) == 1
