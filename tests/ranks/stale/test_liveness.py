"""Whom the server waits for, and how long: in one process, with times that are passed in."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from lightning_hetero.stale.decide.policy import Bsp
from lightning_hetero.stale.runtime.serve.server import ParameterServer
from lightning_hetero.stale.runtime.start import serve
from lightning_hetero.transport.awake import AwakeClock
from lightning_hetero.transport.base import Alive, Arrived, Ask, Gone, Happened, Joined, Reply, Request, Say
from lightning_hetero.transport.membership import Limits
from tests.ranks.stale.kit import Setting
from tests.ranks.stale.reference import mlp, sgd


class Board:
    """A listener that keeps what the server answers."""

    def __init__(self) -> None:
        self.replies: dict[int, list[Reply]] = {}
        self.dismissed: dict[int, str] = {}
        self.coming: list[list[Happened]] = []

    def events(self, timeout_s: float) -> list[Happened]:
        return self.coming.pop(0) if self.coming else []

    def reply(self, rank: int, reply: Reply) -> None:
        self.replies.setdefault(rank, []).append(reply)

    def gradient(self, rank: int, slot: int) -> Tensor:
        raise NotImplementedError

    def publish(self, version: int, parameters: Tensor) -> None: ...

    def share_state(self, data: bytes) -> None: ...

    def dismiss(self, rank: int, reason: str) -> None:
        self.dismissed[rank] = reason

    def close(self) -> None: ...

    def met(self, rank: int) -> tuple[int, ...]:
        """Who lived when that rank's last meeting was over; () while it waits."""
        last = self.replies.get(rank, [Reply(kind=Say.DONE)])[-1]
        return tuple(last.numbers) if last.kind is Say.MET else ()


def opened(workers: int, *connected: int, **limits: float) -> tuple[ParameterServer, Board]:
    """A server to which some of its workers have connected, at 0 s."""
    board = Board()
    server = Setting(mlp(), sgd, Bsp(), workers, limits=Limits(**limits)).serve_on(board)
    for rank in connected:
        server.handle(Joined(rank), 0.0)
    return server, board


def meets(rank: int, number: int = 1) -> Arrived:
    return Arrived(rank, Request(kind=Ask.MEET, global_step=number, text="epoch ends"))


def let_pass(server: ParameterServer, until_s: float) -> None:
    """Wakes the server as it wants to be."""
    for _ in range(100):
        if (due_s := server.wake_s()) > until_s:
            return
        server.wake(due_s)
    raise AssertionError("it spins")


def live(server: ParameterServer, *ranks: int, start_s: float, until_s: float) -> None:
    """Has ranks give a sign of life every 5 s."""
    at_s = start_s
    while at_s <= until_s:
        let_pass(server, at_s)
        for rank in ranks:
            server.handle(Alive(rank), at_s)
        at_s += 5.0
    let_pass(server, until_s)


# ---- one that never connects ----------------------------------------------------------------------------------


def test_a_rank_that_never_connects_is_given_up_with_the_cause() -> None:
    server, board = opened(3, 0, 1, connect_s=90.0)
    for rank in (0, 1):
        server.handle(meets(rank), 1.0)
    let_pass(server, 89.0)
    assert board.met(0) == ()
    let_pass(server, 90.0)
    assert board.met(0) == board.met(1) == (0, 1)
    (told,) = {text for rank in (0, 1) for text in [board.replies[rank][-1].text] if "rank 2 was left" in text}
    assert "it did not connect within 90 s: killed before, or a firewall" in told
    assert server.coordinator.live == {0, 1} and not server.finished


def test_a_server_that_was_stopped_hears_who_came_meanwhile_before_it_gives_anybody_up() -> None:
    server, board = opened(2, 0, connect_s=90.0)
    told: list[tuple[float, list[Happened]]] = [
        (1.0, [meets(0)]), (500.0, []), (500.1, [Joined(1)]), (500.2, [meets(1)]), (501.0, [Gone(0), Gone(1)])
    ]  # 410 s late: the machine stood still
    now, clock = [0.0], AwakeClock()

    def events(timeout_s: float | None) -> list[Happened]:
        if timeout_s == 0.0:
            return []
        now[0], happened = told.pop(0)
        return happened

    board.events = events  # type: ignore[method-assign]
    serve(server, board, lambda: clock.at(now[0]))
    assert board.met(0) == board.met(1) == (0, 1) and server.wake_s() == math.inf


