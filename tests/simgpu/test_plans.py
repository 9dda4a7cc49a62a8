"""Plans by what simulated GPUs have left: budgets, shared cards, memory that another process takes meanwhile."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from lightning_hetero.pipeline.decide.plans import beside_bytes, held_bytes
from lightning_hetero.pipeline.fit import planning
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim.cuda import cap

RESERVE = 0.5 * 2**30  # see `budget_bytes`
LITTLE = 7500.0  # bytes; the state of the whole model takes 7952


def _free(budget_bytes: float, ranks: int = 1) -> int:
    return int(ranks * (budget_bytes + RESERVE) / 0.9) + ranks


def planned(
    rank: int, world: int, budget_bytes: float, steals: bool
) -> tuple[list[tuple[int, ...]], list[float], list[float], int, kit.Weights]:
    """Returns the groups, the memory that plans count with, what the plan takes, and how many were allocated."""
    cards = torch.cuda.device_count()
    for card in range(cards):
        cap(card, _free(budget_bytes, world // cards))
    allocated, asked = planning._allocated, 0

    def stolen(device: torch.device, size_bytes: float) -> object:
        nonlocal asked
        asked += 1
        if steals and rank == 0:  # somebody else takes what there is, and gives it back
            cap(0, int(0.9 * size_bytes) if asked == 1 else _free(budget_bytes))
        return allocated(device, size_bytes)

    module, strategy = kit.DeepPlain(), kit.strategy_of("pipeline", controller=None)
    trainer = kit.trainer_on_gpus(world, strategy)
    with patch.object(planning, "_allocated", stolen):
        kit.fit_quietly(trainer, module, kit.loader(world))
    found = strategy.planned
    sizes = held_bytes(found.plan, found.model, world), beside_bytes(found.plan, found.model, world)
    memory = [device.mem_bytes for device in found.cluster.devices]
    takes = [held + beside for held, beside in zip(*sizes, strict=True)]
    return [group.ranks for group in found.plan.groups], memory, takes, asked, kit.host_weights(module)


@pytest.mark.parametrize(
    ("gpus", "steals"),
    [(2, False), pytest.param(1, False, marks=pytest.mark.long), pytest.param(2, True, marks=pytest.mark.long)],
    ids=["cards of their own", "one card", "taken meanwhile"],
)
def test_a_model_that_no_rank_has_room_for_is_divided(gpus: int, steals: bool) -> None:
    expected = kit.oracle(kit.DeepPlain())
    for groups, memory, takes, asked, trained in run_sim_ranks(2, planned, LITTLE, steals, gpus=gpus):
        assert [len(ranks) for ranks in groups] == [2]  # the state of the whole model alone is larger
        assert all(0 < size <= LITTLE + 1 for size in takes) and all(size <= LITTLE + 1 for size in memory)
        assert trained.distance(expected) < 1e-6
        assert asked == (2 if steals else 1)
