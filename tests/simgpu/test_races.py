"""What simulated devices find: unordered work, memory given back too early, copies nobody waited for, wrong devices."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.simgpu.harness import run_sim_ranks


def _call(rank: int, world: int, body: Callable[[], object]) -> object:
    return body()


def alone(body: Callable[[], object], asynchronous: bool = True) -> object:
    """Runs ``body`` in a process with two simulated GPUs."""
    return run_sim_ranks(1, _call, body, gpus=2, asynchronous=asynchronous)[0]


def _side() -> torch.cuda.Stream:
    """Returns a stream that begins after all that was submitted so far."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    return side


# ---- streams


def read_without_a_wait() -> None:
    side, x = _side(), torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        torch.mul(x, 2)


def write_without_a_wait() -> None:
    x = torch.ones(4, device="cuda")
    side = _side()
    with torch.cuda.stream(side):
        y = x * 2
    x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    del y


def result_without_a_wait() -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(_side()):
        y = x * 2
    y.sum()


def event_recorded_too_early() -> None:
    side = _side()
    ready = torch.cuda.current_stream().record_event()
    x = torch.ones(4, device="cuda")
    side.wait_event(ready)
    with torch.cuda.stream(side):
        torch.mul(x, 2)


def copy_between_devices_without_a_wait() -> None:
    x = torch.ones(4, device="cuda:0")
    with torch.cuda.stream(_side()):
        x.mul_(2)
    x.to("cuda:1")


@pytest.mark.parametrize(
    "body",
    [
        read_without_a_wait,
        write_without_a_wait,
        result_without_a_wait,
        event_recorded_too_early,
        copy_between_devices_without_a_wait,
    ],
)
def test_a_missing_wait_is_a_race(body: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=rf"race on a simulated device(.|\n)*{body.__name__}(.|\n)*without a wait"):
        alone(body)
    alone(body, asynchronous=False)


def waits() -> float:
    """All ways of waiting that there are."""
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        ready = torch.cuda.Event()
        ready.record()
    ready.wait()
    z = y + 1  # after an event
    with torch.cuda.stream(side):
        w = x * 3
    side.synchronize()
    z += w  # after the host has waited for the stream
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        v = w + x  # new work comes after all that the host has waited for
        other.record_event().synchronize()
    torch.cuda.synchronize()
    return float((z + v).sum())


def halves() -> None:
    """Two streams, each with its half of a buffer."""
    buffer = torch.zeros(8, device="cuda")
    side = _side()
    with torch.cuda.stream(side):
        buffer[4:].add_(1)
    buffer[:4].add_(1)
    torch.cuda.current_stream().wait_stream(side)
    buffer.sum()


class _OnSide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        side = _side()
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        return y


def backward() -> None:
    """Autograd runs each node on the stream of its forward, and waits between them."""
    x = torch.ones(4, device="cuda", requires_grad=True)
    (_OnSide()(x) * x).sum().backward()
    assert x.grad is not None
    x.grad.sum()


@pytest.mark.parametrize("body", [waits, halves, backward])
def test_ordered_work_is_none(body: Callable[[], object]) -> None:
    alone(body)


# ---- memory


def given_back(told: bool) -> None:
    x = torch.ones(4, device="cuda")
    side = _side()
    with torch.cuda.stream(side):
        y = x * 2
    if told:
        x.record_stream(side)
    del x
    torch.cuda.current_stream().wait_stream(side)
    del y


def given_back_and_told() -> None:
    given_back(True)


def given_back_in_use() -> None:
    given_back(False)


def test_memory_that_another_stream_uses_is_not_given_back() -> None:
    with pytest.raises(RuntimeError, match=r"was given back while it is used by mul(.|\n)*record_stream"):
        alone(given_back_in_use)
    alone(given_back_and_told)


# ---- copies


def to_the_host() -> tuple[bool, list[float]]:
    x = torch.arange(3.0, device="cuda")
    y = x.to("cpu", non_blocking=True)
    early = bool(y.isnan().all())
    torch.cuda.current_stream().record_event().synchronize()
    return early, y.tolist()


