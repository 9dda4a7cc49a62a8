"""What tests of pipelines' checkpoints share: a module with state to save, its loaders, one process, a comparison."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.kit import Weights, quiet_trainer, regression, weights
from tests.ranks.pipeline.kit import Deep

SAMPLES, BATCH, EPOCHS, PER_EPOCH = 96, 16, 3, 6  # divides evenly: stock DDP pads nothing, so all engines train alike
EXACT = 1e-12


class Saved(Deep):
    """With a schedule, a buffer that changes in a layer, and parameter groups that are not in the module's order."""

    def __init__(self) -> None:
        super().__init__()
        self.model[4].register_buffer("seen", torch.zeros((), dtype=torch.int64))  # type: ignore[index]
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1
        self.model[4].seen += 1  # type: ignore[index,operator] (on any rank: elsewhere it has no memory)

    def configure_optimizers(self) -> Any:
        rest = [*self.model.parameters(), *self.before.parameters()]
        groups = [{"params": self.head.parameters(), "lr": 3e-3}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
        schedule = {"scheduler": ExponentialLR(optimizer, 0.97), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def train(batch_size: int, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(regression(samples), batch_size=batch_size, shuffle=True)


def validate() -> DataLoader:
    return DataLoader(regression(20, seed=9), batch_size=5)


def alone(
    module: Deep | None = None,
    ckpt: str | None = None,
    *,
    validated: bool = False,
    samples: int = SAMPLES,
    **options: Any,
) -> tuple[Weights, int, Trainer]:
    """One process, with the global batches of stock DDP's sampler."""
    module = module or Saved()
    data = regression(samples)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)  # type: ignore[arg-type]
    trainer = quiet_trainer(devices=1, **{"max_epochs": EPOCHS, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = [DataLoader(data, batch_size=BATCH, sampler=sampler), *([validate()] if validated else [])]
        trainer.fit(module, *loaders, ckpt_path=ckpt)
    return weights(module), getattr(module, "batches", 0), trainer


def differences(ours: Any, stock: Any, path: str = "") -> list[str]:
    """Where two checkpoints differ, tensors by more than rounding."""
    if isinstance(stock, Tensor):
        kinds = {(t.dtype, t.shape, t.device) if isinstance(t, Tensor) else None for t in (ours, stock)}
        same = len(kinds) == 1 and torch.allclose(ours, stock, rtol=EXACT, atol=1e-14)
        return [] if same else [f"{path}: {ours} for {stock}"]
    if type(ours) is not type(stock):
        return [f"{path}: {type(ours)} for {type(stock)}"]
    if isinstance(stock, dict):
        if list(ours) != list(stock):
            return [f"{path}: keys {list(ours)} for {list(stock)}"]
        return [d for key in stock for d in differences(ours[key], stock[key], f"{path}.{key}")]
    if isinstance(stock, list | tuple):
        if len(ours) != len(stock):
            return [f"{path}: {ours} for {stock}"]
        return [d for i, (a, b) in enumerate(zip(ours, stock, strict=True)) for d in differences(a, b, f"{path}[{i}]")]
    return [] if ours == stock else [f"{path}: {ours!r} for {stock!r}"]
