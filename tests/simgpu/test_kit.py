"""The kit itself: ranks on simulated GPUs start, share devices, fail loudly."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RankTimeoutError
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim import build


def _devices(rank: int, world: int) -> tuple[int, str, str]:
    x = torch.ones(3, device=f"cuda:{rank % torch.cuda.device_count()}")
    return torch.cuda.device_count(), str((x + 1).device), os.environ["WORLD_SIZE"]


def test_each_rank_has_devices_and_torchruns_variables() -> None:
    assert run_sim_ranks(2, _devices) == [(2, "cuda:0", "2"), (2, "cuda:1", "2")]
    assert run_sim_ranks(2, _devices, gpus=1) == [(1, "cuda:0", "2"), (1, "cuda:0", "2")]


def _fails(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")
    dist.init_process_group("gloo")


def test_what_a_rank_raises_ends_all() -> None:
    with pytest.raises(ValueError, match="of rank 1"):
        run_sim_ranks(2, _fails)


def _waits_for_ever(rank: int, world: int) -> None:
    if rank == 0:
        while True:
            pass


def test_a_late_rank_is_ended_and_shown() -> None:
    with pytest.raises(RankTimeoutError, match="_waits_for_ever"):
        run_sim_ranks(2, _waits_for_ever, timeout_s=2.0)


def _returns_a_tensor_of_the_device(rank: int, world: int) -> Any:
    return {"x": torch.ones(2, device="cuda")}


def test_results_are_on_the_host() -> None:
    with pytest.raises(RuntimeError, match="returns tensors of the host, not of cuda:0"):
        run_sim_ranks(1, _returns_a_tensor_of_the_device)


def _reads_on_the_host(rank: int, world: int) -> None:
    import ctypes

    x = torch.ones(2, device="cuda")
    ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]


def test_host_access_of_device_memory_ends_the_process() -> None:
    with pytest.raises(RuntimeError, match=r"died with exit code -11(.|\n)*_reads_on_the_host"):
        run_sim_ranks(1, _reads_on_the_host)


def _trains(rank: int, world: int, engine: str, options: dict[str, Any]) -> tuple[kit.Weights, dict[str, float]]:
    module = kit.DeepPlain() if engine == "pipeline" else kit.Plain()
    trainer = kit.trainer_on_gpus(world, kit.strategy_of(engine, **options), val_check_interval=5)
    kit.fit_quietly(trainer, module, kit.loader(world), kit.val_loader())
    assert trainer.global_step == kit.STEPS
    return kit.host_weights(module), kit.scalars(trainer)


def test_ddp_on_simulated_gpus_trains_as_one_process_on_the_host() -> None:
    for found, logged in run_sim_ranks(2, _trains, "ddp", {}):
        assert found.distance(kit.oracle(kit.Plain())) < 1e-6
        assert logged["val"] > 0


def test_where_it_cannot_be_simulated_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.why_not() == ""
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.why_not() == "simulated GPUs need a C++ compiler (g++)"
    monkeypatch.setattr(build, "version", lambda name: "2.6.0+cpu")
    assert re.fullmatch(r"simulated GPUs stand on torch [\d.]+ \(constraints.txt\), this is 2.6.0", build.why_not())


def _stack(rank: int, world: int) -> list[str]:
    side = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(side):
        inside = torch.cuda.current_stream() == side
        inside = inside and torch.accelerator.current_stream().stream_id == side.stream_id
        torch.cuda._sleep(30_000_000)  # 20 ms
        slept = torch.cuda.Event(enable_timing=True)
        slept.record()
    early = slept.query()
    begun = time.perf_counter()
    slept.synchronize()
    waited_s = time.perf_counter() - begun
    outside = torch.cuda.current_stream() == torch.cuda.default_stream()
    return [str(inside), str(outside), str(early), str(waited_s > 0.01)]


def test_streams_sleep_and_the_host_does_not() -> None:
    assert run_sim_ranks(1, _stack) == [["True", "True", "False", "True"]]
