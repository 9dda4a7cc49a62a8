"""Whatever ends a run on one rank, and wherever: every other rank says which one, and why."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hetero import (
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
)
from lightning_hetero.base.checks import naming_full_disk
from tests.ranks.harness import process_context
from tests.ranks.kit import Toy, rank_trainer, regression

ENGINES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "balanced": (LoadBalancedStrategy, {}),
    "stale": (BoundedStalenessStrategy, {"policy": "bsp"}),
    "pipeline": (HeteroPipelineStrategy, {"backbone": "net"}),
    "federated": (FederatedStrategy, {"local_steps": 2}),
}
CAUSE = "a flux compensator broke"
# Where: on which rank. Those of the suite; the others are run with --long.
PLACES = {"training_step": 1, "on_save_checkpoint": 1, "full disk": 0, "setup": 0}
MORE = {
    "configure_optimizers": 1,
    "on_fit_start": 0,
    "on_train_start": 1,
    "on_validation_start": 0,
    "validation_step": 1,
    "on_train_epoch_end": 0,
    "on_train_end": 1,
}


def broken(module: Toy, place: str) -> None:
    """Makes a module raise there, by an exception that no other process can make."""

    class FluxError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise FluxError(CAUSE)

    def fill_disk(*_: Any) -> None:  # just before anything is written
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    special = {"full disk": ("on_save_checkpoint", fill_disk), "killed": ("on_train_batch_end", die)}
    setattr(module, *special.get(place, (place, fail)))


class Validated(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def fit(rank: int, world: int, engine: str, place: str, target: int, folder: str) -> None:
    """Trains in a process of its own, which ends as a rank's does; what is on its screen then goes into a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", Path(folder, "meet").as_uri(), rank=rank, world_size=world)
    kind, options = ENGINES[engine]
    strategy = kind(process_group_backend="gloo", monitor=False, timeout=timedelta(seconds=60), **options)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    module, screen = Validated(), "finished"
    if rank == target:
        broken(module, place)
    try:
        trainer.fit(module, DataLoader(regression(world * 8), batch_size=1), DataLoader(regression(4), batch_size=1))
    except Exception as error:
        screen = "".join(traceback.format_exception(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(folder, f"screen-{rank}").write_text(screen)
    os._exit(0)  # not through gloo's destructors, which may wait for the dead


def screens(world: int, engine: str, place: str, target: int, folder: Path) -> dict[int, str]:
    """Returns what the ranks say that come to an end."""
    given = [(rank, world, engine, place, target, str(folder)) for rank in range(world)]
    processes = [process_context().Process(target=fit, args=one) for one in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        process.kill()
        process.join()
        process.close()
    return {int(path.name.partition("-")[2]): path.read_text() for path in folder.glob("screen-*")}


CASES = [(engine, *case) for engine in ENGINES for case in PLACES.items()]
MORE_CASES = [pytest.param(e, *case, marks=pytest.mark.long) for e in ENGINES for case in MORE.items()]


@pytest.mark.parametrize(("engine", "place", "target"), [*CASES, *MORE_CASES])
def test_an_exception_is_on_every_screen(tmp_path: Path, engine: str, place: str, target: int) -> None:
    own = "OSError: [Errno 27] File too large: " if place == "full disk" else f"FluxError: {CAUSE}"
    said = screens(2, engine, place, target, tmp_path)
    assert sorted(said) == [0, 1]
    assert own in said[target].splitlines()[-1], said[target]
    assert f"rank {target} failed: " in said[1 - target] and own in said[1 - target], said[1 - target]


KILLED = [("balanced", 1), ("pipeline", 1), ("federated", 0)]
MORE_KILLED = [("balanced", 0), ("pipeline", 0), ("pipeline", 2), ("federated", 1)]


@pytest.mark.parametrize(
    ("engine", "target"), [*KILLED, *(pytest.param(*k, marks=pytest.mark.long) for k in MORE_KILLED)]
)
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, engine: str, target: int) -> None:
    said = screens(3, engine, "killed", target, tmp_path)
    assert sorted(said) == [rank for rank in range(3) if rank != target]
    for screen in said.values():
        assert f"rank {target} is gone without a word" in screen, screen


def test_a_full_disk_is_the_reason_and_not_what_torch_makes_of_it(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "there.ckpt"
    try:
        with pytest.raises(OSError, match=r"Errno 27.*there.ckpt") as found, naming_full_disk(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
            with open(path, "wb") as file:
                torch.save({"a": torch.zeros(100_000)}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.value.filename == str(path)
