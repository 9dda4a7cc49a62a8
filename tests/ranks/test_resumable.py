"""One conformance suite for suspended training steps, over both carriers: what neither step nor caller may notice."""

from __future__ import annotations

import contextvars
import gc
import itertools
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_hetero.pipeline import ambient, carriers
from lightning_hetero.pipeline.carriers import Carrier, Greenlets, Threads, make_carrier
from lightning_hetero.pipeline.resumable import (
    Done,
    ResumableStep,
    StepClosed,
    Suspended,
    current_step,
    stream_seed,
)

no_greenlet = pytest.mark.skipif(carriers.greenlet is None, reason="needs greenlet")
BOTH = [pytest.param("greenlet", marks=no_greenlet), "thread"]


@pytest.fixture(params=BOTH)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    before = set(threading.enumerate())
    with make_carrier(request.param) as carrier:
        yield carrier
    assert set(threading.enumerate()) <= before


def suspend(value: Any = None) -> Any:
    step = current_step()
    assert step is not None
    return step.suspend(value)


def begun(carrier: Carrier, body: Callable[[], Any], seed: int = 0) -> ResumableStep:
    step = ResumableStep(body, carrier=carrier, seed=seed)
    assert isinstance(step.start(), Suspended)
    return step


def whole(carrier: Carrier, body: Callable[[], Any]) -> Any:
    """Runs a body that suspends itself any number of times; returns what it returns."""
    step = ResumableStep(body, carrier=carrier, seed=0)
    outcome = step.start()
    while isinstance(outcome, Suspended):
        outcome = step.resume(outcome.value)
    return outcome.value


# ---- the protocol ----------------------------------------------------------------------------------------------


def test_values_go_out_and_in_through_any_number_of_suspensions(carrier: Carrier) -> None:
    def body() -> list[int]:
        return [suspend(i) for i in range(3)]

    step = ResumableStep(body, carrier=carrier, seed=0)
    assert step.start() == Suspended(0)
    assert step.resume(10) == Suspended(1)
    assert step.resume(11) == Suspended(2)
    assert (step.suspensions, step.ended) == (3, False)
    assert step.resume(12) == Done([10, 11, 12])
    assert step.ended


def test_a_body_that_never_suspends_is_done_at_once(carrier: Carrier) -> None:
    assert ResumableStep(lambda: "loss", carrier=carrier, seed=0).start() == Done("loss")


def test_every_order_of_interleaving_keeps_the_steps_apart(carrier: Carrier) -> None:
    def body(k: int) -> list[Any]:
        return [suspend((k, 0)), suspend((k, 1))]

    for order in set(itertools.permutations([0, 0, 1, 1, 2, 2])):
        steps = [begun(carrier, lambda k=k: body(k)) for k in range(3)]
        ends = {k: steps[k].resume((k, "in", steps[k].suspensions)) for k in order}
        assert ends == {k: Done([(k, "in", 1), (k, "in", 2)]) for k in range(3)}


def test_a_step_may_run_another_one(carrier: Carrier) -> None:
    def outer() -> list[Any]:
        me = current_step()
        inner = begun(carrier, lambda: suspend("inner") + 1)
        seen = [suspend("outer"), inner.resume(1)]
        assert current_step() is me and me is not inner
        return seen

    step = begun(carrier, outer)
    assert current_step() is None
    assert step.resume("back") == Done(["back", Done(2)])


def test_a_step_may_be_resumed_by_another_caller_than_its_starter(carrier: Carrier) -> None:
    def outer() -> str:
        suspend(begun(carrier, lambda: [suspend(), suspend("again")]))
        return "outer"

    step = ResumableStep(outer, carrier=carrier, seed=0)
    inner = step.start()
    assert isinstance(inner, Suspended)
    assert inner.value.resume(1) == Suspended("again")
    assert inner.value.resume(2) == Done([1, 2])
    assert step.resume() == Done("outer")


OUT_OF_TURN = ["start twice", "resume new", "resume ended", "resume itself", "close itself", "foreign"]


@pytest.mark.parametrize("wrong", OUT_OF_TURN)
def test_a_call_out_of_turn_is_refused_and_does_no_harm(carrier: Carrier, wrong: str) -> None:
    def body() -> str:
        if wrong in ("resume itself", "close itself"):
            with pytest.raises(RuntimeError, match=r"running|close itself"):
                step.resume() if wrong == "resume itself" else step.close()
        return suspend("x")

    step = ResumableStep(body, carrier=carrier, seed=0)
    if wrong == "resume new":
        with pytest.raises(RuntimeError, match="cannot resume a step that is not started"):
            step.resume()
    step.start()
    if wrong == "start twice":
        with pytest.raises(RuntimeError, match="cannot start a step that is suspended"):
            step.start()
    if wrong == "foreign":
        with pytest.raises(RuntimeError, match="for the body of the step that is running"):
            step.suspend("from outside")
    assert step.resume("y") == Done("y")
    if wrong == "resume ended":
        with pytest.raises(RuntimeError, match="cannot resume a step that is ended"):
            step.resume()


