"""A plan's memory is taken once before training: another plan where it cannot be had, or one error on all ranks.

The device is the CPU, taken for one that runs ahead, and what may be allocated is up to the test.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_hetero.base.run import gloo_group
from lightning_hetero.cluster import equal_cluster, override_cluster
from lightning_hetero.measure.device import Device
from lightning_hetero.pipeline.decide.plans import beside_bytes, best_plan, held_bytes
from lightning_hetero.pipeline.fit.plan import fitting
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import AffineCost, Cluster, LayerCost, ModelCost, PipelinePlan
from tests.ranks.harness import run_ranks

CPU = torch.device("cpu")
SECOND = AffineCost(fixed_s=0.0, per_sample_s=1e-3)
FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
MODEL = ModelCost(
    layers=tuple(
        LayerCost(name=str(i), forward=SECOND, backward=SECOND, param_bytes=1e4, state_bytes=4e4, output_bytes=100.0)
        for i in range(6)
    ),
    before=LayerCost(name="before", forward=FREE, backward=FREE, output_bytes=100.0),
    head=LayerCost(name="head", forward=FREE, backward=FREE),
)


class Ahead(Device):
    asynchronous = True


def planned(rank: int, world: int, most: dict[int, float]) -> tuple[str, list[float], list[float]]:
    """Returns what went wrong; what rank 0's plans took of each rank; what this rank has tried to get."""
    tried: list[float] = []
    peaks: list[float] = []

    def empty(size: int, **_: Any) -> Tensor:
        tried.append(size)
        if size > most.get(rank, 1e9):
            raise torch.OutOfMemoryError("the device is full")
        return torch.ones(1)

    def plan_for(cluster: Cluster) -> PipelinePlan:
        plan = best_plan(MODEL, cluster, 12, max_groups=1)
        if not plan.ok:
            raise ValueError(f"no plan fits: {plan.reason}")
        return plan

    channel = SideChannel(gloo_group(timedelta(seconds=60)))
    cluster = override_cluster(equal_cluster(world), mem_bytes=[1e6] * world)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(fitting, "device_of", lambda device: Ahead(device)))
            stack.enter_context(patch.object(fitting, "torch", SimpleNamespace(empty=empty, uint8=torch.uint8)))
            plan, _ = fitting.plan_with_room(plan_for, MODEL, cluster, device=CPU, channel=channel)
        peaks = [a + b for a, b in zip(held_bytes(plan, MODEL, world), beside_bytes(plan, MODEL, world), strict=True)]
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", peaks, tried
    finally:
        gc.collect()
        channel.close()
    return "", peaks, tried


def test_what_can_be_had_is_not_planned_again() -> None:
    for rank, (problem, peaks, tried) in enumerate(run_ranks(2, planned, {})):
        assert problem == "" and tried == [int(peaks[rank])]


def test_a_rank_that_does_not_get_its_part_gets_a_smaller_one() -> None:
    first, second = run_ranks(2, planned, {1: 1e5})
    assert first[0] == second[0] == "" and first[1] == second[1]
    assert len(second[2]) == len(first[2]) > 1
    assert second[2][0] > 1e5 >= second[2][-1] == int(second[1][1])


@pytest.mark.parametrize("most", [0.0, 1.0])
def test_where_no_plan_is_left_all_ranks_say_who_lacked_what(most: float) -> None:
    for problem, _, _ in run_ranks(2, planned, {0: most, 1: most}):
        assert "no plan fits" in problem and "because rank 0 (" in problem, problem
        assert ") did not get " in problem and "the device is full" in problem, problem
