"""hetero_balanced on simulated GPUs: what users count, and what a step in pieces saves, makes no host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks

STEPS = kit.CountSyncs.SKIPPED + kit.CountSyncs.COUNTED + 1


class Remembers(kit.Plain):
    """Has buffers, of two types, that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.steps: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Any) -> Tensor:
        if self.training:
            self.mean.lerp_(batch[0].mean(0), 0.1)
            self.steps.add_(1)
        return super().loss(batch)


def positive(batch: Any) -> float:
    """A weight that is read from the batch: of one on the device, only by waiting for it."""
    return 1.0 + float((batch[0] > 0).sum())


def waits(rank: int, world: int, options: dict[str, Any]) -> dict[str, float]:
    count = kit.CountSyncs()
    strategy = kit.strategy_of("balanced", "nccl", monitor=False, **options)
    trainer = kit.trainer_on_gpus(world, strategy, max_steps=STEPS, callbacks=[count])
    kit.fit_quietly(trainer, Remembers(), kit.loader(world, pin_memory=True))
    assert count.steps == count.COUNTED
    return count.per_step()


def test_a_batch_is_counted_on_the_host() -> None:
    plain, counted = (
        run_sim_ranks(2, waits, options, nccl=True)[0]
        for options in ({}, {"batch_weight": positive, "batch_cost": positive})
    )
    assert counted == plain


def test_pieces_save_buffers_on_the_device() -> None:
    plain, pieces = (run_sim_ranks(2, waits, options, nccl=True)[0] for options in ({}, {"max_samples": 4}))
    assert pieces == plain