def test_bad_arguments_are_named(carrier: Carrier) -> None:
    with pytest.raises(TypeError, match="body=3 must be callable"):
        ResumableStep(3, carrier=carrier, seed=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="carrier='thread' must be a Carrier"):
        ResumableStep(print, carrier="thread", seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=-1 must be in"):
        ResumableStep(print, carrier=carrier, seed=-1)
    with pytest.raises(ValueError, match="'fibre' must be 'auto', 'greenlet' or 'thread'"):
        make_carrier("fibre")  # type: ignore[arg-type]


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


# ---- switches: a block held open while others run --------------------------------------------------------------

Block = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]
AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}
SWITCHES: dict[str, Block] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "autocast": (lambda: torch.autocast(**AUTOCAST), lambda: torch.is_autocast_enabled("cpu")),
    "autocast dtype": (
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast cache": (
        lambda: torch.autocast(**AUTOCAST, cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "autocast nesting": (lambda: torch.autocast(**AUTOCAST), ambient._autocast_nesting),
    "autocast of another device": (
        lambda: torch.autocast("cuda", enabled=False, dtype=torch.bfloat16),
        lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    ),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_block_held_open_is_the_steps_alone(carrier: Carrier, name: str, order: tuple[int, int]) -> None:
    """Without swapping, the block leaks, and interleaved exits leave it in force for good."""
    block, read = SWITCHES[name]
    outside = read()
    with block():
        inside = read()
    assert read() == outside

    def body() -> None:
        assert read() == outside
        with block():
            assert read() == inside
            suspend()
            assert read() == inside
        assert read() == outside
        suspend()
        assert read() == outside

    steps = []
    for _ in range(2):
        steps.append(begun(carrier, body))
        assert read() == outside
    for k in (*order, *reversed(order)):
        steps[k].resume()
        assert read() == outside
    assert all(step.ended for step in steps)


def test_number_of_threads_is_the_steps_alone(carrier: Carrier) -> None:
    def body() -> list[int]:
        seen = [torch.get_num_threads()]
        torch.set_num_threads(2)
        suspend()
        return [*seen, torch.get_num_threads()]

    step = begun(carrier, body)
    assert torch.get_num_threads() == 1
    assert step.resume() == Done([1, 2])
    assert torch.get_num_threads() == 1
    assert whole(carrier, torch.get_num_threads) == 1  # a pooled thread remembers nothing


@pytest.mark.parametrize("name", SWITCHES)
def test_the_callers_block_is_in_force_in_the_step_whatever_the_caller_does_later(carrier: Carrier, name: str) -> None:
    block, read = SWITCHES[name]

    def body() -> tuple[Any, Any]:
        return read(), suspend() or read()

    with block():
        inside = read()
        step = begun(carrier, body)
    assert step.resume() == Done((inside, inside))
    assert whole(carrier, read) == read() != inside


def test_a_steps_cast_weights_do_not_serve_another_one(carrier: Carrier) -> None:
    """Autocast's cache is one for the process, and only emptied where no block is open: B would compute with A's."""
    weight = torch.ones(3, 3, requires_grad=True)
    x = torch.ones(2, 3)

    def a() -> None:
        with torch.autocast(**AUTOCAST):
            x @ weight
            suspend()

    def b() -> float:
        with torch.no_grad():
            weight.add_(1.0)  # manual optimisation
        with torch.autocast(**AUTOCAST):
            return (x @ weight).mean().item()

    step = begun(carrier, a)
    assert whole(carrier, b) == 6.0
    step.resume()


# ---- what cannot be swapped ------------------------------------------------------------------------------------


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DefaultDtype:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


def _hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu()


REFUSED: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "saved-tensor hooks": (_hooks, ambient._private_saved_tensor_hooks),
    "torch.device": (lambda: torch.device("meta"), lambda: torch.empty(1).device.type),
    "function mode": (_Functions, ambient._private_function_modes),
    "dispatch mode": (_Dispatches, ambient._private_dispatch_modes),
    "set_default_dtype": (_DefaultDtype, torch.get_default_dtype),
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), ambient._sdpa_kernels),
}


def assert_surroundings(reads: dict[str, Any]) -> None:
    assert {name: read() for name, (_, read) in REFUSED.items()} == reads


