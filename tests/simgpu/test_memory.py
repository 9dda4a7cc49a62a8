"""Memory of simulated devices: counted as torch counts it, and real `torch.OutOfMemoryError` where it is short."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.ranks.kit import regression
from tests.ranks.pipeline.replan_kit import group, plan
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim.cuda import cap
from tests.simgpu.sim.native import lib

BATCH, STEPS = 512, 8
DATA = regression(BATCH * STEPS, dtype=torch.float32)


def _counts(rank: int, world: int) -> tuple[list[int], str]:
    found = [torch.cuda.memory_allocated()]
    x = torch.ones(1000, device="cuda")
    view = x[10:]
    found.append(torch.cuda.memory_allocated())
    del x
    found.append(torch.cuda.memory_allocated())
    del view
    found.append(torch.cuda.memory_allocated())
    found.append(torch.cuda.max_memory_allocated())
    cap(0, 10_000)
    try:
        torch.ones(3000, device="cuda")
    except torch.OutOfMemoryError as error:
        return found, str(error)
    return found, ""


def test_memory_is_counted_in_blocks_of_torchs_allocator() -> None:
    (found, said), = run_sim_ranks(1, _counts)
    assert found == [0, 4096, 4096, 0, 4096]
    assert said.startswith("CUDA out of memory. Tried to allocate")


class _Short(Callback):
    """After two batches rank 0's device has only part of the room that these took."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        device = pl_module.device.index
        if batch_idx == 1:
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        if batch_idx == 2 and trainer.global_rank == 0:
            taken = torch.cuda.max_memory_allocated(device) - self.before
            cap(device, torch.cuda.memory_allocated(device) + int(0.6 * taken))


def _trains_in_little_room(rank: int, world: int, engine: str, options: dict[str, Any]) -> tuple[kit.Weights, int]:
    module = kit.DeepPlain() if engine == "pipeline" else kit.Plain()
    strategy = kit.strategy_of(engine, **options)
    trainer = kit.trainer_on_gpus(world, strategy, max_steps=STEPS, callbacks=[_Short()])
    kit.fit_quietly(trainer, module, kit.loader(world, batch=BATCH, data=DATA))
    return kit.host_weights(module), lib().failures(rank)


def test_balanced_goes_on_in_smaller_pieces() -> None:
    wanted = kit.oracle(kit.Plain(), batch=BATCH, data=DATA, max_steps=STEPS)
    results = run_sim_ranks(2, _trains_in_little_room, "balanced", {})
    assert results[0][1] > 0
    for found, _ in results:
        assert found.distance(wanted) <= 1e-6


@pytest.mark.parametrize("engine", ["ddp", "pipeline"])
def test_others_end_with_the_cause(engine: str) -> None:
    options = {"plan": plan(group([1, 0], [0, 2, 6], BATCH, 128))} if engine == "pipeline" else {}
    with pytest.raises(RuntimeError, match="out of memory"):
        run_sim_ranks(2, _trains_in_little_room, engine, options, timeout_s=60.0)
