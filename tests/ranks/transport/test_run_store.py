"""The store of a run: strangers' records are none, a stopped host holds nobody, and stopped time does not count."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from lightning_hetero.transport.awake import AwakeClock
from lightning_hetero.transport.run_store import RunStore, SignedStore, SilentError

SECRET = bytes(range(32))


def test_a_record_of_the_run_is_read_as_it_was_written() -> None:
    mine, other = (SignedStore(store, SECRET) for store in [HashStore()] * 2)
    assert mine.get("a") is None
    mine.set("a", "schön")
    assert other.get("a") == "schön" and other.has("a")
    other.delete("a")
    assert not mine.has("a")


def test_the_first_of_two_records_holds() -> None:
    one, two = (SignedStore(store, SECRET) for store in [HashStore()] * 2)
    assert one.first("cause", "rank 1") == "rank 1"
    assert two.first("cause", "rank 2") == "rank 1"


@pytest.mark.parametrize("written", ["failed", "", "\x00" * 80, "0" * 64 + "failed"])
def test_a_strangers_record_is_none_and_does_not_keep_the_runs_out(written: str) -> None:
    raw = HashStore()
    mine = SignedStore(raw, SECRET)
    raw.set("cause", written)
    assert mine.get("cause") is None
    assert mine.first("cause", "true") == mine.get("cause") == "true"


def test_a_record_of_another_key_or_another_run_is_none() -> None:
    raw: HashStore = HashStore()
    mine, another = SignedStore(raw, SECRET), SignedStore(raw, b"another run's")
    mine.set("a", "1")
    raw.set("b", raw.get("a").decode())
    another.set("c", "1")
    assert (mine.get("b"), mine.get("c")) == (None, None)


def test_a_host_that_does_not_answer_is_asked_once() -> None:
    store = RunStore(HashStore(), SECRET, answer_s=0.05)
    answers = threading.Event()
    with pytest.raises(SilentError, match=r"has not answered for 0\.05 s"):
        store.ask(lambda signed: answers.wait(60.0))
    with pytest.raises(SilentError):
        store.ask(lambda signed: signed.get("a"))
    answers.set()


def test_who_has_let_go_asks_no_more() -> None:
    store = RunStore(HashStore(), SECRET, answer_s=1.0)
    assert store.ask(lambda signed: signed.first("a", "1")) == "1"
    store.let_go()
    with pytest.raises(RuntimeError, match="has left"):
        store.ask(lambda signed: signed.get("a"))


@given(st.lists(st.floats(0.0, 1e6), max_size=20))
def test_two_beats_count_at_most_from_one_look_to_the_next(steps: list[float]) -> None:
    clock, now_s = AwakeClock(0.5), 100.0
    before = clock.at(now_s)
    for step in steps:
        now_s += step
        after = clock.at(now_s)
        assert 0.0 <= after - before <= 1.0
        assert step > 1.0 or after - before == pytest.approx(step, abs=1e-6)
        before = after


_STOPPED = """
import os, signal, subprocess, sys, time
from lightning_hetero.transport.awake import awake_s
began, wall = awake_s(), time.monotonic()
waker = subprocess.Popen([sys.executable, "-S", "-c", f"import os,time; time.sleep(2.0); os.kill({os.getpid()}, 18)"])
os.kill(os.getpid(), signal.SIGSTOP)
awake, passed = awake_s() - began, time.monotonic() - wall
waker.wait()
print(awake, passed)
"""


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    said = subprocess.run([sys.executable, "-c", _STOPPED], capture_output=True, text=True, timeout=120, check=True)
    awake, passed = map(float, said.stdout.split())
    assert awake < passed - 1.0


_LEFT_ALONE = """
import threading
from lightning_hetero.transport.awake import Aside
begun, answers = threading.Event(), threading.Event()
def ask():
    begun.set()
    threading.Timer(0.3, answers.set).start()
    answers.wait(60.0)
    print("answered")
assert not Aside(ask, "asks").ends_within(0.0)
begun.wait(60.0)
"""


def test_a_call_that_was_left_alone_does_not_end_while_python_is_taken_down() -> None:
    command = [sys.executable, "-c", _LEFT_ALONE]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout == "answered\n"


_NEVER_ASKED = """
import threading
import lightning_hetero.transport.awake
def start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 says
threading.Thread.start = start
"""


def test_a_process_that_never_asked_for_the_time_starts_no_clock_to_end() -> None:
    command = [sys.executable, "-c", _NEVER_ASKED]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr == ""
