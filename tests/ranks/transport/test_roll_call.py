"""Ranks that meet in a store: threads for processes, over a real store; who is lost is simulated by `vanish`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError, ServerLostError
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall, Roll, RollCall
from lightning_hetero.transport.store import host_store

pytestmark = pytest.mark.ranks

LIVENESS_S = 1.0


class Crew:
    """Rank 0 as host and guests."""

    def __init__(self, ranks: int = 3, *, patience_s: float = 60.0, least: int = 1) -> None:
        self.store: TCPStore | None = host_store("127.0.0.1", timedelta(seconds=20))
        self.port, self.patience_s = self.store.port, patience_s
        everybody = dict.fromkeys(range(ranks), 0)
        self.host = HostRollCall(
            self.store, 0, everybody, liveness_s=LIVENESS_S, patience_s=patience_s, least=least
        )
        self.guests = {rank: self.guest(rank, everybody) for rank in range(1, ranks)}

    def guest(self, rank: int, ranks: dict[int, int], met: int = 0) -> GuestRollCall:
        return GuestRollCall(
            "127.0.0.1", self.port, rank, ranks, liveness_s=LIVENESS_S, patience_s=self.patience_s, met=met
        )

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
        self.host.close()
        self.store = None


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


def test_all_are_told_the_same(crew: Crew) -> None:
    told = crew.meet([0, 1, 2])
    assert [*told.values()] == [Roll((0, 1, 2), True, ())] * 3
    told = crew.meet([0, 1, 2], sound=lambda rank: rank != 2)
    assert [one.sound for one in told.values()] == [False] * 3  # one for whom it has not worked is enough
    assert crew.meet([0, 1, 2])[1].sound and crew.host.meetings == crew.guests[1].meetings == 3


def test_nothing_piles_up_in_the_store(crew: Crew) -> None:
    assert crew.store is not None
    crew.meet([0, 1, 2])
    keys = crew.store.num_keys()
    for _ in range(5):
        crew.meet([0, 1, 2])
    assert crew.store.num_keys() == keys


def test_one_that_is_silent_is_left_out_in_time_and_the_others_go_on(crew: Crew) -> None:
    crew.meet([0, 1, 2])
    crew.guests[2].vanish()
    started_s = time.monotonic()
    told = crew.meet([0, 1])
    assert LIVENESS_S / 2 < time.monotonic() - started_s < LIVENESS_S + 5.0
    assert told[0] == told[1] and told[0].present == (0, 1) and told[0].sound
    ((rank, why),) = told[1].lost
    assert rank == 2 and "no sign of life for 1 s" in why
    assert crew.meet([0, 1])[1] == Roll((0, 1), True, ()) and crew.guests[1].ranks == (0, 1)


def test_one_that_takes_long_and_lives_is_waited_for(crew: Crew) -> None:
    late = threading.Timer(2 * LIVENESS_S, lambda: crew.guests[2].meet("x"))
    late.start()
    assert crew.meet([0, 1])[1].present == (0, 1, 2)
    late.join()


def test_one_that_lives_and_does_not_come_is_not_waited_for_ever() -> None:
    crew = Crew(patience_s=0.3)
    try:
        ((rank, why),) = crew.meet([0, 1])[0].lost
        assert rank == 2 and "it did not come to where the others met, for 0.3 s" in why
        with pytest.raises(LeftBehindError, match=r"the others have gone on without rank 2 \(it did not come"):
            crew.guests[2].meet("x")
        crew.guests[2].fail("rank 2 failed: LeftBehindError")  # which is no reason for the others to end
        assert crew.meet([0, 1])[0].present == (0, 1)
    finally:
        crew.close()


def test_who_comes_again_is_another_one_than_who_was_lost(crew: Crew) -> None:
    crew.guests[2].vanish()
    crew.meet([0, 1])
    for roll in (crew.host, crew.guests[1]):
        roll.expect(2)
    lost, crew.guests[2] = crew.guests[2], crew.guest(2, {0: 0, 1: 0, 2: 1}, met=1)
    assert crew.meet([0, 1, 2])[2].present == (0, 1, 2)
    crew.guests[2].vanish()
    assert crew.meet([0, 1])[0].lost[0][0] == 2
    del lost


def test_too_few_left_end_the_run_for_all() -> None:
    crew = Crew(least=3)
    try:
        crew.guests[2].vanish()
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
    roll = crew.all([failed])[failed]
    roll.fail(f"rank {failed} failed: ValueError: the cause")
    roll.close()
    others = [rank for rank in range(3) if rank != failed]
    for error in crew.meet(others).values():
        assert isinstance(error, RemoteFailureError) and "ValueError: the cause" in str(error)


def test_without_the_host_all_end(crew: Crew) -> None:
    crew.meet([0, 1, 2])
    crew.store = crew.host._store = None  # as its process, the store is gone
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
    monkeypatch.setattr(crew.guests[1], "_look", lambda _: held.wait(20.0))  # as a store that does not answer
    try:
        (error,) = crew.meet([1]).values()
        assert isinstance(error, ServerLostError) and "no sign of life for 1 s" in str(error)
    finally:
        held.set()
