"""Conformance: what every transport between workers and server promises, on both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from lightning_hetero.transport import link as link_module
from lightning_hetero.transport.base import (
    Alive,
    Arrived,
    Ask,
    Gone,
    Joined,
    LeftBehindError,
    Reply,
    Request,
    Say,
    ServerLostError,
    TornSlotError,
)
from lightning_hetero.transport.link import WorkerLink
from lightning_hetero.transport.progress import STEPS, WAITS
from lightning_hetero.transport.pulse import Pulse
from tests.ranks.transport.kit import CONTINUE, DONE, KINDS, PATIENCE_S, STOP, Place, open_place

REQUEST = Request(
    kind=Ask.PUSH, epoch=3, global_step=70_000, substep=2, assignment=9, samples=4, weight=2.5, compute_s=0.125,
    flags=3,
    steps=1, zeroes=2, slot=1 << 40, numbers=tuple(range(-5, 20_000)), text="Größe \N{GREEK SMALL LETTER PI}",
)  # fmt: skip
REPLY = Reply(
    kind=Say.ASSIGNED, epoch=3, global_step=70_001, version=1 << 40, assignment=10, micro=4, hint_start=5,
    hint_end=1 << 33,
    flags=1, numbers=(1, -2, 1 << 62), text="go on",
)  # fmt: skip


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with open_place(request.param) as opened:
        yield opened


def push(link: WorkerLink, value: int) -> int:
    """Writes a slot full of ``value``."""
    link.open_slot()
    link.gradient.fill_(value)
    return link.close_slot()


def lost(link: WorkerLink, request: Request | None = None) -> str:
    """Returns the message of the ServerLostError which a call must raise, now and ever after."""
    with pytest.raises(ServerLostError):
        link.call(request or Request(kind=Ask.MEET))
    with pytest.raises(ServerLostError) as caught:
        link.call(Request(kind=Ask.MEET))
    return str(caught.value)


def told(place: Place, rank: int, answer: Callable[[Arrived], Reply] = lambda _: DONE) -> list[Any]:
    """Waits for the news of a worker's end; answers all others meanwhile."""
    started = time.monotonic()
    seen = place.until(Gone(rank), answer=answer)
    assert time.monotonic() - started < 5.0
    return [event for event in seen if isinstance(event, Gone)]


# ---- requests and replies ---------------------------------------------------------------------------------


def echo(link: WorkerLink, talk: Connection, request: Request) -> Reply:
    return link.call(request)


@pytest.mark.parametrize("request_", [REQUEST, Request(kind=Ask.CLAIM)], ids=["full", "bare"])
@pytest.mark.parametrize("reply", [REPLY, DONE], ids=["full", "bare"])
def test_every_field_and_payload_travels_both_ways(place: Place, request_: Request, reply: Reply) -> None:
    crew = place.start(1, echo, request_)
    seen = place.until(Arrived, answer=lambda _: reply)
    assert seen == [Joined(1), Arrived(1, request_)]
    assert crew.result() == reply


def two_calls(link: WorkerLink, talk: Connection) -> list[int]:
    return [link.call(Request(kind=Ask.CLAIM, global_step=global_step)).global_step for global_step in (1, 2)]


def test_a_reply_may_come_much_later_and_out_of_turn(place: Place) -> None:
    held = place.start(0, two_calls)
    place.until(Joined(0), Arrived)
    other = place.start(1, two_calls)
    place.until(Arrived(1, Request(kind=Ask.CLAIM, global_step=1)))
    place.listener.reply(1, Reply(kind=Say.ASSIGNED, global_step=11))
    place.until(Arrived(1, Request(kind=Ask.CLAIM, global_step=2)))
    place.listener.reply(0, Reply(kind=Say.ASSIGNED, global_step=1))
    place.until(Arrived(0, Request(kind=Ask.CLAIM, global_step=2)))
    place.listener.reply(0, Reply(kind=Say.ASSIGNED, global_step=2))
    place.listener.reply(1, Reply(kind=Say.ASSIGNED, global_step=12))
    assert held.result() == [1, 2] and other.result() == [11, 12]


