"""Checkpoints of shards as a Trainer handles them: kept, linked, validated with, damaged, saved after an exception."""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_hetero.base.checks import naming_damage
from lightning_hetero.lightning_compat.strategies import read_folder, written_last
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, rank_trainer
from tests.ranks.resume_kit import BATCH, Fault, loader
from tests.ranks.sharded.checkpoint_kit import SAMPLES, Sharded, strategy, whole

pytestmark = pytest.mark.ranks


class Checked(Sharded):
    """Has a layer that the optimizer knows and no step needs; may raise in a step."""

    raises_at = -1

    def __init__(self) -> None:
        super().__init__("odd")
        torch.manual_seed(3)
        self.unused = torch.nn.Linear(2, 2).double()

    def configure_model(self) -> None:
        super().configure_model()
        assert self.device_mesh is not None
        if not isinstance(self.unused, FSDPModule):
            fully_shard(self.unused, mesh=self.device_mesh["data_parallel"])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.raises_at:
            raise RuntimeError("a fault")
        return loss


class Before(Callback):
    """Saves before the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint("before.ckpt")


def trained(
    rank: int, world: int, name: str, module: Checked, ckpt: str | None = None, epochs: int = 1, **options: Any
) -> tuple[Any, Checked]:
    options |= {"max_epochs": epochs, "enable_checkpointing": True, "default_root_dir": "."}
    trains = rank_trainer(rank, world, strategy(name, world), **options)
    trains.fit(module, loader(BATCH // world, samples=SAMPLES), loader(8, samples=16), ckpt_path=ckpt)
    return trains, module


def kept(rank: int, world: int, name: str) -> dict[str, Any]:
    """All that a Trainer does with checkpoints, in one folder of this form."""
    latest = {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 1}
    saver = ModelCheckpoint(name, "{step}", save_last="link", **latest)
    trains, module = trained(rank, world, name, Checked(), callbacks=[saver, Before()])
    final, found = whole(module), {}
    found["files"] = sorted(path.name for path in Path(name).iterdir())
    found["validated"] = trains.validate(module, loader(8, samples=16), ckpt_path="best", verbose=False)[0]["val"]
    found["before"] = trains.callback_metrics["val"].item()
    trains.test(module, loader(8, samples=16), ckpt_path=f"{name}/step=3.ckpt", verbose=False)
    found["other"] = whole(module).distance(final)
    trains.test(module, loader(8, samples=16), ckpt_path=f"{name}/last.ckpt", verbose=False)
    found["last"] = whole(module).distance(final)
    again = ModelCheckpoint(name, "{step}", save_last=True, **latest)  # writes over it
    trains, module = trained(rank, world, name, Checked(), "last", 2, callbacks=[again])
    found["resumed"] = whole(module)
    trains.validate(fresh := Checked(), loader(8, samples=16), ckpt_path=f"{name}/last.ckpt", verbose=False)
    found["written over"] = whole(fresh)
    found["fresh"] = whole(trained(rank, world, name, Checked(), "before.ckpt", 2)[1])
    return found


def uninterrupted(rank: int, world: int) -> Weights:
    return whole(trained(rank, world, "whole", Checked(), None, 2)[1])


@cache
def twice() -> list[Weights]:
    return run_ranks(2, uninterrupted)


@pytest.mark.parametrize("name", ["folder", "whole"])
def test_the_trainer_keeps_links_and_finds_them(name: str) -> None:
    for found, expected in zip(run_ranks(2, kept, name), twice(), strict=True):
        assert found["files"] == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
        assert found["validated"] == found["before"]
        assert found["last"] == 0.0 < found["other"]
        for how in ("resumed", "written over", "fresh"):
            assert found[how].distance(expected) <= 1e-12, how


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def saving(rank: int, world: int, path: str) -> tuple[str, list[str]]:
    """Saves a good one, and then over it with no space on one rank."""
    trains, _ = trained(rank, world, "folder", Checked())
    trains.save_checkpoint(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        trains.save_checkpoint(path)
    except OSError as error:
        return str(error), sorted(os.listdir(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved", []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "it.ckpt"
    for words, files in run_ranks(2, saving, str(path)):
        assert "[Errno 27] File too large: " in words and "it.ckpt" in words
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"], "what was there stays"
    return path


def damage(folder: Path, how: str) -> None:
    shard = folder / "__1_0.distcp"
    match how:
        case "unfinished":
            written_last(folder).unlink()
        case "no index":
            (folder / ".metadata").unlink()
        case "index":
            (folder / ".metadata").write_bytes(b"no index")
        case "cut":
            os.truncate(shard, shard.stat().st_size // 2)
        case "flipped":
            whole = bytearray(shard.read_bytes())
            whole[whole.index(read_folder(folder)["state_dict"]["net.2.bias"][-2:].numpy().tobytes())] ^= 1
            shard.write_bytes(whole)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unfinished", "it has no meta.pt, so saving has not come to its end"),
        ("no index", "it has no .metadata, so saving has not come to its end"),
        ("index", "UnpicklingError"),
        ("cut", "PytorchStreamReader"),
        ("flipped", "are not those that were written"),
    ],
)
def test_a_damaged_folder_is_named(good: Path, tmp_path: Path, how: str, words: str) -> None:
    shutil.copytree(good, path := tmp_path / "it.ckpt")
    with naming_damage(path):
        assert read_folder(path)["lightning_hetero"]["engine"] == "sharded"
    damage(path, how)
    said = rf"the checkpoint {path} \(a folder\) cannot be read: .*{words}"
    with pytest.raises(RuntimeError, match=said), naming_damage(path):
        read_folder(path)
    if how == "flipped":
        with pytest.raises(RuntimeError, match=said):
            run_ranks(2, trained, "folder", Checked(), str(path))


def interrupted(rank: int, world: int) -> tuple[list[str], Weights]:
    """Ranks that all raise between two steps save; those that raise in a step do not."""
    said = []
    for name, raises_at, extra in (("between", -1, [Fault(0, 2, after=False)]), ("inside", 3, [])):
        module = Checked()
        module.raises_at = raises_at
        keeper = OnExceptionCheckpoint(".", filename=name)
        with pytest.raises(RuntimeError, match="a fault"), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trained(rank, world, "folder", module, callbacks=[*extra, keeper])
        said += [str(warning.message) for warning in found if "no checkpoint is written" in str(warning.message)]
    torch.distributed.barrier()
    assert not Path("inside.ckpt").exists()
    _, resumed = trained(rank, world, "folder", Checked(), "between.ckpt", 2)
    return said, whole(resumed)


def test_after_an_exception_all_ranks_save_or_none() -> None:
    for rank, ((said, resumed), expected) in enumerate(zip(run_ranks(2, interrupted), twice(), strict=True)):
        assert resumed.distance(expected) <= 1e-12
        assert len(said) == (rank == 0) and all("in a step" in words for words in said), said


def test_the_private_names_that_read_a_folder_are_those_of_these_versions() -> None:
    assert written_last("x").name == "meta.pt", f"Lightning {lightning.__version__}"
    assert lightning.__version__.startswith(("2.5.", "2.6.")), "look again at lightning_compat/strategies.py"
