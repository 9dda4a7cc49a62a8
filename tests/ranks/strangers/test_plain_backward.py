"""Manual optimization with `loss.backward()`: stock DDP trains each rank by itself, balanced all ranks together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.strangers import kit


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net, self.other = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) + self.other(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Summed(Plain):
    """Two backward passes make one update; the gradient of the input is nobody's parameter."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        x.square().mean().backward()
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()


class Parts(Plain):
    """Each of two optimizers has a loss of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, net in zip(optimizers, (self.net, self.other), strict=True):
            optimizer.zero_grad()
            (net(batch[0]) - batch[1]).square().mean().backward()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.net, self.other)]


def trained(rank: int, world: int, engine: str, make: type[Plain], unused: bool) -> float:
    """PL's manual optimization: the docs ask for `manual_backward`, and nothing says so when it is forgotten."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 3).double(), torch.linspace(0, 3, 16).double().unsqueeze(1))
    module = make()
    one = copy.deepcopy(module)
    kit.trainer(rank, world, "single", max_epochs=2).fit(one, DataLoader(data, batch_size=16))
    options = {"balanced": {**kit.UNEVEN, "find_unused_parameters": unused}, "stale": {"policy": "bsp"}}  # none late
    kit.trainer(rank, world, engine, options, max_epochs=2).fit(module, DataLoader(data, batch_size=8))
    assert torch.Tensor.backward.__module__ == "torch._tensor"
    return kit.difference(module, one)


@pytest.mark.stock_ddp("manual_backward", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
@pytest.mark.parametrize(("make", "unused"), [(Plain, False), (Summed, False), (Parts, True)])
def test_ranks_train_together(make: type[Plain], unused: bool, engine: str) -> None:
    assert max(kit.ends(trained, engine, make, unused)) < 1e-12


def test_a_part_of_the_parameters_needs_the_flag() -> None:
    said = kit.refusal(trained, "balanced", Parts, False)
    assert "reaches 2 of 4 trained parameters" in said and "find_unused_parameters_true" in said
