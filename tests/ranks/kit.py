"""Models, data and runs shared by the tests of the engines; the oracle is a single-process Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_hetero import (
    BalancePolicy,
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
)
from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import RankEnvironment

FEATURES = 6


ENGINES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "balanced": (LoadBalancedStrategy, {}),
    "stale": (BoundedStalenessStrategy, {"policy": "bsp"}),
    "pipeline": (HeteroPipelineStrategy, {"backbone": "net"}),
    "federated": (FederatedStrategy, {"local_steps": 2}),
}
"""Every engine's strategy, with what it needs to train a `Toy`; a pipeline's groups besides."""


def regression(samples: int = 400, seed: int = 3, dtype: torch.dtype = torch.float64) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=g, dtype=dtype)
    y = (x @ torch.arange(1.0, FEATURES + 1, dtype=dtype)).unsqueeze(1).sin()
    return TensorDataset(x, y)


class Toy(LightningModule):
    """A float64 MLP with Adam; subclasses change one thing each."""

    def __init__(self, dtype: torch.dtype = torch.float64, lr: float = 1e-2) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * 0.3)
        self.lr = lr
        self.seen: list[list[float]] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Scripted(BalancePolicy):
    """Changes the shares at every record, in a pattern that ignores the measurements."""

    def urgent(self, samples: Sequence[int], compute_s: Sequence[float]) -> bool:
        return True

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        super().observe(records)
        n, total = len(records), self.limits.total // self.limits.quantum
        low = 0 if min(self.limits.lower) == 0 else 1
        weights = [(self._seen * 7 + 5 * r * r + 3 * r) % 11 + (0 if low == 0 and (self._seen + r) % 3 == 0 else 1)
                   for r in range(n)]
        from lightning_hetero.solvers import apportion

        self.shares = tuple(
            s * self.limits.quantum for s in apportion([float(w) for w in weights], total, lower=low)
        )
        return ShareDecision(shares=self.shares, changed=True, reason="scripted")


class Weights(dict[str, Tensor]):
    """A state dict that knows its relative distance to another."""

    def distance(self, other: dict[str, Tensor]) -> float:
        assert self.keys() == other.keys()
        up = sum(float(((self[k] - other[k]).double() ** 2).sum()) for k in self)
        return (up / max(1e-300, sum(float((other[k].double() ** 2).sum()) for k in other))) ** 0.5


def quiet_trainer(**kwargs: Any) -> Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 4,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**options, **kwargs})


def rank_trainer(rank: int, world: int, strategy: Any, **kwargs: Any) -> Trainer:
    return quiet_trainer(devices=world, strategy=strategy, plugins=[RankEnvironment(rank, world)], **kwargs)


def balanced(**kwargs: Any) -> LoadBalancedStrategy:
    kwargs.setdefault("policy", Scripted())
    kwargs.setdefault("monitor", False)
    kwargs.setdefault("process_group_backend", "gloo")
    kwargs.setdefault("exchange_every", 1)
    return LoadBalancedStrategy(**kwargs)


def stale(**kwargs: Any) -> BoundedStalenessStrategy:
    kwargs.setdefault("monitor", False)
    kwargs.setdefault("process_group_backend", "gloo")
    return BoundedStalenessStrategy(**kwargs)


def single(
    module: LightningModule,
    data: Dataset,
    global_batch: int,
    *,
    loader: Callable[..., DataLoader] = DataLoader,
    loader_args: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Trainer:
    """Trains on one device with the global batches that stock DDP's sampler would form."""
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(devices=1, **kwargs)
        trainer.fit(module, loader(data, batch_size=global_batch, sampler=sampler, **(loader_args or {})))
    return trainer


def weights(module: nn.Module) -> Weights:
    return Weights({k: v.detach().clone() for k, v in module.state_dict().items()})
