"""A server is forked after its rank has used a device, which it must not touch: nor may what torch's optimizers ask."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_hetero.stale.policy import by_name
from lightning_hetero.stale.runtime import fork
from lightning_hetero.stale.runtime.fork import ServerProcess
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.start import Address, ServerSettings, connect, start_server
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.base import Ask, RemoteFailureError, Request, Say
from lightning_hetero.transport.flags import PushFlag

CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls not in (Optimizer, LBFGS, SparseAdam)  # refused
]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after a fork: torch says that there is a device, and whoever asks for more of it gets an error."""

    def fails(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fails)
    monkeypatch.setattr(torch.cuda, "_lazy_init", fails)
    yield


def start(cls: type[Optimizer]) -> tuple[nn.Linear, Optimizer, list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Linear(3, 4, bias=False)
    return model, cls(model.parameters(), lr=0.01), [torch.randn(4, 3) for _ in range(2)]  # type: ignore[call-arg]


def server_of(model: nn.Module, optimizer: Optimizer) -> tuple[FlatLayout, ServerProcess, Address]:
    layout = FlatLayout.of(list(model.named_parameters()), optimizers=[optimizer])
    process, address = start_server(
        layout=layout, parameters=list(model.parameters()), buffers=[], optimizers=[optimizer],
        settings=ServerSettings(policy=by_name("bsp")), ranks=[0], near=[0], far=[], ahead=0, state={},
        host="127.0.0.1", timeout=timedelta(seconds=30),
    )  # fmt: skip
    return layout, process, address


def served(cls: type[Optimizer]) -> Tensor:
    """Returns what comes of steps in a server, as a rank makes them."""
    model, optimizer, gradients = start(cls)
    layout, process, address = server_of(model, optimizer)
    link = connect(address, 0, timedelta(seconds=30))
    worker = Worker(link, layout, list(model.parameters()), optimizers=[optimizer])
    try:
        worker.pull()
        worker.begin_epoch(0, [2, 4])
        for global_step, gradient in enumerate(gradients):
            grant = worker.claim(0, global_step)
            assert grant.kind is Say.ASSIGNED
            worker.pull()
            model.weight.grad = gradient
            pushed = Request(
                kind=Ask.PUSH, flags=PushFlag.FINAL, global_step=global_step, assignment=grant.assignment, samples=2,
                weight=2.0, steps=1,
                zeroes=1,
            )  # fmt: skip
            worker.push(pushed, lambda: 0.1)
        worker.pull()
        worker.detach()
        worker.leave()
        return model.weight.detach()
    finally:
        worker.link.close()
        process.stop(5.0)


def test_a_server_frees_nothing_of_its_ranks_device(tmp_path: Path) -> None:
    """Where another stream has used the memory, freeing it asks CUDA, which ends a forked process."""
    model, optimizer, gradients = start(torch.optim.AdamW)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    model.weight.grad = gradients[0]
    optimizer.step()
    state = optimizer.state[model.weight]
    here = os.getpid()

    def freed(name: str) -> None:
        if os.getpid() != here:
            (tmp_path / name).touch()

    held = {"weight": model.weight.data, "gradient": gradients.pop(0), "lr": optimizer.param_groups[0]["lr"], **state}
    for name, tensor in held.items():
        weakref.finalize(tensor.untyped_storage(), freed, name)
    del held, state, tensor
    _, process, _ = server_of(model, optimizer)
    process.stop(5.0)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cls", CLASSES)
def test_every_optimizer_of_torchs_steps_in_a_server(cls: type[Optimizer]) -> None:
    found = served(cls)
    model, optimizer, gradients = start(cls)
    with pytest.MonkeyPatch.context() as healthy:
        healthy.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        healthy.setattr(torch.cuda, "is_available", lambda: False)
        for gradient in gradients:
            model.weight.grad = gradient
            optimizer.step()
    assert torch.equal(found, model.weight.detach())


@pytest.mark.usefixtures("poisoned")
def test_without_being_told_that_there_is_no_device_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "no_device_in_this_process", lambda: None)
    with pytest.raises(RemoteFailureError, match="re-initialize CUDA"):
        served(torch.optim.AdamW)
