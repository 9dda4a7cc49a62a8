"""Plans by what simulated GPUs have left: budgets, cards that ranks share, memory that is taken meanwhile."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.measure import probe
from lightning_hetero.measure.link_probe import LinkProbe
from lightning_hetero.pipeline.decide.plan_memory import beside_bytes, held_bytes
from lightning_hetero.pipeline.fit.plan import fitting
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim.cuda import MEMORY_BYTES, cap

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
    allocated, asked = fitting._allocated, 0

    def stolen(device: torch.device, size_bytes: float) -> object:
        nonlocal asked
        asked += 1
        if steals and rank == 0:  # somebody else takes what there is, and gives it back
            cap(0, int(0.9 * size_bytes) if asked == 1 else _free(budget_bytes))
        return allocated(device, size_bytes)

    module, strategy = kit.DeepPlain(), kit.strategy_of("pipeline", controller=None)
    trainer = kit.trainer_on_gpus(world, strategy)
    with patch.object(fitting, "_allocated", stolen):
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


def memory_by(rank: int, world: int, backend: str) -> tuple[list[float], set[str]]:
    """Returns the memory that plans count with, and what has carried the messages that links were measured with."""
    carriers: set[str] = set()

    class Carried(LinkProbe):
        def __init__(self, group: dist.ProcessGroup, *args: Any) -> None:
            carriers.add(str(dist.get_backend(group)))
            super().__init__(group, *args)

    strategy = kit.strategy_of("pipeline", backend, controller=None)
    trainer = kit.trainer_on_gpus(world, strategy, max_steps=1)
    with patch.object(probe, "LinkProbe", Carried):
        kit.fit_quietly(trainer, kit.DeepPlain(), kit.loader(world))
    return [device.mem_bytes for device in strategy.planned.cluster.devices], carriers


@pytest.mark.long
def test_links_are_measured_over_nccl_where_it_carries_and_what_it_holds_is_left_free() -> None:
    free = 0.9 * MEMORY_BYTES - RESERVE
    for memory, carriers in run_sim_ranks(2, memory_by, "gloo"):
        assert carriers == {"gloo"} and all(0.99 * free < size <= free for size in memory)
    for memory, carriers in run_sim_ranks(2, memory_by, "nccl", nccl=True):
        assert carriers == {"nccl"} and all(0.99 * free < size < free - 1000 for size in memory)
