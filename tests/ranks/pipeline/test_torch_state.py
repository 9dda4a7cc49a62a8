"""Torch's state in and around a suspended step: switches, refused blocks, random streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_hetero.measure.device import nothing_drawn
from lightning_hetero.pipeline.runtime.step import torch_state as ambient
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.resumable import Done
from tests.ranks.pipeline.resumable_kit import begun, resumable, suspend, whole

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


@pytest.mark.parametrize("name", SWITCHES)
def test_a_block_held_open_is_the_steps_alone(carrier: ExitStack, name: str) -> None:
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
    for k in (0, 1, 1, 0):
        steps[k].resume()
        assert read() == outside
    assert all(step.ended for step in steps)


@pytest.mark.parametrize("name", SWITCHES)
def test_the_callers_block_is_in_force_in_the_step_whatever_the_caller_does_later(
    carrier: ExitStack, name: str
) -> None:
    block, read = SWITCHES[name]

    def body() -> tuple[Any, Any]:
        return read(), suspend() or read()

    with block():
        inside = read()
        step = begun(carrier, body)
    assert step.resume() == Done((inside, inside))
    assert whole(carrier, read) == read() != inside


def test_a_steps_cast_weights_do_not_serve_another_one(carrier: ExitStack) -> None:
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
    "saved-tensor hooks": (_hooks, ambient.saved_tensor_hooks),
    "torch.device": (lambda: torch.device("meta"), lambda: torch.empty(1).device.type),
    "function mode": (_Functions, torch._C._len_torch_function_stack),
    "dispatch mode": (_Dispatches, torch._C._len_torch_dispatch_stack),
    "set_default_dtype": (_DefaultDtype, torch.get_default_dtype),
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), ambient._sdpa_kernels),
}


def assert_surroundings(reads: dict[str, Any]) -> None:
    assert {name: read() for name, (_, read) in REFUSED.items()} == reads


@pytest.mark.parametrize("name", REFUSED)
def test_a_block_that_cannot_be_swapped_is_refused_with_the_way_out(carrier: ExitStack, name: str) -> None:
    block, _ = REFUSED[name]
    before = {name: read() for name, (_, read) in REFUSED.items()}

    def body(block: Callable[[], AbstractContextManager[Any]]) -> Any:
        with block():
            return suspend("x")

    other = begun(carrier, lambda: body(torch.no_grad))
    with pytest.raises(RuntimeError, match=rf"cannot be called inside .*{name}.*: \w+"):
        resumable(carrier, lambda: body(block), 0).start()
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
def test_a_wrapper_around_the_suspension_is_refused(carrier: ExitStack, body: Callable[[], Any], what: str) -> None:
    before = {name: read() for name, (_, read) in REFUSED.items()}
    with pytest.raises(RuntimeError, match=what):
        resumable(carrier, body, 0).start()
    assert_surroundings(before)
    assert torch.is_grad_enabled() and not torch.is_anomaly_enabled()


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_block_around_the_whole_step_is_carried(carrier: ExitStack, name: str) -> None:
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


# ---- random numbers --------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), *np.random.randn(3)]


@pytest.mark.parametrize("order", [(0, 0, 1, 1, 2, 2), (2, 1, 0, 0, 1, 2), (1, 2, 1, 0, 2, 0)])
def test_streams_depend_on_the_micro_batch_and_on_nothing_else(carrier: ExitStack, order: tuple[int, ...]) -> None:
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


def test_the_callers_streams_go_on_as_if_nothing_had_run(carrier: ExitStack) -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    draw()  # leaves a half-used pair of normal variates
    expected = draw()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    draw()

    def body() -> None:
        draw(), suspend(), draw()

    with nothing_drawn():
        steps = [begun(carrier, body) for _ in range(2)]
        steps[0].resume()
        steps[1].close()
    assert draw() == expected


def test_behind_a_suspension_a_step_draws_from_a_stream_of_that_number(carrier: ExitStack) -> None:
    step = begun(carrier, lambda: [draw(), suspend() or draw()], seed=11)
    draw()
    outcome = step.resume()
    seed_streams(11)
    first = draw()
    seed_streams(stream_seed(11, 1))
    assert outcome == Done([first, draw()])


def test_before_torch_2_8_hooks_are_known_to_be_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_top"):
                raise AttributeError(name)
            return getattr(torch._C._autograd, name)

    monkeypatch.setattr(ambient, "_autograd", Old())
    assert ambient.saved_tensor_hooks() is None
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(_hooks())
            assert ambient.saved_tensor_hooks() is True
    assert ambient.saved_tensor_hooks() is None