@pytest.mark.parametrize("name", REFUSED)
def test_a_block_that_cannot_be_swapped_is_refused_with_the_way_out(carrier: Carrier, name: str) -> None:
    block, _ = REFUSED[name]
    before = {name: read() for name, (_, read) in REFUSED.items()}

    def body(block: Callable[[], AbstractContextManager[Any]]) -> Any:
        with block():
            return suspend("x")

    other = begun(carrier, lambda: body(torch.no_grad))
    with pytest.raises(RuntimeError, match=rf"cannot be called inside .*{name}.*: \w+"):
        ResumableStep(lambda: body(block), carrier=carrier, seed=0).start()
    assert_surroundings(before)
    assert other.resume(1) == Done(1)


def _non_reentrant() -> Any:
    x = torch.ones(1, requires_grad=True)
    return checkpoint(lambda x: suspend(x), x, use_reentrant=False)


def _reentrant() -> Any:
    x = torch.ones(1, requires_grad=True)
    return checkpoint(lambda x: suspend(x), x, use_reentrant=True)


def _anomalies() -> Any:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        return suspend()


def _transform() -> Any:
    return torch.func.grad(lambda x: suspend(x).sum())(torch.ones(1))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (_non_reentrant, "checkpoint each layer"),
        (_reentrant, r"use_reentrant=True.*checkpoint each layer"),
        (_anomalies, r"Trainer\(detect_anomaly=True\)"),
        (_transform, "torch.func transform"),
    ],
)
def test_a_wrapper_around_the_suspension_is_refused(carrier: Carrier, body: Callable[[], Any], what: str) -> None:
    before = {name: read() for name, (_, read) in REFUSED.items()}
    with pytest.raises(RuntimeError, match=what):
        ResumableStep(body, carrier=carrier, seed=0).start()
    assert_surroundings(before)
    assert torch.is_grad_enabled() and not torch.is_anomaly_enabled()


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_block_around_the_whole_step_is_carried(carrier: Carrier, name: str) -> None:
    """Lightning validates under inference_mode, and sets the default dtype of ``precision="64-true"``."""
    block, read = REFUSED[name]
    outside = read()
    with block():
        inside = read()
        step = begun(carrier, lambda: (read(), suspend() or read()))
        assert step.resume() == Done((inside, inside))
        assert read() == inside
    assert read() == outside
    assert whole(carrier, read) == outside


@pytest.mark.parametrize("name", ["inference_mode", "torch.device", "set_default_dtype"])
def test_a_step_is_not_resumed_under_other_circumstances(carrier: Carrier, name: str) -> None:
    block, _ = REFUSED[name]
    step = begun(carrier, lambda: suspend())
    with block(), pytest.raises(RuntimeError, match=rf"other circumstances.*{name}"):
        step.resume()
    assert step.resume(1) == Done(1)


def test_what_a_thread_cannot_take_along_is_named() -> None:
    with Threads() as carrier:

        def run(x: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match=r"cannot take along.*torch.func transform.*install greenlet"):
                ResumableStep(lambda: None, carrier=carrier, seed=0).start()
            return x.sum()

        torch.func.grad(run)(torch.ones(1))


# ---- exceptions and ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suspensions", [0, 1, 2])
def test_an_exception_comes_out_with_the_users_line(carrier: Carrier, suspensions: int) -> None:
    def users_training_step() -> None:
        for _ in range(suspensions):
            suspend()
        with torch.no_grad():
            raise KeyError("the user's")

    step = ResumableStep(users_training_step, carrier=carrier, seed=0)
    with pytest.raises(KeyError, match="the user's") as info:
        step.start()
        for _ in range(suspensions):
            step.resume()
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == "users_training_step"
    assert frames[-1].line == 'raise KeyError("the user\'s")'
    assert step.ended and torch.is_grad_enabled()
    step.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration])
def test_any_exception_comes_out(carrier: Carrier, error: type[BaseException]) -> None:
    def body() -> None:
        suspend()
        raise error

    step = begun(carrier, body)
    with pytest.raises(error):
        step.resume()


def test_close_runs_finally_where_the_step_waits(carrier: Carrier) -> None:
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


def test_close_of_a_step_that_never_began(carrier: Carrier) -> None:
    ran: list[int] = []
    step = ResumableStep(lambda: ran.append(1), carrier=carrier, seed=0)
    step.close()
    assert step.ended and ran == []
    with pytest.raises(RuntimeError, match="ended"):
        step.start()


def test_a_closed_step_cannot_suspend_again(carrier: Carrier) -> None:
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


def test_an_error_while_closing_comes_out(carrier: Carrier) -> None:
    def body() -> None:
        try:
            suspend()
        finally:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as info:
        begun(carrier, body).close()
    assert isinstance(info.value.__context__, StepClosed)


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


def test_what_a_body_holds_goes_with_its_end(carrier: Carrier) -> None:
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


# ---- what a step finds around it -------------------------------------------------------------------------------

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")


