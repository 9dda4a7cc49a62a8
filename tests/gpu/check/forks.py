"""What a fork after CUDA's first use does to optimizers: the server of the stale engine is such a process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

from lightning_hetero.measure.device import no_device_in_this_process
from tests.gpu.check.found import detail, found


def _step(name: str) -> None:
    matrix = torch.nn.Parameter(torch.ones(3, 3))
    matrix.grad = torch.full((3, 3), 0.5)
    optimizer: Any = getattr(torch.optim, name)([matrix], lr=0.01)
    if name == "SparseAdam":
        matrix.grad = matrix.grad.to_sparse()
    for _ in range(2):
        optimizer.step(*([lambda: torch.tensor(1.0)] if name == "LBFGS" else []))


def _names() -> list[str]:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return sorted(k.__name__ for k in kinds if issubclass(k, torch.optim.Optimizer) and k is not torch.optim.Optimizer)


def _in_child(prepare: Callable[[], None]) -> dict[str, str]:
    """Steps each class in one forked process; returns what they say."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        said = {}
        torch.set_num_threads(1)  # those of the parent are not here
        prepare()
        for name in _names():
            try:
                _step(name)
                said[name] = "steps"
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}".split("\n")[0][:100]
        with os.fdopen(writer, "wb") as file:
            file.write(pickle.dumps(said))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


def optimizers() -> None:
    """Passes if every class of `torch.optim` steps in a forked process that is told that it has no device."""
    torch.set_num_threads(1)
    torch.ones(1, device="cuda").sum().item()
    raw = _in_child(lambda: None)
    told = _in_child(no_device_in_this_process)
    detail(raw=raw, told=told)
    found(classes=len(raw), **{"fail in a plain fork": sum(said != "steps" for said in raw.values())})
    found(**{"fail in ours": sum(said != "steps" for said in told.values())})
    if failed := {name: said for name, said in told.items() if said != "steps"}:
        raise SystemExit(str(failed))