def call_in_vain(link: Any, talk: Connection) -> tuple[str, str]:
    link._patience_s = 0.5 - link_module._LATER_S
    with pytest.raises(ServerLostError) as caught:
        link.call(Request(kind=Ask.CLAIM))
    return str(caught.value), lost(link)


def test_a_server_that_shows_no_progress_is_given_up(place: Place) -> None:
    crew = place.start(0, call_in_vain)
    place.until(Joined(0), Arrived)
    place.listener.memory.parameters.stamp(STEPS, 2)
    assert crew.talk.poll(PATIENCE_S)
    text, again = crew.result()
    assert again == text
    if place.kind == "wire":
        assert "answered nothing for" in text
    else:
        assert "has been in the step of optimizer 2 for" in text and "it hangs (rank 0 asked for CLAIM)" in text
    place.until(Gone(0))
    place.listener.reply(0, DONE)  # too late: ignored


def held(link: Any, talk: Connection) -> float:
    """Is answered late, and returns how long it has waited; then it will not wait any longer."""
    beats: list[float] = []
    link._patience_s, link.waits = 1.0 - link_module._LATER_S, beats.append
    link.call(Request(kind=Ask.CLAIM))

    def ends(waited_s: float) -> None:
        raise KeyboardInterrupt

    link.waits = ends
    with pytest.raises(KeyboardInterrupt):
        link.call(Request(kind=Ask.CLAIM))
    assert "interrupted" in lost(link)
    return max(beats)


def test_a_server_that_goes_on_is_waited_for_unless_the_worker_must_end(place: Place) -> None:
    crew = place.start(0, held)
    place.until(Joined(0), Arrived)
    end_s = time.monotonic() + 1.8
    while time.monotonic() < end_s:
        place.listener.memory.parameters.stamp(WAITS, 0)
        place.listener.events(0.1)
    place.listener.reply(0, DONE)
    place.until(Arrived)
    assert crew.result() > 1.0  # for longer than its patience
    assert place.until(Gone(0))


def ends_with_it(link: WorkerLink, talk: Connection) -> str:
    """Hears what the server's watch says, whatever it does meanwhile."""
    link.open_slot()
    talk.recv()
    return link.call(Request(kind=Ask.PUSH, slot=link.close_slot())).text


def test_a_server_that_hangs_tells_its_workers_with_its_last_words(place: Place) -> None:
    crews = [place.start(rank, ends_with_it) for rank in (0, 1)]
    place.until(Joined(0), Joined(1))
    place.listener.memory.parameters.stamp(Ask.PUSH, 1)
    said = place.listener.hangs(7.4)
    assert said.endswith("has been serving PUSH of rank 1 for 7 s: it hangs")
    for crew in crews:
        crew.talk.send("go on")
    assert [crew.result() for crew in crews] == [said, said]


def test_events_wait_no_longer_than_asked(place: Place) -> None:
    started = time.monotonic()
    assert place.listener.events(0.0) == [] and place.listener.events(0.05) == []
    assert 0.05 <= time.monotonic() - started < 5.0


# ---- slots ------------------------------------------------------------------------------------------------


def write_in_parts(link: WorkerLink, talk: Connection) -> None:
    size = link.gradient.numel()
    pattern = torch.arange(size) % 251
    for push_number in range(3):
        link.open_slot()
        for start in range(size - 1000, -1, -2000):  # backwards, with gaps, some of them tiny
            link.gradient[start : start + 1000] = (pattern[start : start + 1000] + push_number).to(torch.uint8)
            link.ready(start, start + 1000)
        for start in range(size - 1000, -1, -2000):
            before = max(0, start - 1000)
            link.gradient[before:start] = (pattern[before:start] + push_number).to(torch.uint8)
        link.gradient[:100] = 7  # changed after all
        link.ready(0, 100)
        assert link.call(Request(kind=Ask.PUSH, slot=link.close_slot())).kind == Say.DONE


