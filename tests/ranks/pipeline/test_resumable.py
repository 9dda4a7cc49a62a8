"""Suspended training steps: what neither step nor caller may notice of the other."""

from __future__ import annotations

import contextvars
import gc
import itertools
import traceback
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from lightning_hetero.pipeline.runtime.step.random_streams import stream_seed
from lightning_hetero.pipeline.runtime.step.resumable import Done, ResumableStep, Suspended
from tests.ranks.pipeline.resumable_kit import begun, resumable, suspend

# ---- the protocol ----------------------------------------------------------------------------------------------


def test_values_go_out_and_in_through_any_number_of_suspensions(carrier: ExitStack) -> None:
    def body() -> list[int]:
        return [suspend(i) for i in range(3)]

    step = resumable(carrier, body, 0)
    assert step.start() == Suspended(0)
    assert step.resume(10) == Suspended(1)
    assert step.resume(11) == Suspended(2)
    assert (step.suspensions, step.ended) == (3, False)
    assert step.resume(12) == Done([10, 11, 12])
    assert step.ended


def test_every_order_of_interleaving_keeps_the_steps_apart(carrier: ExitStack) -> None:
    def body(k: int) -> list[Any]:
        return [suspend((k, 0)), suspend((k, 1))]

    for order in set(itertools.permutations([0, 0, 1, 1, 2, 2])):
        steps = [begun(carrier, lambda k=k: body(k)) for k in range(3)]
        ends = {k: steps[k].resume((k, "in", steps[k].suspensions)) for k in order}
        assert ends == {k: Done([(k, "in", 1), (k, "in", 2)]) for k in range(3)}


# ---- exceptions and ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suspensions", [0, 1, 2])
def test_an_exception_comes_out_with_the_users_line(carrier: ExitStack, suspensions: int) -> None:
    def users_training_step() -> None:
        for _ in range(suspensions):
            suspend()
        with torch.no_grad():
            raise KeyError("the user's")

    step = resumable(carrier, users_training_step, 0)
    with pytest.raises(KeyError, match="the user's") as info:
        step.start()
        for _ in range(suspensions):
            step.resume()
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == "users_training_step"
    assert frames[-1].line == 'raise KeyError("the user\'s")'
    assert step.ended and torch.is_grad_enabled()
    step.close()


def test_close_runs_finally_where_the_step_waits(carrier: ExitStack) -> None:
    seen: list[Any] = []

    def body() -> None:
        try:
            with torch.no_grad():
                try:
                    suspend()
                except Exception:  # what user code catches
                    seen.append("caught")
                finally:
                    seen.append(torch.is_grad_enabled())
        finally:
            seen.append(torch.is_grad_enabled())

    step = begun(carrier, body)
    step.close()
    assert seen == [False, True]
    assert step.ended and torch.is_grad_enabled()
    step.close()  # again
    assert seen == [False, True]


def test_a_closed_step_cannot_suspend_again(carrier: ExitStack) -> None:
    seen: list[str] = []

    def body() -> None:
        try:
            suspend()
        finally:
            try:
                suspend()
            finally:
                seen.append("end")

    begun(carrier, body).close()
    assert seen == ["end"]


def test_what_a_body_holds_goes_with_its_end(carrier: ExitStack) -> None:
    """Else a batch lives as long as its step is kept, or until a pooled thread gets the next one."""
    import weakref

    class Batch: ...

    def run() -> tuple[ResumableStep, weakref.ref[Batch]]:
        batch = Batch()
        step = begun(carrier, lambda: suspend() and batch and None)
        step.resume(1)
        return step, weakref.ref(batch)

    gc.disable()
    try:
        step, batch = run()
        assert step.ended and batch() is None
    finally:
        gc.enable()


# ---- what a step finds around it -------------------------------------------------------------------------------

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")


def test_context_variables_come_in_and_stay_inside(carrier: ExitStack) -> None:
    def body(k: str) -> list[str]:
        seen = [VARIABLE.get()]
        VARIABLE.set(k)
        suspend()
        return [*seen, VARIABLE.get()]

    token = VARIABLE.set("caller's")
    steps = [begun(carrier, lambda k=k: body(k)) for k in "ab"]
    assert VARIABLE.get() == "caller's"
    VARIABLE.reset(token)
    assert [step.resume() for step in steps] == [Done(["caller's", "a"]), Done(["caller's", "b"])]
    assert VARIABLE.get() == "default"


def test_stream_seeds_differ_where_sums_would_not() -> None:
    seeds = {stream_seed(*numbers) for numbers in itertools.product(range(-2, 3), range(5), range(5))}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(0, 12, 3) == 0x4963A7ED4FEB0652  # fixed: a resumed run must draw the same


def test_dropped_steps_are_closed_with_their_carrier(carrier: ExitStack) -> None:
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
        carrier.close()
    assert closed == [2, 1, 0]
    assert begun(carrier, lambda: suspend()).resume(1) == Done(1)  # further ones may run
