"""Parameters that are thawed or frozen while training: stock DDP trains the former on each rank by itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.kit import weights
from tests.ranks.strangers import kit

EPOCHS = 5


class Net(LightningModule):
    def __init__(self, grouped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
        self.head = nn.Linear(4, 1).double()
        self.grouped = grouped

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.head(self.body(x)) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters() if self.grouped else self.parameters(), lr=0.1)


class Later(BaseFinetuning):
    """Lightning's own recipe: frozen from the start, thawed in epoch 2, into a parameter group or not."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            if pl_module.grouped:
                self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.1)
            else:
                self.make_trainable(pl_module.body)


class Switching(Callback):
    """Freezes the body in epoch 1, before its first batch, and thaws it in epoch 3 between two batches."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.body.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 3:
            pl_module.body.requires_grad_(True)


class Growing(Callback):
    """Gives the module a layer in epoch 2."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            torch.manual_seed(trainer.global_rank)
            pl_module.head = nn.Sequential(pl_module.head, nn.Linear(1, 1).double())
            trainer.optimizers[0].add_param_group({"params": pl_module.head[1].parameters()})


def data(samples: int = 16) -> TensorDataset:
    """One update per epoch, so that the order of the samples does not matter."""
    torch.manual_seed(4)
    return TensorDataset(torch.randn(samples, 3).double(), torch.linspace(0, 2, samples).double().unsqueeze(1))


SITUATIONS: dict[str, tuple[type[Callback], bool, dict[str, Any]]] = {
    "thawed": (Later, False, {}),
    "thawed into a group": (Later, True, {}),
    "frozen, then thawed": (Switching, False, {}),
    "unused allowed": (Switching, False, {"find_unused_parameters": True}),
    "as views": (Later, False, {"gradient_as_bucket_view": True}),
    "accumulated": (Switching, False, {"accumulate": 2}),
    "in pieces": (Later, False, {"pieces": True}),
    "a new layer": (Growing, False, {}),
}


def changed(rank: int, world: int, engine: str, name: str) -> dict[str, Tensor]:
    """PL#20340: `requires_grad` changes after DDP has wrapped the module."""
    make, grouped, options = SITUATIONS[name]
    options = dict(options)
    accumulate = options.pop("accumulate", 1)
    shares = {"max_samples": [5, 2]} if options.pop("pieces", False) else kit.UNEVEN
    module = Net(grouped)
    trainer = kit.trainer(
        rank, world, engine, {"balanced": {**shares, **options}}, callbacks=[make()], max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data(16 * accumulate), batch_size=16 // world))
    return weights(module)


@pytest.mark.stock_ddp("BaseFinetuning", "balanced")
@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_thawed_or_frozen_later_is_trained_by_all_ranks_together(name: str) -> None:
    first, second = kit.ends(changed, "balanced", name)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    if name != "a new layer":
        torch.testing.assert_close(first, changed(0, 1, "single", name), rtol=0, atol=1e-12)
