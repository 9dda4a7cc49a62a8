"""What is trained, and how far a training has come: digits, a small CNN, Adam whose learning rate falls to 0."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from benchmarks.peers.cases import BATCHES, DISTANCE_AFTER, EVERY, GLOBAL_BATCH, SAMPLES
from lightning_hetero.demo import TOTAL_SAMPLES, DigitsCNN, DigitsData


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Returns training and validation set."""
    data = DigitsData(val_samples=TOTAL_SAMPLES - SAMPLES)
    data.setup("fit")
    train, validation = data.train_dataloader().dataset, data.val_dataloader().dataset
    assert isinstance(train, TensorDataset) and isinstance(validation, TensorDataset)
    return train, validation


def net_of(seed: int) -> nn.Module:
    """Returns the model, without Lightning."""
    torch.manual_seed(seed)
    return DigitsCNN().net


def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


def schedule_of(optimizer: Optimizer, updates: int) -> LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)


def recipe(parameters: Iterable[nn.Parameter], updates: int) -> tuple[Optimizer, LRScheduler]:
    """Returns stock DDP's optimizer and schedule."""
    optimizer = optimizer_of(parameters)
    return optimizer, schedule_of(optimizer, updates)


def order_of(seed: int, epoch: int) -> list[int]:
    """Returns the samples of an epoch in torch's DistributedSampler's order."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


class Curve:
    """This rank's copy of the model every few updates, with the time; looked at when the training is over.

    Attributes:
        points: updates so far, seconds since the beginning, all parameters.
        fit_s: how long the training took [s].
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float, Tensor]] = []
        self.fit_s = 0.0
        self._began_s, self._due = 0.0, EVERY

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def running_s(self) -> float:
        return time.perf_counter() - self._began_s

    def look(self, updates: int, parameters: Iterable[nn.Parameter]) -> None:
        if updates >= self._due:
            self._keep(updates, self.running_s(), parameters)
            self._due = updates - updates % EVERY + EVERY

    def end(self) -> None:
        """The last update is made."""
        self.fit_s = self.running_s()

    def close(self, updates: int, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the model as it is in the end."""
        self._keep(updates, self.fit_s, parameters)

    def _keep(self, updates: int, at_s: float, parameters: Iterable[nn.Parameter]) -> None:
        self.points.append((updates, at_s, parameters_to_vector(parameters).detach().clone()))


def judged(curve: Curve) -> list[list[float]]:
    """Returns updates, seconds, validation loss and accuracy of every look."""
    images, labels = datasets()[1].tensors
    net = net_of(0)
    rows: list[list[float]] = []
    with torch.no_grad():
        for updates, at_s, vector in curve.points:
            vector_to_parameters(vector, net.parameters())
            logits = net(images)
            right = (logits.argmax(1) == labels).float().mean()
            rows.append([updates, at_s, float(cross_entropy(logits, labels)), float(right)])
    return rows


def distance(curve: Curve, seed: int, updates: int) -> float | None:
    """Returns how far the model is from one process' after `DISTANCE_AFTER` updates, to the way that one went.

    Args:
        curve: of the training.
        seed: of weights and order.
        updates: of the whole training, for the schedule.
    """
    found = [vector for done, _, vector in curve.points if done == DISTANCE_AFTER]
    if not found:
        return None
    images, labels = datasets()[0].tensors
    net = net_of(seed)
    optimizer, schedule = recipe(net.parameters(), updates)
    first = parameters_to_vector(net.parameters()).detach().clone()
    for update in range(DISTANCE_AFTER):
        epoch, batch = divmod(update, BATCHES)
        rows: Any = order_of(seed, epoch)[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
        optimizer.zero_grad()
        cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    alone = parameters_to_vector(net.parameters()).detach()
    return float((found[0] - alone).norm() / (alone - first).norm())
