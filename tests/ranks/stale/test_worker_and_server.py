"""Workers with a parameter server, in threads and on a scripted clock."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.decide.policy import Bsp, Flexible, Saps
from lightning_hetero.stale.runtime.start import serve
from lightning_hetero.transport.base import RemoteFailureError, Reply, ServerLostError
from tests.ranks.stale.kit import Script, Setting, Trainee, automatic, ends_of, threads
from tests.ranks.stale.note import mlp, sgd
from tests.ranks.transport.in_process import InProcess

pytestmark = pytest.mark.usefixtures("float64")


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def constant(rank: int, samples: int, now_s: float) -> float:
    return 1.0


def test_the_server_tells_the_threshold_of_its_policy() -> None:
    setting = Setting(mlp(), sgd, Saps(threshold=4), 1)
    grants: list[Reply] = []

    def body(trainee: Trainee) -> None:
        trainee.worker.begin_epoch(0, [8])
        grants.append(trainee.worker.claim(0, 0))

    Script(
        setting, automatic(torch.zeros(8, 5), torch.zeros(8, 2), loss), body, workers=1, work_s=constant
    ).run()
    assert grants[0].flags == 4


def test_state_and_metrics_reach_a_worker() -> None:
    x, y = torch.randn(24, 5), torch.randn(24, 2)
    seen: dict[str, Any] = {}

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ends_of(24, 6))
        met = trainee.worker.meet(1, "the end")
        assert list(met.alive) == [0, 1]
        if trainee.rank == 0:
            seen["metrics"] = met.counts.as_dict()
            seen["notices"] = met.notices
            seen["state"] = trainee.worker.state()
        trainee.worker.meet(2)

    setting = Setting(mlp(), sgd, Bsp(), 2)
    with threads(setting, automatic(x, y, loss), body, workers=2):
        pass
    assert seen["notices"] == []
    assert seen["metrics"]["samples"] == {"0": 12, "1": 12}
    assert seen["metrics"]["staleness"] == {"0": 24} and seen["metrics"]["stale_fraction"] == 0.0
    state = seen["state"]
    momentum = state["optimizers"][0]["state"][0]["momentum_buffer"]
    assert torch.equal(
        momentum, setting.optimizers[0].state[next(setting.model.parameters())]["momentum_buffer"]
    )
    assert (state["version"], state["coordinator"]["tick"]) == (4, 4)


def test_a_killed_worker_raises_and_the_other_goes_on() -> None:
    x, y = torch.randn(24, 5), torch.randn(24, 2)
    lost: list[int] = []
    dead, running = threading.Event(), threading.Event()

    def die(trainee: Trainee) -> None:
        running.wait()  # until there is a transport to kill by
        trainee.worker.begin_epoch(0, ends)
        trainee.worker.claim(0, 0)
        transport.kill(1)
        with pytest.raises(ServerLostError, match="killed"):
            trainee.worker.push()
        lost.append(1)
        trainee.worker.abort("never raises")
        raise Dead

    def body(trainee: Trainee) -> None:
        if trainee.rank == 1:
            try:
                die(trainee)
            finally:
                dead.set()
        dead.wait()
        trainee.epoch(0, ends)

    class Dead(Exception):
        pass

    ends = ends_of(24, 6)
    setting = Setting(mlp(), sgd, Flexible(), 2)
    with pytest.raises(Dead), threads(setting, automatic(x, y, loss), body, workers=2) as transport:
        running.set()
    assert lost == [1]
    assert setting.coordinator.version == len(ends)


def test_a_server_that_fails_says_why_before_it_ends() -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1)
    setting.optimizers[0].register_step_pre_hook(broken)
    transport = InProcess(1, setting.layout.slot_bytes, setting.layout.bytes)
    server = setting.serve_on(transport.listener)
    trainee = setting.trainee(0, transport.link(0), automatic(torch.randn(4, 5), torch.randn(4, 2), loss))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(server, transport.listener, lambda: 0.0)
        except ArithmeticError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with pytest.raises(RemoteFailureError, match=r"failed in the parameter server: ArithmeticError: no such norm"):
        trainee.epoch(0, [4])
    thread.join()
    assert len(errors) == 1
    transport.listener.close()
    with pytest.raises(ServerLostError):
        trainee.worker.claim(0, 0)


def broken(*_: Any) -> None:
    raise ArithmeticError("no such norm")


def test_a_server_without_workers_ends_when_its_starter_is_gone() -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1)
    transport = InProcess(1, setting.layout.slot_bytes, setting.layout.bytes)
    server = setting.serve_on(transport.listener)
    answers = iter([False, False, True])
    serve(server, transport.listener, lambda: 0.0, orphaned=lambda: next(answers), look_s=0.001)
    assert next(answers, None) is None
    transport.listener.close()
