"""Ranks that meet in a store: threads for processes, over a real store; who is lost gives no more signs of life."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError, ServerLostError
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall, RollCall
from lightning_hetero.transport.run_store import RunStore, SignedStore, StoreAddress, host_store
from tests.ranks.transport.kit import run_script

pytestmark = pytest.mark.ranks

LIVENESS_S = 1.0


class Crew:
    """Rank 0 as host and guests."""

    def __init__(self, ranks: int = 3, *, patience_s: float = 60.0, least: int = 1) -> None:
        self.raw: TCPStore | None = host_store("127.0.0.1", timedelta(seconds=20))
        self.address = StoreAddress("127.0.0.1", self.raw.port, rank=0, secret="00" * 32)
        self.patience_s, everybody = patience_s, dict.fromkeys(range(ranks), 0)
        self.store = RunStore.join(self.address, timedelta(seconds=20), self.raw)
        self.boards = {0: FailureBoard(self.store, 0)}
        self.host = HostRollCall(
            self.store, 0, everybody, liveness_s=LIVENESS_S, patience_s=patience_s, least=least,
            check=self.boards[0].check,
        )  # fmt: skip
        self.guests = {rank: self.guest(rank, everybody) for rank in range(1, ranks)}

    def guest(self, rank: int, ranks: dict[int, int], met: int = 0) -> GuestRollCall:
        store = RunStore.join(self.address, timedelta(seconds=20))
        self.boards[rank] = FailureBoard(store, rank)
        return GuestRollCall(
            store, rank, ranks, liveness_s=LIVENESS_S, patience_s=self.patience_s, met=met,
            check=self.boards[rank].check,
        )  # fmt: skip

    def all(self, ranks: Sequence[int]) -> dict[int, RollCall]:
        return {rank: self.host if rank == 0 else self.guests[rank] for rank in ranks}

    def meet(self, ranks: Sequence[int], what: Callable[[int], str] = lambda rank: "x", **said: Any) -> dict[int, Any]:
        """All of these come, in threads; returns what each is told, or its error."""
        told: dict[int, Any] = {}

        def come(rank: int, roll: RollCall) -> None:
            try:
                told[rank] = roll.meet(what(rank), **{name: value(rank) for name, value in said.items()})
            except (RuntimeError, OSError) as error:
                told[rank] = error

        threads = [threading.Thread(target=come, args=one) for one in self.all(ranks).items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert sorted(told) == sorted(ranks)
        return told

    def close(self) -> None:
        for guest in self.guests.values():
            guest.close()
        self.host.close(well=True)
        self.store.let_go()
        self.raw = None


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


def test_all_are_told_the_same(crew: Crew) -> None:
    told = crew.meet([0, 1, 2])
    assert [*told.values()] == [Met((0, 1, 2))] * 3
    told = crew.meet([0, 1, 2], sound=lambda rank: rank != 2)
    assert [one.sound for one in told.values()] == [False] * 3  # one for whom it has not worked is enough
    assert crew.meet([0, 1, 2])[1].sound and crew.host.meetings == crew.guests[1].meetings == 3


def test_nothing_piles_up_in_the_store(crew: Crew) -> None:
    assert crew.raw is not None
    crew.meet([0, 1, 2])
    keys = crew.raw.num_keys()
    for _ in range(5):
        crew.meet([0, 1, 2])
    assert crew.raw.num_keys() <= keys + 1  # a guest may still be about to remove the last meeting's


def test_one_that_is_silent_is_left_out_in_time_and_the_others_go_on(crew: Crew) -> None:
    crew.meet([0, 1, 2])
    crew.guests[2]._left.set()
    started_s = time.monotonic()
    told = crew.meet([0, 1])
    assert LIVENESS_S / 2 < time.monotonic() - started_s < LIVENESS_S + 5.0
    assert told[0] == told[1] and told[0].alive == (0, 1) and told[0].sound
    (notice,) = told[1].notices
    assert notice.startswith("rank 2 is left out (no sign of life for 1 s: ") and "without it, 2 ranks" in notice
    assert crew.meet([0, 1])[1] == Met((0, 1)) and crew.guests[1].alive() == {0, 1}


def test_one_that_takes_long_and_lives_is_waited_for(crew: Crew) -> None:
    late = threading.Timer(2 * LIVENESS_S, lambda: crew.guests[2].meet("x"))
    late.start()
    assert crew.meet([0, 1])[1].alive == (0, 1, 2)
    late.join()


def test_one_that_lives_and_does_not_come_is_not_waited_for_ever() -> None:
    crew = Crew(patience_s=0.3)
    try:
        (notice,) = crew.meet([0, 1])[0].notices
        assert "rank 2 is left out (it did not come to where the others met, for 0.3 s" in notice
        with pytest.raises(LeftBehindError, match=r"the others have gone on without rank 2 \(it did not come"):
            crew.guests[2].meet("x")
        assert crew.meet([0, 1])[0].alive == (0, 1)
    finally:
        crew.close()


def test_who_comes_again_is_another_one_than_who_was_lost(crew: Crew) -> None:
    crew.guests[2]._left.set()
    crew.meet([0, 1])
    for roll in (crew.host, crew.guests[1]):
        roll.expect([2])
    lost, crew.guests[2] = crew.guests[2], crew.guest(2, {0: 0, 1: 0, 2: 1}, met=1)
    assert crew.meet([0, 1, 2])[2].alive == (0, 1, 2)
    crew.guests[2]._left.set()
    assert "rank 2 is left out" in crew.meet([0, 1])[0].notices[0]
    lost.close()


def test_too_few_left_end_the_run_for_all() -> None:
    crew = Crew(least=3)
    try:
        crew.guests[2]._left.set()
        for error in crew.meet([0, 1]).values():
            assert isinstance(error, RemoteFailureError)
            assert "2 ranks are left, and min_clients=3 must be (rank 2: no sign of life" in str(error)
    finally:
        crew.close()


def test_ranks_that_meet_for_different_reasons_are_all_told(crew: Crew) -> None:
    for error in crew.meet([0, 1, 2], what=lambda rank: "reduce" if rank == 1 else "barrier").values():
        assert isinstance(error, RemoteFailureError)
        assert "ranks meet for different reasons: {0: 'barrier', 1: 'reduce', 2: 'barrier'}" in str(error)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_tells_the_others_why(crew: Crew, failed: int) -> None:
    crew.meet([0, 1, 2])
    crew.boards[failed].report(ValueError("the cause"))
    others = [rank for rank in range(3) if rank != failed]
    for error in crew.meet(others).values():
        assert isinstance(error, RuntimeError) and f"rank {failed} failed: ValueError: the cause" in str(error)


def test_a_rank_whose_connection_ends_with_its_failure_is_not_left_out(crew: Crew) -> None:
    crew.meet([0, 1, 2])
    while crew.guests[1]._line is None:
        time.sleep(0.01)
    crew.host._check_s = math.inf  # the host has just looked, before rank 1 failed
    crew.boards[1].report(ValueError("the cause"))
    crew.guests[1].close()
    for error in crew.meet([0, 2]).values():
        assert isinstance(error, RuntimeError) and "rank 1 failed: ValueError: the cause" in str(error)


def test_without_the_host_all_end(crew: Crew) -> None:
    crew.meet([0, 1, 2])
    crew.store.let_go()  # as its process, the store is gone
    crew.raw = None
    gc.collect()
    for error in crew.meet([1, 2]).values():
        assert isinstance(error, ServerLostError) and "rank 0, without which the others cannot go on" in str(error)


def test_a_host_that_lives_and_does_not_come_is_not_waited_for_ever() -> None:
    crew = Crew(patience_s=0.2)
    try:
        (error,) = crew.meet([1]).values()
        assert isinstance(error, ServerLostError) and "it did not come to where the others met, for 0.4 s" in str(error)
    finally:
        crew.close()


def test_a_host_that_is_silent_is_not_waited_for_ever(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.meet([0, 1, 2])
    held = threading.Event()
    monkeypatch.setattr(SignedStore, "get", lambda *_: held.wait(20.0))  # as a store that does not answer
    try:
        (error,) = crew.meet([1]).values()
        assert isinstance(error, ServerLostError) and "has not answered for 1 s" in str(error)
    finally:
        held.set()


def test_who_wakes_when_the_others_have_finished_is_told_so(crew: Crew) -> None:
    """And not that rank 0 has died, though its process is gone."""
    crew.meet([0, 1, 2])
    crew.guests[2]._left.set()
    crew.meet([0, 1])
    crew.host.close(well=True)
    crew.store.let_go()
    crew.raw = None
    gc.collect()
    with pytest.raises(LeftBehindError, match="have finished training without rank 2, of which they had not heard"):
        crew.guests[2].meet("x")


SUSPENDED = """
import json, multiprocessing as mp, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall
from lightning_hetero.transport.run_store import RunStore, StoreAddress
from lightning_hetero.transport.run_store import host_store

