"""Whatever ends a run on one rank, and wherever: every other rank says which one, and why."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hetero.base.checks import naming_full_disk
from tests.ranks.harness import process_context
from tests.ranks.kit import ENGINES, Toy, rank_trainer, regression

GROUPS = [
    {"ranks": [1, 0], "cuts": [0, 2, 3], "samples": 2, "micro_samples": 1},
    {"ranks": [2], "cuts": [0, 3], "samples": 1, "micro_samples": 1},
]
CAUSE = "a flux compensator broke"
BEGUN = 4  # batches
MANY = 60  # batches, which take longer than it takes to stop all ranks behind `BEGUN`
SUSPENDED_S = 5.0  # longer than the timeout
# Where: on which rank. Those of the suite; the others are run with --long.
PLACES = {"training_step": 1, "on_save_checkpoint": 1, "full disk": 0}
MORE = {
    "setup": 0,
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
    """Says in which batch it is, and takes its time; one of them is stopped for ever."""

    stops = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Path(f"at-{self.trainer.global_rank}").write_text("x" * batch_idx)
        if self.stops and batch_idx == BEGUN:
            os.kill(os.getpid(), signal.SIGSTOP)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def fit(
    rank: int, world: int, engine: str, place: str, target: int, folder: str, timeout_s: float, batches: int
) -> None:
    """Trains in a process of its own, which ends as a rank's does; what is on its screen then goes into a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", Path(folder, "meet").as_uri(), rank=rank, world_size=world)
    kind, options = ENGINES[engine]
    if engine == "pipeline":  # each rank has something to do in each place
        options = {**options, "plan": {"groups": GROUPS[: world - 1]}}
    strategy = kind(process_group_backend="gloo", monitor=False, timeout=timedelta(seconds=timeout_s), **options)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1, enable_checkpointing=True, callbacks=[
        ModelCheckpoint(folder, "{step}", every_n_train_steps=batches // 4)
    ])  # fmt: skip
    module, screen = Validated(), "finished"
    module.stops = place == "stopped" and rank == target
    if rank == target and not module.stops:
        broken(module, place)
    data = regression(world * batches)
    try:
        trainer.fit(module, DataLoader(data, batch_size=1), DataLoader(regression(4), batch_size=1))
    except Exception as error:
        screen = "".join(traceback.format_exception(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(folder, f"screen-{rank}").write_text(screen)
    os._exit(0)  # not through gloo's destructors, which may wait for the dead


def screens(
    world: int, engine: str, place: str, target: int, folder: Path, *, timeout_s: float = 60.0, batches: int = 8,
    meanwhile: Callable[[list[Any]], object] = bool,
) -> dict[int, str]:  # fmt: skip
    """Returns what the ranks say that come to an end."""
    given = [(rank, world, engine, place, target, str(folder), timeout_s, batches) for rank in range(world)]
    processes = [process_context().Process(target=fit, args=one) for one in given]
    for process in processes:
        process.start()
    meanwhile(processes)
    for rank, process in enumerate(processes):
        if place != "stopped" or rank != target:
            process.join(60.0)
    for process in processes:
        process.kill()
        process.join()
        process.close()
    return {int(path.name.partition("-")[2]): path.read_text() for path in folder.glob("screen-*")}


CASES = [(engine, *case) for engine in ENGINES for case in PLACES.items()]
MORE_CASES = [
    pytest.param(engine, *case, marks=pytest.mark.long)
    for engine in ENGINES
    for case in MORE.items()
    if (engine, case[0]) != ("federated", "on_train_end")  # nobody waits for anybody there any more
]


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


@pytest.mark.parametrize("target", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_of_a_pipeline_that_is_stopped_for_ever_is_named_by_all_others(tmp_path: Path, target: int) -> None:
    said = screens(3, "pipeline", "stopped", target, tmp_path, timeout_s=3.0)
    assert sorted(said) == [rank for rank in range(3) if rank != target]
    named = f"rank {target} is gone without a word" if target else "rank 0 does not answer"
    for screen in said.values():
        assert named in screen, screen


@pytest.mark.parametrize("engine", ["pipeline", pytest.param("stale", marks=pytest.mark.long)])
def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path: Path, engine: str) -> None:
    def suspend(processes: list[Any]) -> None:
        at = [tmp_path / f"at-{rank}" for rank in range(3)]
        while not all(file.exists() and file.stat().st_size >= BEGUN for file in at):
            time.sleep(0.01)
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(SUSPENDED_S)
        assert all(file.stat().st_size < MANY - 1 for file in at), "they have not ended before"
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)

    said = screens(3, engine, "", -1, tmp_path, timeout_s=2.0, batches=MANY, meanwhile=suspend)
    assert said == dict.fromkeys(range(3), "finished")


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
