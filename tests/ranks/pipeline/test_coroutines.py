"""The two carriers of suspended steps, each for itself: threads and greenlets."""

from __future__ import annotations

import gc
import signal
import threading

import pytest
import torch

from lightning_hetero.pipeline.runtime.step import coroutines as carriers
from lightning_hetero.pipeline.runtime.step.coroutines import Carrier, Greenlets, Threads, make_carrier
from lightning_hetero.pipeline.runtime.step.resumable import Done, ResumableStep
from tests.ranks.pipeline.resumable_kit import BOTH, begun, no_greenlet, suspend, whole


def test_without_greenlet_threads_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "greenlet", None)
    with make_carrier("auto") as carrier:
        assert isinstance(carrier, Threads)
        assert begun(carrier, lambda: suspend(1)).resume(2) == Done(2)
    with pytest.raises(ImportError, match="pip install greenlet"):
        make_carrier("greenlet")


@no_greenlet
def test_with_greenlet_it_carries() -> None:
    with make_carrier() as carrier:
        assert isinstance(carrier, Greenlets)


def test_dropped_steps_are_closed_with_their_carrier(carrier: Carrier) -> None:
    closed: list[int] = []

    def body(k: int) -> None:
        try:
            suspend()
        finally:
            closed.append(k)
            if k == 1:
                raise OSError("of step 1")

    for k in range(3):
        begun(carrier, lambda k=k: body(k))
    with pytest.raises(OSError, match="of step 1"):
        carrier.close_steps()
    assert closed == [2, 1, 0]
    assert begun(carrier, lambda: suspend()).resume(1) == Done(1)  # further ones may run
    begun(carrier, lambda: body(7))
    carrier.close()
    assert closed == [2, 1, 0, 7]
    with pytest.raises(RuntimeError, match="carrier is closed"):
        ResumableStep(print, carrier=carrier, seed=0).start()
    carrier.close()


def test_a_collected_pool_ends_its_idle_threads() -> None:
    before = set(threading.enumerate())
    carrier = Threads()
    whole(carrier, lambda: suspend())
    assert len(set(threading.enumerate()) - before) == 1
    del carrier
    gc.collect()
    assert set(threading.enumerate()) <= before


# ---- threads and greenlets, each -------------------------------------------------------------------------------


def test_threads_are_used_again() -> None:
    with Threads() as carrier:
        for _ in range(5):
            steps = [begun(carrier, lambda: suspend()) for _ in range(3)]
            for step in steps[:2]:
                step.resume()
            steps[2].close()
        with pytest.raises(ZeroDivisionError):
            whole(carrier, lambda: 1 // 0)
        assert carrier.started == 3


def test_an_interrupt_of_the_caller_waits_for_the_step() -> None:
    """Two sides must never run at a time: the caller would find torch's generators in the step's state."""
    handled = threading.Event()

    def interrupt(*_: object) -> None:
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def body() -> None:
        while not handled.is_set():  # again: one that comes just before the caller begins to wait does not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            handled.wait(0.1)
        torch.rand(3)
        ran.append("on")
        suspend()

    ran: list[str] = []
    signal.signal(signal.SIGUSR1, interrupt)
    before = torch.get_rng_state()
    with Threads() as carrier:
        step = ResumableStep(body, carrier=carrier, seed=0)
        with pytest.raises(KeyboardInterrupt):
            step.start()
        assert ran == ["on"] and torch.equal(torch.get_rng_state(), before)
        step.close()
        assert step.ended


def test_a_wake_up_too_many_does_no_harm() -> None:
    """An interrupt may leave one behind."""
    with Threads() as carrier:
        whole(carrier, lambda: None)
        (worker,) = carrier._idle
        worker._wake_outside.put(None)
        entered = threading.Event()
        assert whole(carrier, lambda: (entered.wait(0.05), suspend("waited"))[1]) == "waited"


@no_greenlet
def test_a_greenlet_stays_in_its_thread() -> None:
    errors: list[BaseException] = []

    def resume_elsewhere() -> None:
        try:
            step.resume()
        except RuntimeError as error:
            errors.append(error)

    with Greenlets() as carrier:
        step = begun(carrier, lambda: suspend())
        thread = threading.Thread(target=resume_elsewhere)
        thread.start()
        thread.join()
        assert "in the thread that started it" in str(errors[0])
        assert step.resume(1) == Done(1)


@pytest.mark.parametrize("name", BOTH)
def test_what_belongs_to_a_thread(name: carriers.CarrierName) -> None:
    local = threading.local()
    local.x = 1
    with make_carrier(name) as carrier:
        same = whole(carrier, lambda: (getattr(local, "x", None), threading.get_ident()))
    assert same == ((1, threading.get_ident()) if name == "greenlet" else (None, same[1]))
    assert (same[1] == threading.get_ident()) == (name == "greenlet")
