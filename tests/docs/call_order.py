"""``python -m tests.docs.call_order [--all ENGINE]``: the orders of calls on docs/reference/architecture.md, traced.

Two ranks train a small model; what rank 0 calls in one steady batch, on its training thread, is taken down. `STOPS` has
what a reader should find of hundreds of calls, and says what happens there; their order, and that they are called at
all, is the trace's. ``--all`` prints every function in the order of its first call.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero import (
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
)
from tests.docs.kit import REFERENCE
from tests.ranks.harness import RankEnvironment, run_ranks

__all__ = ["PAGE", "STOPS", "page_with", "traced"]

PACKAGE = Path(lightning_hetero.__file__).resolve().parent
PAGE = REFERENCE / "architecture.md"
BATCH = 31
PLAN = {"groups": [{"ranks": [0, 1], "cuts": [0, 3, 6], "samples": 32, "micro_batches": [8, 8, 8, 8]}]}
STRATEGIES = {
    "balanced": LoadBalancedStrategy,
    "stale": BoundedStalenessStrategy,
    "pipeline": partial(HeteroPipelineStrategy, backbone="model", plan=PLAN),
    "federated": partial(FederatedStrategy, local_steps=4),
}
STOPS: dict[str, dict[str, str]] = {}
"""{engine: {"file:function": what happens there}}, twelve at most."""


class Model(LightningModule):
    """Six layers and a head, so that two stages have three layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.model(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Recorder(Callback):
    """Takes down the functions of ours that are called between two batches' ends, in the order of their first calls."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace("<locals>.", "")
            self.seen.setdefault(f"{path.relative_to(PACKAGE).as_posix()}:{name}")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        batch = args[-1]
        if batch in (BATCH - 1, BATCH):
            sys.setprofile(self._profile if batch == BATCH - 1 else None)


def fit(rank: int, world_size: int, engine: str) -> list[str]:
    """Trains for some batches; returns what this rank has called."""
    recorder = Recorder()
    rows = 16 * (BATCH + 5) * (1 if engine == "federated" else world_size)
    data = TensorDataset(torch.randn(rows, 16), torch.randn(rows, 1))
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=STRATEGIES[engine](), max_epochs=1, callbacks=[recorder],
        plugins=[RankEnvironment(rank, world_size)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data, batch_size=16))
    return list(recorder.seen)


def traced(engine: str) -> list[str]:
    """Returns "file:function" of all that rank 0 calls in one batch, in the order of the first calls."""
    return run_ranks(2, fit, engine)[0]


def lines(engine: str) -> str:
    """Returns an engine's stops in the order of the trace.

    Raises:
        ValueError: one of them is not called.
    """
    calls, stops = traced(engine), STOPS[engine]
    if missed := set(stops) - set(calls):
        raise ValueError(f"{engine} does not call {sorted(missed)} in a steady batch")
    found = [(*call.partition(":"), stops[call]) for call in calls if call in stops]
    return "\n".join(f"{n}. `{file}` `{name}`: {what}." for n, (file, _, name, what) in enumerate(found, 1))


def page_with(engine: str, page: str) -> str:
    """Returns a page's text with the engine's order of calls in the place of its own."""
    mark = rf"(<!-- calls {engine}: python -m tests\.docs\.call_order -->\n).*?(\n<!-- end -->)"
    text = lines(engine)
    page, count = re.subn(mark, lambda found: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.S)
    assert count == 1, f"{PAGE.name} has no mark for {engine}"
    return page


if __name__ == "__main__":
    if "--all" in sys.argv:
        print("\n".join(traced(sys.argv[-1])))
    else:
        for name in STOPS:
            PAGE.write_text(page_with(name, PAGE.read_text()))