# ---- two that die together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", [[[2, 3]], [[2], [3]]], ids=["seen at once", "seen one after the other"])
def test_of_two_that_die_together_neither_is_met(deaths: list[list[int]]) -> None:
    """Rank 3 had come to the meeting, which waited for rank 2 only."""
    board = Board()
    server = Setting(mlp(), sgd, Bsp(), 4).serve_on(board)
    board.coming = [[Joined(rank) for rank in range(4)], [meets(0), meets(1), meets(3)]]
    board.coming += [[Gone(rank, "killed") for rank in dying] for dying in deaths]
    board.coming += [[], [Gone(0, "ends"), Gone(1, "ends")]]
    serve(server, board, lambda: 0.0)
    assert board.met(0) == board.met(1) == (0, 1) and board.met(3) == ()


# ---- one that is connected and silent -------------------------------------------------------------------------


def test_a_meeting_waits_for_a_silent_rank_as_long_as_is_said_and_tells_it() -> None:
    server, board = opened(3, 0, 1, 2, silence_s=60.0)
    server.handle(Alive(2), 20.0)
    for rank in (0, 1):
        server.handle(meets(rank), 30.0)
    live(server, 0, 1, start_s=35.0, until_s=79.0)
    assert board.met(0) == () and board.dismissed == {}
    live(server, 0, 1, start_s=80.0, until_s=80.0)
    assert board.met(0) == board.met(1) == (0, 1)
    assert "rank 2 was left behind (no sign of life for 60 s" in board.replies[0][-1].text
    assert board.dismissed.keys() == {2} and "rank 2 was left behind: no sign of life" in board.dismissed[2]
    server.handle(Gone(2, "left behind"), 80.1)  # its connection
    assert server.coordinator.live == {0, 1} and not server.finished


def test_a_rank_that_shows_life_is_waited_for() -> None:
    server, board = opened(2, 0, 1, silence_s=60.0)
    server.handle(meets(0), 1.0)
    live(server, 0, 1, start_s=5.0, until_s=999.0)
    server.handle(meets(1), 1000.0)
    let_pass(server, 1000.0)
    assert board.met(0) == (0, 1) and board.dismissed == {}


def test_after_a_long_stop_of_the_server_it_hears_who_lives_before_it_gives_anybody_up() -> None:
    server, board = opened(2, 0, 1, silence_s=60.0)
    server.handle(meets(0), 1.0)
    server.handle(Alive(0), 10_000.0)
    server.wake(10_000.0)
    server.handle(Alive(1), 10_001.0)
    live(server, 0, start_s=10_005.0, until_s=10_060.0)
    assert board.met(0) == ()
    live(server, 0, start_s=10_061.0, until_s=10_061.0)
    assert board.met(0) == (0,)


def test_a_rank_that_falls_silent_after_it_has_come_is_not_met() -> None:
    """The others would wait for it in the collective after the meeting, where no death is survived."""
    server, board = opened(3, 0, 1, 2, silence_s=60.0)
    for rank in (0, 2):
        server.handle(meets(rank), 1.0)
    live(server, 0, 1, start_s=5.0, until_s=50.0)
    server.handle(meets(1), 52.0)
    live(server, 0, 1, start_s=52.0, until_s=60.9)
    assert board.met(0) == ()
    live(server, 0, 1, start_s=61.0, until_s=61.0)
    assert board.met(0) == board.met(1) == (0, 1) and board.dismissed.keys() == {2}


def test_a_rank_that_was_silent_for_a_while_is_met_when_it_shows_life() -> None:
    server, board = opened(3, 0, 1, 2, silence_s=60.0)
    for rank in (0, 2):
        server.handle(meets(rank), 1.0)
    live(server, 0, 1, start_s=5.0, until_s=50.0)
    server.handle(meets(1), 50.0)
    let_pass(server, 50.0)
    assert board.met(0) == () and server.wake_s() > 50.0
    live(server, 2, start_s=51.0, until_s=51.0)
    server.wake(51.0)
    assert board.met(0) == board.met(1) == board.met(2) == (0, 1, 2) and board.dismissed == {}


def test_a_job_that_is_suspended_as_a_whole_goes_on_as_a_whole() -> None:
    """Ctrl-Z stops the ranks, and not the server, which leads a session of its own."""
    server, board = opened(2, 0, 1, silence_s=60.0)
    server.handle(meets(0), 1.0)
    live(server, 0, 1, start_s=5.0, until_s=20.0)
    let_pass(server, 5000.0)
    server.handle(Alive(0), 5000.0)  # the first one to wake
    server.wake(5000.0)
    let_pass(server, 5002.0)
    server.handle(Alive(1), 5002.0)
    server.handle(meets(1), 5003.0)
    let_pass(server, 5003.0)
    assert board.met(0) == (0, 1) and board.dismissed == {}


