"""One rank of the benchmark of compiled modules; started by torchrun, writes what both ranks noted as JSON."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.torchrun import as_rank
from lightning_hetero import LoadBalancedStrategy, Scenario, ThrottleCallback
from lightning_hetero.measure.compiles import CompileWatch

PER_RANK, STEPS, SWAP_AT = 64, 120, 60
SCENARIO = Scenario(speeds=[1.0, 1 / 3], sample_s=0.0005, step_s=0.006, jitter=0.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        net: ``"MLP"`` or ``"convolutions"``.
        dynamic: of ``torch.compile``.
        quantum: of the strategy.
    """

    net: Literal["MLP", "convolutions"]
    dynamic: bool | None
    quantum: int | Literal["auto"]

    @property
    def name(self) -> str:
        return f"{self.net}, dynamic={self.dynamic}, quantum={self.quantum!r}"


CASES = [
    Case(net="MLP", dynamic=None, quantum="auto"),
    Case(net="MLP", dynamic=False, quantum=1),
    Case(net="MLP", dynamic=False, quantum=4),
    Case(net="MLP", dynamic=False, quantum="auto"),
    Case(net="convolutions", dynamic=None, quantum="auto"),
    Case(net="convolutions", dynamic=False, quantum=1),
    Case(net="convolutions", dynamic=False, quantum="auto"),
]


class Model(LightningModule):
    """A small network, compiled before the fit, as users do."""

    def __init__(self, case: Case, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        if case.net == "MLP":
            net = nn.Sequential(nn.Flatten(), nn.Linear(108, 32), nn.Tanh(), nn.Linear(32, 1))
        else:
            net = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1)
            )
        self.net = torch.compile(net, dynamic=case.dynamic, backend=backend)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Notes(Callback):
    """When each step began, its samples, and whether this rank compiled in it."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []
        self.samples: list[int] = []
        self.compiled: list[bool] = []
        self._watch = CompileWatch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._watch.ask()
        self.starts_s.append(time.perf_counter())
        self.samples.append(len(batch[0]))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.compiled.append(self._watch.ask())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts_s.append(time.perf_counter())
        self._watch.close()


def train(case: Case, backend: str) -> dict[str, Any]:
    """Runs one training; returns what this rank has noted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(PER_RANK * 2 * STEPS, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    notes = Notes()
    speeds = list(SCENARIO.speeds)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=LoadBalancedStrategy(process_group_backend="gloo", quantum=case.quantum, monitor=False),
        callbacks=[notes, ThrottleCallback(SCENARIO.change(speeds[::-1], at_step=SWAP_AT))],
    )  # fmt: skip
    trainer.fit(Model(case, backend), DataLoader(TensorDataset(x, x.flatten(1)[:, :1]), batch_size=PER_RANK))
    return {
        "steps_s": [b - a for a, b in zip(notes.starts_s, notes.starts_s[1:], strict=False)],
        "samples": notes.samples,
        "compiled": [int(one) for one in notes.compiled],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def measure(backend: str, repeats: int, cases: int) -> dict[str, Any]:
    """Returns what was noted by case, repeat and rank."""
    result: dict[str, list[list[dict[str, Any]]]] = {case.name: [] for case in CASES[:cases]}
    for _ in range(repeats):
        for case in CASES[:cases]:
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, train(case, backend))
            result[case.name].append(everyone)
    return result



if __name__ == "__main__":
    _path, _backend, _repeats, _cases = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(_backend, int(_repeats), int(_cases)))
