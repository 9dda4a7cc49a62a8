"""Faults planted into the engines' order of work are found: the matrix would not pass with them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks.harness import RankTimeoutError
from tests.simgpu.cases import Case, Found, expected, trained
from tests.simgpu.harness import run_sim_ranks


def _nothing(*_: Any, **__: Any) -> None: ...


# Each of these does nothing any more, in all of the run.
_HOST = "the host waits for no event"
_STREAMS = "no stream waits for an event"
_ALLOCATOR = "nobody tells the allocator of other streams"
_LANDED = "stale's compute stream does not wait for gradients on their way"
FAULTS = {
    _HOST: ("torch.cuda.Event.synchronize",),
    _STREAMS: ("torch.cuda.Event.wait", "torch.cuda.Stream.wait_event", "torch.cuda.Stream.wait_stream"),
    _ALLOCATOR: ("torch.Tensor.record_stream",),
    _LANDED: ("lightning_hetero.stale.runtime.work.gradient_writer.Image.hold",),
}


def _with_fault(rank: int, world: int, case: Case, fault: str) -> Found:
    for name in FAULTS[fault]:
        patch(name, _nothing).start()
    return trained(rank, world, case)


def _is_found(case: Case, fault: str) -> str:
    """Returns how the fault shows itself; empty: not at all."""
    nccl = case.backend == "nccl"
    try:
        results = run_sim_ranks(case.world, _with_fault, case, fault, nccl=nccl, timeout_s=60.0)
    except RankTimeoutError:
        return "it hangs"
    except (RuntimeError, AssertionError, ValueError) as error:
        return str(error)
    pairs = zip(results, expected(case), strict=True)
    far = [found.weights.distance(wanted.weights) for found, wanted in pairs]
    return "" if all(distance <= 1e-6 for distance in far) else f"the weights are others: {far}"


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case("pipeline", plan="1x2"), _HOST),
        (Case("pipeline", plan="1x2"), _STREAMS),
        (Case("pipeline", plan="1x2"), _ALLOCATOR),
        (Case("pipeline", "nccl", plan="1x2"), _HOST),
        (Case("pipeline", "nccl", plan="1x2"), _STREAMS),
        (Case("stale"), _STREAMS),
        (Case("stale"), _LANDED),
    ],
    ids=str,
)
def test_a_planted_fault_is_found(case: Case, fault: str) -> None:
    assert _is_found(case, fault)
