"""Compiled modules on simulated GPUs: what dynamo and AOT autograd make of them; Triton needs a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks


def _trains_compiled(rank: int, world: int, engine: str, backend: str) -> kit.Weights:
    module = kit.Plain()
    module.net.compile(backend=backend)
    trainer = kit.trainer_on_gpus(world, kit.strategy_of(engine))
    kit.fit_quietly(trainer, module, kit.loader(world))
    return kit.host_weights(module)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
@pytest.mark.parametrize("engine", ["ddp", "balanced"])
def test_a_compiled_module_trains_as_it_is(engine: str, backend: str) -> None:
    torch.manual_seed(0)
    wanted = kit.oracle(kit.Plain())
    for found in run_sim_ranks(2, _trains_compiled, engine, backend):
        assert found.distance(wanted) <= 1e-6