def test_a_rank_that_lives_and_does_not_come_is_waited_for_as_long_as_for_a_collective() -> None:
    server, board = opened(2, 0, 1, silence_s=60.0, meeting_s=1800.0)
    server.handle(meets(0), 10.0)
    live(server, 0, 1, start_s=15.0, until_s=1809.0)
    assert board.met(0) == ()
    live(server, 0, 1, start_s=1810.0, until_s=1810.0)
    assert board.met(0) == (0,)
    assert "did not come to where the others met, for 1800 s" in board.dismissed[1]


def test_who_comes_to_a_meeting_that_is_over_is_told_and_holds_up_nobody() -> None:
    """It was taken for dead before it had connected; a joining rank knows how often the others have met."""
    server, board = opened(3, 0, 1, connect_s=90.0)
    for rank in (0, 1):
        server.handle(meets(rank), 1.0)
    let_pass(server, 90.0)
    assert board.met(0) == (0, 1)
    server.handle(Joined(2), 200.0)
    for rank in (0, 1):
        server.handle(meets(rank, 2), 201.0)
    server.handle(meets(2, 1), 202.0)
    server.wake(202.0)
    assert board.met(0) == board.met(1) == (0, 1) and "meeting that was over" in board.dismissed[2]
    server.handle(Gone(2), 202.0)
    server.handle(Joined(2), 203.0)
    for rank in (0, 1, 2):
        server.handle(meets(rank, 3), 204.0)
    server.wake(204.0)
    assert board.met(0) == board.met(2) == (0, 1, 2)


def orphaned_server(told: list[list[Happened]], times_s: list[float]) -> tuple[ParameterServer, Board]:
    """Has a server without its rank 0 serve; ``times_s`` are what its clock says when events come in."""
    server, board = opened(3, 0, 1, 2, silence_s=60.0)
    server.handle(Gone(0, "killed"), 1.0)
    clock = iter(times_s)
    now, awake = [1.0], AwakeClock(beat_s=1.0)
    board.coming = told

    def events(timeout_s: float) -> list[Happened]:
        assert timeout_s <= 1.0, "it would not look whether anybody lives"
        now[0] = next(clock, math.inf)
        assert math.isfinite(now[0]), "it waits for ever"
        return board.coming.pop(0) if board.coming else []

    board.events = events  # type: ignore[method-assign]
    serve(server, board, lambda: awake.at(now[0]), orphaned=lambda: True)
    return server, board


def test_without_its_rank_a_server_does_not_wait_for_ever_for_ranks_that_are_silent() -> None:
    """Rank 0 was killed, the others are stopped; nobody is left who could say so at a meeting."""
    _, board = orphaned_server([[Alive(1)], [Alive(2)]], [5.0, 6.0, *(6.0 + i for i in range(1, 62))])
    assert board.dismissed.keys() == {1, 2}
    assert "rank 0 is gone, and no rank gave a sign of life" in board.dismissed[1]


def test_without_its_rank_a_server_that_was_stopped_itself_hears_first_who_lives() -> None:
    told: list[list[Happened]] = [[Alive(1)], [], [], [Alive(1)], [Gone(1), Gone(2)]]
    _, board = orphaned_server(told, [5.0, 5000.0, 5001.0, 5002.0, 5010.0])
    assert board.dismissed == {}


# ---- one that is late -----------------------------------------------------------------------------------------


def test_a_rank_that_connects_when_the_run_has_failed_hears_the_cause() -> None:
    """And not that there is no server: that waits for it, although its own rank is gone."""
    board = Board()
    server = Setting(mlp(), sgd, Bsp(), 2, limits=Limits(connect_s=90.0)).serve_on(board)
    board.coming = [
        [Joined(0), Arrived(0, Request(kind=Ask.ABORT, text="rank 0 failed: the cause")), Gone(0)],
        [],
        [Joined(1), Arrived(1, Request(kind=Ask.EPOCH, epoch=0, numbers=[4]))],
        [Gone(1)],
    ]
    serve(server, board, lambda: 1.0, orphaned=lambda: bool(board.replies))
    (told,) = board.replies[1]
    assert told.kind is Say.FAILED and "the cause" in told.text and server.finished


def test_a_failed_server_waits_for_nobody_longer_than_is_said() -> None:
    server, _ = opened(2, 0, connect_s=90.0)
    server.handle(Arrived(0, Request(kind=Ask.ABORT, text="the cause")), 1.0)
    server.handle(Gone(0), 1.0)
    let_pass(server, 89.0)
    assert not server.finished
    let_pass(server, 90.0)
    assert server.finished


def test_without_its_rank_a_server_that_nobody_knows_ends() -> None:
    server = Setting(mlp(), sgd, Bsp(), 2, limits=Limits(connect_s=90.0)).serve_on(Board())
    serve(server, Board(), lambda: 1.0, orphaned=lambda: True)
    assert not server.finished