LIVENESS_S, ROUNDS = 1.0, 12
os.setsid()

def main(rank, pipe):
    waits = {"liveness_s": LIVENESS_S, "patience_s": 2.0, "check": lambda: None}
    if rank == 0:
        hosted = host_store("127.0.0.1", timedelta(seconds=20))
        address = StoreAddress("127.0.0.1", hosted.port, 0, "00" * 32)
        for _ in range(2): pipe[1].send(address)
        roll = HostRollCall(RunStore.join(address, timedelta(seconds=20), hosted), 0, range(3), least=1, **waits)
    else:
        store = RunStore.join(pipe[0].recv(), timedelta(seconds=20))
        roll = GuestRollCall(store, rank, dict.fromkeys(range(3), 0), **waits)
    said = []
    for i in range(ROUNDS):
        met = roll.meet(f"round {i}")
        said.append([*met.alive, met.sound])
        Path(f"at {i} {rank}").touch()
        time.sleep(0.1)
    Path(f"rank{rank}.json").write_text(json.dumps(said))
    roll.close(well=True)
    time.sleep(0.5 if rank == 0 else 0.0)

pipe = mp.Pipe()
ranks = [mp.get_context("fork").Process(target=main, args=(rank, pipe)) for rank in range(3)]
for rank in ranks: rank.start()
while not Path("at 3 1").exists(): time.sleep(0.01)
for rank in ranks: os.kill(rank.pid, signal.SIGSTOP)
time.sleep(4 * LIVENESS_S)  # longer than both limits
for rank in (1, 0, 2):  # a guest first: the host does not answer it yet
    os.kill(ranks[rank].pid, signal.SIGCONT)
    time.sleep(0.3)
for rank in ranks: rank.join()
"""


def test_a_job_that_is_suspended_as_a_whole_goes_on_as_a_whole(tmp_path: Path) -> None:
    run_script(SUSPENDED, tmp_path, within_s=60)
    for rank in range(3):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == [[0, 1, 2, True]] * 12, (tmp_path / "said").read_text()
