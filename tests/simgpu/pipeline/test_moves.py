"""Layers that move from one simulated GPU to another while the pipeline trains."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks.pipeline.replan_kit import Scripted, group, heard, plan
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim import nccl

_MOVES: dict[int, Any] = {
    2: {
        2: plan(group([0, 1], [0, 4, 6], 16)),
        5: plan(group([0], [0, 6], 10), group([1], [0, 6], 6)),
        7: plan(group([1, 0], [0, 3, 6], 16)),
    },
    4: {
        2: plan(group([2, 0], [0, 4, 6], 11), group([1, 3], [0, 2, 6], 5)),
        5: plan(group([0, 1, 2, 3], [0, 1, 2, 4, 6], 16)),
        7: plan(group([3, 1], [0, 3, 6], 8), group([2, 0], [0, 3, 6], 8)),
    },
}


def _moving(rank: int, world: int, first: str) -> tuple[kit.Weights, list[str]]:
    module = kit.DeepPlain()
    controller = Scripted(_MOVES[world])
    strategy = kit.strategy_of("pipeline", "nccl", plan=first, controller=controller)
    with heard(at_once=True):
        kit.fit_quietly(kit.trainer_on_gpus(world, strategy), module, kit.loader(world))
    if rank == 0:
        times = [seconds for seen in controller.observed for own in seen.layer_s.values() for seconds in own]
        assert times and all(seconds > 0.0 for seconds in times), "layers are timed on their devices"
    return kit.host_weights(module), [replan.cancelled for replan in strategy.replans]


@pytest.mark.parametrize("first", ["1x2", pytest.param("2x2", marks=pytest.mark.long)])
def test_layers_move_from_device_to_device_where_kernels_run_one_after_the_other(first: str) -> None:
    expected = kit.oracle(kit.DeepPlain())
    for found, cancelled in run_sim_ranks(4 if first == "2x2" else 2, _moving, first, nccl=True, serial=True):
        assert cancelled == [""] * 3
        assert found.distance(expected) < 1e-6


def _blocked(rank: int, world: int, first: str) -> tuple[kit.Weights, list[str]]:
    """As with CUDA_LAUNCH_BLOCKING=1: who begins an operation goes on when it has ended."""
    issue = nccl._Nccl._issue

    def until_ended(self: Any, *args: Any, **options: Any) -> Any:
        work = issue(self, *args, **options)
        work.ended.wait()
        return work

    with patch.object(nccl._Nccl, "_issue", until_ended):
        return _moving(rank, world, first)


@pytest.mark.long
@pytest.mark.parametrize("first", ["1x2", "2x2"])
def test_the_host_may_wait_for_each_operation_that_it_begins(first: str) -> None:
    expected = kit.oracle(kit.DeepPlain())
    for found, cancelled in run_sim_ranks(4 if first == "2x2" else 2, _blocked, first, nccl=True):
        assert cancelled == [""] * 3
        assert found.distance(expected) < 1e-6