def test_the_server_reads_what_the_worker_wrote(place: Place) -> None:
    crew = place.start(1, write_in_parts)
    numbers = []
    for push_number in range(3):
        arrived = place.arrived()
        slot = place.listener.gradient(1, arrived.request.slot)
        expected = (torch.arange(slot.numel()) % 251 + push_number).to(torch.uint8)
        expected[:100] = 7
        assert torch.equal(slot, expected)
        numbers.append(arrived.request.slot)
        place.listener.reply(1, DONE)
    crew.result()
    assert len(set(numbers)) == 3


def half_written(link: WorkerLink, talk: Connection) -> None:
    with pytest.raises(RuntimeError, match="open_slot"):
        link.close_slot()
    link.call(Request(kind=Ask.PUSH, slot=0))
    number = push(link, 1)
    link.open_slot()
    link.call(Request(kind=Ask.PUSH, slot=number))
    link.close_slot()
    link.call(Request(kind=Ask.PUSH, slot=number))
    link.call(Request(kind=Ask.PUSH, slot=push(link, 2)))


def test_a_slot_that_does_not_hold_what_was_announced_is_torn(place: Place) -> None:
    crew = place.start(0, half_written)
    for expected in ("nothing yet", "being written", "holds content", ""):
        arrived = place.arrived()
        if expected:
            with pytest.raises(TornSlotError, match=expected):
                place.listener.gradient(0, arrived.request.slot)
        else:
            assert bool((place.listener.gradient(0, arrived.request.slot) == 2).all())
        place.listener.reply(0, DONE)
    crew.result()


# ---- parameters and state ---------------------------------------------------------------------------------


def hammer(link: WorkerLink, talk: Connection, last: int) -> int:
    """Reads until the last version has come; checks that each one is whole."""
    into = torch.zeros(PARAMETERS, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="published"):
        link.read_parameters(into)
    assert link.newest_version() == -1
    link.call(Request(kind=Ask.MEET))
    reads, newest = 0, -1
    while newest < last:
        known = link.newest_version()
        version = link.read_parameters(into)
        assert version >= max(newest, known), "an older version than before"
        assert bool((into == version % 251).all()), f"version {version} is torn: {into.unique()}"
        assert known <= version <= link.newest_version() <= last
        newest, reads = version, reads + 1
    return reads


PARAMETERS = 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_published_parameters_are_never_torn(kind: str) -> None:
    last = 300
    with open_place(kind, parameter_bytes=PARAMETERS) as place:
        crews = [place.start(rank, hammer, last) for rank in (0, 1)]
        meeting = Request(kind=Ask.MEET)
        place.until(Arrived(0, meeting), Arrived(1, meeting))
        parameters, gone = torch.zeros(PARAMETERS, dtype=torch.uint8), list[Gone]()
        for version in range(last + 1):
            place.listener.publish(version, parameters.fill_(version % 251))
            if version == 0:
                for rank in (0, 1):
                    place.listener.reply(rank, DONE)
            gone += [event for event in place.listener.events(0.0) if isinstance(event, Gone)]
        while len(gone) < 2:
            gone += [event for event in place.listener.events(PATIENCE_S) if isinstance(event, Gone)]
        assert all(crew.result() >= 1 for crew in crews)


def read_state(link: WorkerLink, talk: Connection) -> list[bytes]:
    states = []
    for _ in range(2):
        assert link.call(Request(kind=Ask.STATE)).kind == Say.STATE
        states.append(link.read_state())
    return states


def test_shared_state_is_what_was_shared_last(place: Place) -> None:
    crew = place.start(0, read_state)
    for data in (b"", bytes(range(256)) * 1000):
        place.until(Arrived)
        place.listener.share_state(data)
        place.listener.reply(0, Reply(kind=Say.STATE))
    place.until(Gone(0))
    assert crew.result() == [b"", bytes(range(256)) * 1000]


