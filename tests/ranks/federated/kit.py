"""Federated fits of two or three ranks, and what FedAvg by hand makes of the same data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_hetero import FederatedStrategy
from lightning_hetero.federated.decide.policy import LbBsp, Measured
from lightning_hetero.shares.policy import ShareDecision
from tests.ranks.kit import Toy, Weights, rank_trainer, regression, weights

SAMPLES = 64
EXACT = 1e-12


def federated(**kwargs: Any) -> FederatedStrategy:
    kwargs.setdefault("monitor", False)
    kwargs.setdefault("process_group_backend", "gloo")
    kwargs.setdefault("policy", "fedavg")
    kwargs.setdefault("local_steps", 2)
    return FederatedStrategy(**kwargs)


class Plain(Toy):
    """Plain SGD; notes what it trains on and validates with, by index."""

    def __init__(self, momentum: float = 0.0, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.momentum = momentum
        self.batches: list[list[int]] = []
        self.validated: list[Weights] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        if self.trainer.strategy.current_samples() != 0:  # type: ignore[attr-defined]
            self.batches.append(index.tolist())
        loss = self.loss((x, y))
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.validated.append(weights(self.net))
        self.log("val", self.loss(batch[1:]), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def data(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(samples), *regression(samples).tensors)


def own(indices: Sequence[int], batch_size: int, **kwargs: Any) -> DataLoader:
    """A rank's own loader, in the order of the indices."""
    return DataLoader(Subset(data(), list(indices)), batch_size=batch_size, **kwargs)


def fit(
    rank: int, world: int, strategy: Any, loader: Any, *, module: Plain | None = None, ckpt: Any = None, **kwargs: Any
) -> tuple[Plain, Any]:
    module = module or Plain()
    kwargs.setdefault("max_epochs", 1)
    trainer = rank_trainer(rank, world, strategy, **kwargs)
    loaders = loader if isinstance(loader, tuple) else (loader,)
    trainer.fit(module, *loaders, ckpt_path=ckpt)
    return module, trainer


def by_hand(
    clients: Sequence[Sequence[Sequence[int]]],
    steps: int | Sequence[int],
    *,
    make: Callable[[], Plain] = Plain,
    rounds: Callable[[list[nn.Module], list[Any]], None] | None = None,
    whole: TensorDataset | None = None,
    window: int = 1,
    clip: float | None = None,
) -> Weights:
    """FedAvg without any of our code: each client's batches, ``steps`` per round, a mean weighted by samples.

    Args:
        clients: by rank, the indices of each of its batches; a client without any left, or with an empty one, rests.
        steps: local steps of a round, of all clients or of each.
        make: the module.
        rounds: called after each average, with all clients' modules and optimizers.
        whole: what the indices are of.
        window: batches of a local step; the mean of their losses is that of a whole window.
        clip: largest norm of a step's gradient.
    """
    whole = data() if whole is None else whole
    modules = [make() for _ in clients]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    optimizers = [module.configure_optimizers() for module in modules]
    parts = [window * n for n in ([steps] * len(clients) if isinstance(steps, int) else steps)]
    for number in range(max(-(-len(batches) // n) for batches, n in zip(clients, parts, strict=True))):
        used = []
        for module, optimizer, batches, part in zip(modules, optimizers, clients, parts, strict=True):
            mine = [indices for indices in batches[number * part : (number + 1) * part] if indices]
            for start in range(0, len(mine), window):
                optimizer.zero_grad()
                for indices in mine[start : start + window]:
                    _, x, y = whole[list(indices)]
                    (module.loss((x, y)) / window).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
            used.append(sum(map(len, mine)))
        states = [copy.deepcopy(module.state_dict()) for module in modules]
        mean = {k: sum(n * s[k] for n, s in zip(used, states, strict=True)) / sum(used) for k in states[0]}
        for module in modules:
            module.load_state_dict(mean)
        if rounds is not None:
            rounds(modules, optimizers)
    return weights(modules[0])


def chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    return [list(indices[i : i + size]) for i in range(0, len(indices), size)]


class Scripted(LbBsp):
    """Other sizes in every round, whatever was measured; their sum stays."""

    rounds_seen = 0

    def decide(self, measured: Sequence[Measured]) -> ShareDecision | None:
        super().decide(measured)
        self.rounds_seen += 1
        total, world = sum(client for client in self._own), len(self._own)
        moved = 1 + self.rounds_seen % 3
        sizes = [total // world] * world
        sizes[0] += moved
        sizes[-1] -= moved
        self._resumed = tuple(sizes)
        return ShareDecision(shares=self._resumed, changed=True, reason="scripted")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds_seen": self.rounds_seen}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.rounds_seen = state["rounds_seen"]