def test_a_copy_to_the_host_arrives_when_somebody_waits() -> None:
    assert alone(to_the_host) == (True, [0.0, 1.0, 2.0])
    assert alone(to_the_host, asynchronous=False) == (False, [0.0, 1.0, 2.0])


def asked_only() -> list[float]:
    y = torch.arange(3.0, device="cuda").to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    while not copied.query():
        pass
    return y.tolist()


def test_who_asks_an_event_until_it_is_reached_has_waited() -> None:
    assert alone(asked_only) == [0.0, 1.0, 2.0]


def of_another_event() -> bool:
    early = torch.cuda.current_stream().record_event()
    y = torch.arange(3.0, device="cuda").to("cpu", non_blocking=True)
    early.synchronize()
    return bool(y.isnan().all())


def test_an_event_from_before_the_copy_tells_nothing() -> None:
    assert alone(of_another_event) is True


def source_changed() -> None:
    x = torch.ones(3).pin_memory()
    x.to("cuda", non_blocking=True)
    x.fill_(2)


def source_changed_afterwards() -> None:
    x = torch.ones(3).pin_memory()
    x.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    x.fill_(2)


def test_the_source_of_a_copy_to_the_device_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="has changed locked memory that is still being copied"):
        alone(source_changed)
    alone(source_changed_afterwards)


# ---- devices


def mixed_devices() -> None:
    torch.add(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


def mixed_with_the_host() -> None:
    torch.nn.functional.linear(torch.ones(2, 3, device="cuda"), torch.ones(2, 3))


@pytest.mark.parametrize("body", [mixed_devices, mixed_with_the_host])
def test_operands_are_on_one_device(body: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        alone(body)


def numbers_are_taken_from_anywhere() -> float:
    return float(torch.ones(3, device="cuda:1").mul(torch.tensor(2.0)).sum())


def test_a_number_of_the_host_is_an_operand() -> None:
    assert alone(numbers_are_taken_from_anywhere) == 6.0


def as_numpy() -> None:
    torch.ones(3, device="cuda").numpy()


def test_numpy_does_not_see_the_device() -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        alone(as_numpy)


def event_of_another_device() -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    event.record(torch.cuda.current_stream(1))


def test_an_event_belongs_to_a_device() -> None:
    with pytest.raises(RuntimeError, match=r"does not match (the )?recording stream's device|doesn't match"):
        alone(event_of_another_device)


def times_of_two_devices() -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for device, event in enumerate(events):
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
    events[0].elapsed_time(events[1])


def test_times_are_of_one_device() -> None:
    with pytest.raises(RuntimeError, match="times of events on two devices"):
        alone(times_of_two_devices)


def unrecorded() -> None:
    torch.cuda.Event().synchronize()


def unrecorded_on_a_stream() -> None:
    torch.cuda.current_stream().wait_event(torch.cuda.Event())


@pytest.mark.parametrize("body", [unrecorded, unrecorded_on_a_stream])
def test_nobody_waits_for_an_event_that_was_never_recorded(body: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="an event that was never recorded is waited for"):
        alone(body)


# ---- forks


def _in_a_child(act: Callable[[], object]) -> str:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            said = repr(act())
        except Exception as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        return file.read()


def after_a_fork() -> list[str]:
    before = _in_a_child(lambda: torch.ones(2, device="cuda").tolist())
    x = torch.ones(2, device="cuda")
    acts: list[Callable[[], object]] = [
        lambda: x + 1,
        lambda: torch.empty(2, device="cuda"),
        torch.cuda.current_stream,
        torch.accelerator.current_stream,
        lambda: torch.ones(2).pin_memory(),
        lambda: (torch.cuda.is_available(), torch.cuda.device_count()),
    ]
    return [before, *map(_in_a_child, acts)]


def test_a_process_forked_from_one_that_has_used_the_device_has_none() -> None:
    found = alone(after_a_fork)
    assert isinstance(found, list)
    before, *after, available = found
    assert before == "[1.0, 1.0]"
    assert all("initialization error" in said or "Cannot re-initialize CUDA" in said for said in after), after
    assert available == "(True, 2)"  # as torch goes on saying