def test_context_variables_come_in_and_stay_inside(carrier: Carrier) -> None:
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


def test_the_callers_current_hook_is_in_force(carrier: Carrier) -> None:
    """As with ``self.log``: what is logged belongs to the hook that the caller has called."""

    class Trainer:
        hook: str | None = None
        logged: list[tuple[str | None, int]]

    trainer = Trainer()
    trainer.logged = []

    def body(k: int) -> None:
        trainer.logged.append((trainer.hook, k))
        suspend()
        trainer.logged.append((trainer.hook, k))

    trainer.hook = "training_step"
    steps = [begun(carrier, lambda k=k: body(k)) for k in range(2)]
    for step in steps:
        step.resume()
    assert trainer.logged == [("training_step", k) for k in (0, 1, 0, 1)]


# ---- random numbers --------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), *np.random.randn(3)]


@pytest.mark.parametrize("order", [(0, 0, 1, 1, 2, 2), (2, 1, 0, 0, 1, 2), (1, 2, 1, 0, 2, 0)])
def test_streams_depend_on_the_micro_batch_and_on_nothing_else(carrier: Carrier, order: tuple[int, ...]) -> None:
    def body() -> list[list[float]]:
        drawn = [draw()]
        for _ in range(2):
            suspend()
            drawn.append(draw())
        return drawn

    def run(order: tuple[int, ...]) -> list[list[list[float]]]:
        steps = {}
        drawn = {}
        for k in order:
            if k not in steps:
                steps[k] = begun(carrier, body, stream_seed(5, 17, k))
            outcome = steps[k].resume()
            draw()  # the runtime's own: the schedule decides how much
            if isinstance(outcome, Done):
                drawn[k] = outcome.value
        return [drawn[k] for k in sorted(drawn)]

    expected = run((0, 0, 1, 1, 2, 2))
    assert run(order) == expected
    numbers = [number for step in expected for drawn in step for number in drawn]
    assert len(set(numbers)) == len(numbers)  # no stream is another one's copy


def test_the_callers_streams_go_on_as_if_nothing_had_run(carrier: Carrier) -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    draw()  # leaves a half-used pair of normal variates
    expected = draw()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    draw()

    def body() -> None:
        draw(), suspend(), draw()

    steps = [begun(carrier, body) for _ in range(2)]
    steps[0].resume()
    steps[1].close()
    assert draw() == expected


def test_torchs_stream_is_one_across_suspensions(carrier: Carrier) -> None:
    """As in a direct run of the step after seeding: what the layers draw meanwhile is theirs."""
    torch.manual_seed(11)
    expected = [torch.rand(2).tolist(), torch.rand(2).tolist()]
    step = begun(carrier, lambda: [torch.rand(2).tolist(), suspend() or torch.rand(2).tolist()], seed=11)
    torch.rand(7)
    assert step.resume() == Done(expected)


def test_stream_seeds_differ_where_sums_would_not() -> None:
    seeds = {stream_seed(*numbers) for numbers in itertools.product(range(-2, 3), range(5), range(5))}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(0, 12, 3) == 0x4963A7ED4FEB0652  # fixed: a resumed run must draw the same


# ---- private names ---------------------------------------------------------------------------------------------


def test_private_names_of_torch_mean_what_we_think() -> None:
    """With another torch than 2.13: look at `pipeline.ambient`, section "private names"."""
    version = torch.__version__
    hooks = (lambda x: x, lambda x: x)
    mode, dispatch = _Functions(), _Dispatches()
    assert ambient._private_forward_grad() is True, version
    assert ambient._private_saved_tensor_hooks() is None, version
    assert (ambient._private_function_modes(), ambient._private_dispatch_modes()) == ((), ()), version
    assert ambient._private_transform_level() is None, version
    with torch.no_grad():
        assert ambient._private_forward_grad() is True, version
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert ambient._private_saved_tensor_hooks() == hooks, version
    with mode, dispatch:
        assert ambient._private_function_modes() == (mode,), version
        assert ambient._private_dispatch_modes() == (dispatch,), version
    seen: list[Any] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(ambient._private_forward_grad())
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    Asks.apply(torch.ones(1, requires_grad=True))
    torch.func.vmap(lambda x: seen.append(ambient._private_transform_level()) or x)(torch.ones(1))
    assert seen == [False, 1], version


def test_before_torch_2_8_hooks_are_known_to_be_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_top"):
                raise AttributeError(name)
            return getattr(torch._C._autograd, name)

    monkeypatch.setattr(ambient, "_autograd", Old())
    assert ambient._private_saved_tensor_hooks() is None
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(_hooks())
            assert ambient._private_saved_tensor_hooks() is True
    assert ambient._private_saved_tensor_hooks() is None
