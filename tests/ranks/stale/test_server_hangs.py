"""A server that lives and does not go on: its optimizer hangs, or its process is stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_hetero.stale.fit import session
from lightning_hetero.transport import link
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, stale

pytestmark = pytest.mark.ranks
ONE = pytest.mark.parametrize("transport", ["auto", pytest.param("pairs", marks=pytest.mark.long)])
STOP, CONTINUE = getattr(signal, "SIGSTOP", 19), getattr(signal, "SIGCONT", 18)
HANGS_AT = 3


class Hanging(torch.optim.SGD):
    """Asks for a lock a second time."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == HANGS_AT:
            Path("hangs").touch()
            in_a_lock_of_the_user()
        super().step(closure)


def in_a_lock_of_the_user() -> None:
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()


class Hangs(Toy):
    def configure_optimizers(self) -> Any:
        return Hanging(self.parameters(), lr=0.01)


def loader(world: int) -> DataLoader:
    return DataLoader(regression(96), batch_size=24 // world, shuffle=True)


def servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]


@contextmanager
def screen(path: Path) -> Iterator[None]:
    """What this process and its children write to stderr goes to a file."""
    kept, file = os.dup(2), os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)


def hanging_job(rank: int, world: int, transport: Any) -> tuple[str, str]:
    strategy = stale(policy="bsp", transport=transport, timeout=timedelta(seconds=2), liveness_s=0.5)
    trainer = rank_trainer(rank, world, strategy, max_epochs=4)
    with screen(Path(f"said{rank}")), pytest.raises(Exception, match="parameter server") as caught:
        trainer.fit(Hangs(), loader(world))
    assert not servers()
    return str(caught.value), Path(f"said{rank}").read_text()


@pytest.mark.parametrize("transport", ["auto", "pairs"])
def test_an_optimizer_that_hangs_ends_all_ranks_which_are_told_and_shows_where(transport: str) -> None:
    (text, said), *others = run_ranks(3, hanging_job, transport)
    for each in (text, *[text for text, _ in others]):
        assert "has been in the step of optimizer 0 for" in each and "it hangs" in each
    assert "in_a_lock_of_the_user" in said and "it hangs. It ends" in said


class Stopper(Callback):
    """Stops the server, and wakes it after a while; None: never."""

    def __init__(self, wakes_s: float | None) -> None:
        self.wakes_s = wakes_s
        self.timer: threading.Timer | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx == HANGS_AT:
            (server,) = servers()
            os.kill(server.pid, STOP)
            if self.wakes_s is not None:
                self.timer = threading.Timer(self.wakes_s, os.kill, (server.pid, CONTINUE))
                self.timer.start()


def stopping_job(rank: int, world: int, transport: Any, wakes_s: float | None) -> str:
    """Returns the error's text; empty: there was none."""
    stopper, kept = Stopper(wakes_s), link._LATER_S
    strategy = stale(policy="bsp", transport=transport, timeout=timedelta(seconds=2), liveness_s=0.5)
    trainer = rank_trainer(rank, world, strategy, callbacks=[stopper], max_epochs=1)
    link._LATER_S = 1.0
    try:
        trainer.fit(Toy(), loader(world))
    except ConnectionError as error:
        return str(error)
    finally:
        link._LATER_S = kept
        assert not servers()
        if stopper.timer is not None:
            stopper.timer.join()
    return ""


@ONE
def test_a_server_that_stays_stopped_is_given_up_and_killed(transport: str) -> None:
    for text in run_ranks(2, stopping_job, transport, None):
        assert ("its process is stopped" if transport == "auto" else "it hangs or is stopped") in text


@pytest.mark.parametrize("transport", ["auto", "pairs"])
def test_a_server_that_is_woken_in_time_goes_on(transport: str) -> None:
    assert run_ranks(2, stopping_job, transport, 1.0) == ["", ""]


def terminated_job(rank: int, world: int, transport: Any) -> float:
    """All ranks are told to end while the server hangs, and the timeout is torch's."""
    trainer = rank_trainer(rank, world, stale(policy="bsp", transport=transport), max_epochs=4)
    told_s: list[float] = []

    def tell() -> None:
        while not Path("hangs").exists():
            time.sleep(0.02)
        told_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    teller, kept = threading.Thread(target=tell), session._LAST_S
    teller.start()
    session._LAST_S = 1.0
    try:
        with pytest.raises((SIGTERMException, ConnectionError)):
            trainer.fit(Hangs(), loader(world))
    finally:
        session._LAST_S = kept
        teller.join()
    assert not servers()
    return time.monotonic() - told_s[0]


@ONE
def test_ranks_that_are_told_to_end_do_so_soon_although_the_server_hangs(transport: str) -> None:
    assert max(run_ranks(3, terminated_job, transport)) < 30.0