# ---- coming and going -------------------------------------------------------------------------------------


def talk_until_told(link: WorkerLink, talk: Connection) -> int:
    calls = 0
    while not talk.poll():
        link.call(Request(kind=Ask.CLAIM, global_step=calls))
        calls += 1
    return calls


def open_and_wait(link: WorkerLink, talk: Connection) -> None:
    """Is found in the middle of writing its slot."""
    number = push(link, 5)
    link.open_slot()
    link.gradient[: link.gradient.numel() // 2] = 9
    link.ready(0, link.gradient.numel() // 2)
    talk.send(number)
    talk.recv()


def push_once(link: WorkerLink, talk: Connection, value: int) -> Reply:
    return link.call(Request(kind=Ask.PUSH, slot=push(link, value)))


def test_a_worker_leaves_and_comes_back(place: Place) -> None:
    for value in (1, 2, 3):
        crew = place.start(2, push_once, value)
        seen = place.until(Joined(2), Arrived)
        request = next(event.request for event in seen if isinstance(event, Arrived))
        assert bool((place.listener.gradient(2, request.slot) == value).all())
        place.listener.reply(2, Reply(kind=Say.DONE, version=value))
        assert crew.result().version == value
        assert place.until(Gone(2)) == [Gone(2)]


def test_the_death_of_one_in_the_middle_of_traffic_is_told_at_once_and_disturbs_no_other(place: Place) -> None:
    others = [place.start(rank, talk_until_told) for rank in (0, 1)]
    victim = place.start(2, talk_until_told)
    ticks = [0, 0, 0]

    def answer(event: Arrived) -> Reply:
        ticks[event.rank] = event.request.global_step
        return DONE

    def after(more: int, *ranks: int) -> list[Arrived]:
        return [Arrived(rank, Request(kind=Ask.CLAIM, global_step=ticks[rank] + more)) for rank in ranks]

    place.until(*after(10, 0, 1, 2), answer=answer)
    victim.kill()
    assert told(place, 2, answer) == [Gone(2)]
    place.until(*after(20, 0, 1), answer=answer)
    for crew in others:
        crew.talk.send("stop")
    place.until(Gone(0), Gone(1), answer=answer)
    assert all(crew.result() > 0 for crew in others)


def test_one_killed_while_it_writes_its_slot_leaves_a_torn_slot_and_its_successor_a_whole_one(place: Place) -> None:
    victim = place.start(1, open_and_wait)
    place.until(Joined(1))
    number = victim.says()
    victim.kill()
    assert told(place, 1) == [Gone(1)]
    with pytest.raises(TornSlotError):
        place.listener.gradient(1, number)
    crew = place.start(1, push_once, 3)
    seen = place.until(Joined(1), Arrived)
    request = next(event.request for event in seen if isinstance(event, Arrived))
    assert bool((place.listener.gradient(1, request.slot) == 3).all())
    place.listener.reply(1, DONE)
    crew.result()


def try_in_vain(link: WorkerLink, talk: Connection) -> str:
    raise AssertionError("was let in")


def test_a_second_of_the_same_rank_is_refused_politely(place: Place) -> None:
    first = place.start(1, talk_until_told)
    place.until(Joined(1), Arrived, answer=lambda _: DONE)
    second = place.start(1, try_in_vain)
    while not second.talk.poll():
        for event in place.listener.events(0.1):
            assert isinstance(event, Arrived)
            place.listener.reply(event.rank, DONE)
    kind, said = second.talk.recv()
    assert kind == "raised" and "ConnectionRefusedError" in said and "connected already" in said
    first.talk.send("stop")
    place.until(Gone(1), answer=lambda _: DONE)
    assert first.result() > 0


def called_lost(link: WorkerLink, talk: Connection) -> str:
    return lost(link)


def test_a_worker_that_is_disconnected_knows_and_others_do_not_care(place: Place) -> None:
    other = place.start(0, talk_until_told)
    crew = place.start(1, called_lost)
    meeting = Arrived(1, Request(kind=Ask.MEET))
    place.until(Joined(0), Joined(1), meeting, answer=lambda event: DONE if event.rank == 0 else None)
    place.listener.dismiss(1, "of no use")
    place.listener.dismiss(2, "never was here")
    assert told(place, 1) == [Gone(1)]
    assert crew.result()
    place.until(*[Arrived] * 10, answer=lambda _: DONE)
    other.talk.send("stop")
    place.until(Gone(0), answer=lambda _: DONE)
    assert other.result() >= 10  # it may not have called before


def test_closing_ends_every_connection_and_leaves_nothing(place: Place) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("worker-")}
    crews = [place.start(rank, called_lost) for rank in (0, 1)]
    meeting = Request(kind=Ask.MEET)
    place.until(Arrived(0, meeting), Arrived(1, meeting))
    started = time.monotonic()
    place.listener.close()
    place.listener.close()
    assert time.monotonic() - started < 5.0
    assert all("server" in crew.result() for crew in crews)
    left = {thread for thread in threading.enumerate() if thread.name.startswith("worker-")} - before
    assert left == set()


# ---- signs of life ----------------------------------------------------------------------------------------

def shows_life(link: WorkerLink, talk: Connection) -> tuple[str, bool]:
    """Calls, computes and gives signs of life, until the others go on without it."""
    pulse = Pulse(link, 0.005)
    try:
        while True:
            link.call(Request(kind=Ask.PUSH, slot=push(link, 1)))
            talk.poll(0.001)
    except LeftBehindError as error:
        return str(error), link.left_behind
    finally:
        pulse.stop()


def test_signs_of_life_come_beside_everything_else(place: Place) -> None:
    crew = place.start(1, shows_life)
    place.until(Joined(1), *[Alive(1)] * 30, *[Arrived] * 30, answer=lambda _: DONE)
    place.until(*[Alive(1)] * 10)  # while it waits for an answer
    place.listener.dismiss(1, "silent for 9 s")
    place.listener.dismiss(2, "never was here")
    assert told(place, 1) == [Gone(1)]
    assert crew.result() == ("silent for 9 s", True)
    again = place.start(1, push_once, 3)  # nobody takes it for the other one
    place.until(Joined(1), Arrived, answer=lambda _: DONE)
    assert again.result() == DONE


def test_a_stopped_worker_gives_no_sign_and_is_told_when_it_wakes(place: Place) -> None:
    crew = place.start(0, shows_life)
    place.until(Joined(0), Alive(0), Arrived)
    crew.signal(STOP)
    while place.listener.events(0.2):
        pass
    place.listener.dismiss(0, "no sign of life for 0.2 s")
    assert place.until(Gone(0))[-1] == Gone(0)
    crew.signal(CONTINUE)
    assert crew.result() == ("no sign of life for 0.2 s", True)


# ---- stopped processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_worker_disturbs_nobody_and_goes_on_later(kind: str) -> None:
    with open_place(kind, parameter_bytes=PARAMETERS) as place:
        sleeper = place.start(0, echo, Request(kind=Ask.CLAIM))
        place.until(Joined(0), Arrived)
        sleeper.signal(STOP)
        large = Reply(kind=Say.ASSIGNED, numbers=tuple(range(1_000_000)))  # more than any socket takes in
        place.listener.reply(0, large)
        busy = place.start(1, talk_until_told)
        place.until(Joined(1), *[Arrived] * 100, answer=lambda _: DONE)
        for version in range(3):
            place.listener.publish(version, torch.zeros(PARAMETERS, dtype=torch.uint8))
        busy.talk.send("stop")
        assert place.until(Gone(1), answer=lambda _: DONE)[-1] == Gone(1)
        assert busy.result() >= 100
        sleeper.signal(CONTINUE)
        place.until(Gone(0))
        assert sleeper.result() == large
