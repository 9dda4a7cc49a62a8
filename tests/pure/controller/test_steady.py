"""In a steady batch the controller learns, and calls no solver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lightning_hetero
from benchmarks.joint.machine import Machine, Phase
from lightning_hetero import LyapunovController
from lightning_hetero.controller.messages import Observation
from lightning_hetero.pipeline.decide.plans import best_plan
from tests.pure.controller.kit import cluster_of, model_of

SOLVERS = str(Path(lightning_hetero.__file__).parent / "solvers")
MODEL = model_of([1e-3] * 8, state_bytes=1e6, output_bytes=1e4)


def calls_into_solvers(act: Callable[[], object]) -> list[str]:
    found: list[str] = []

    def profile(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith(SOLVERS):
            found.append(f"{Path(code.co_filename).name}:{code.co_name}")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.5]], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_steady_batch_calls_no_solver(speeds: list[float], noise: float) -> None:
    cluster, rng = cluster_of(speeds), np.random.default_rng(0)
    plan = best_plan(MODEL, cluster, 16, micro_batch_size=2)
    controller = LyapunovController().start(MODEL, cluster, plan, micro_batch_size=2)
    batch = Machine(MODEL, cluster).batch(plan, Phase(start=0, slowness=(1.0,) * len(speeds)))
    calls: list[list[str]] = []
    for number in range(48):  # the structure is looked at again after 50
        factors = 1.0 + noise * rng.standard_normal(len(speeds))
        work = {rank: s * f for rank, (s, f) in enumerate(zip(batch.work_s, factors, strict=True)) if s > 0.0}
        seen = Observation(batch=number, generation=0, batch_s=batch.seconds * float(factors.max()), work_s=work)
        calls.append(calls_into_solvers(lambda seen=seen: controller.step(seen)))
    assert controller.generation == 0
    assert calls[0], "the first batch is decided on, so that this test can fail"
    assert not any(calls[30:]), calls[30:]
