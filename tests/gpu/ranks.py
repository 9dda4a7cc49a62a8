"""Ranks on GPUs: processes that stay alive between tests, several of them on one card where there are fewer cards.

They differ from `tests.ranks.harness` in three things. They are spawned: what has been forked from a process that has
asked for CUDA has none. They have no process group, so that Lightning makes it as for users, with ``device_id``.
And a pool in which a rank has failed is not used again, because an error of CUDA's stays in its process.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from tests.ports import free_port
from tests.ranks import harness, rank_process
from tests.ranks.harness import RankEnvironment

T = TypeVar("T")


class SharedCards(CUDAAccelerator):
    """Lightning's accelerator for GPUs, on which rank r has card r modulo their number.

    Lightning refuses ``devices=[0, 0]``, and NCCL two ranks on a card: it takes ``process_group_backend="gloo"``.
    """

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in devices]


class CardEnvironment(RankEnvironment):
    """Tells a Trainer its place, and where Lightning makes the process group."""

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])


class _Cards(harness._Pool):
    """Ranks without a process group, spawned with some environment variables of their own."""

    def __init__(self, world_size: int, environment: Mapping[str, str]) -> None:
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # torch and CUDA read theirs when they are loaded
        try:
            super().__init__(world_size, mp.get_context("spawn"), _serve)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _serve(rank: int, world_size: int, control: Connection, lifeline: Connection) -> None:
    rank_process.serve(rank, world_size, control, lifeline, rank_process.in_its_folder)


def run_card_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout_s: float = 100.0,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Calls ``fn(rank, world_size, *args)`` on every rank, as `tests.ranks.harness.run_ranks` does.

    Args:
        world_size, fn, timeout_s: as there.
        environment: variables that the ranks' processes begin with; a pool for each.

    Returns:
        The results, by rank.
    """
    environment = environment or {}
    pool = harness.pool_of(("cards", world_size, *environment.items()), lambda: _Cards(world_size, environment))
    try:
        return pool.run(_at, (free_port(), fn, *args), timeout_s)
    except BaseException:
        pool.kill()
        raise


def _at(rank: int, world_size: int, port: int, fn: Callable[..., T], *args: Any) -> T:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return fn(rank, world_size, *args)
