"""What a pipeline cannot do is refused, with the reason and a way out, and on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.optim import UnevenZeroOptimizer
from tests.ranks.harness import run_ranks
from tests.ranks.kit import quiet_trainer, rank_trainer, regression
from tests.ranks.pipeline.kit import Deep, pipeline
from tests.ranks.pipeline.variants import Branched, TwoCalls


@pytest.mark.stock_ddp("ddp_comm_hook", "pipeline", refused="there is no all-reduce")
@pytest.mark.stock_ddp("model_averaging_period", "pipeline", refused="the ranks' weights drift apart")
@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"ddp_comm_hook": lambda state, bucket: None}, TypeError, "communication hooks change DDP's all-reduce"),
        ({"ddp_comm_state": object()}, TypeError, "Drop ddp_comm_hook, ddp_comm_wrapper and ddp_comm_state"),
        ({"ddp_comm_wrapper": print}, TypeError, "which is not used here"),
        ({"model_averaging_period": 4}, TypeError, "post-localSGD"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0 must be a whole number >= 1"),
        ({"max_groups": 1.5}, ValueError, "max_groups=1.5 must be"),
        ({"depth": "deep"}, ValueError, "depth='deep' must be one of"),
        ({"stream": "finite"}, ValueError, "stream='finite' must be one of (None, 'shared'): one loader feeds all"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=re.escape(reason)):
        quiet_trainer(devices=2, strategy=HeteroPipelineStrategy(**arguments))


class Manual(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Deep):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Lbfgs(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Zero(Deep):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam)


class UnevenZero(Deep):
    def configure_optimizers(self) -> Any:
        return UnevenZeroOptimizer(self.parameters(), torch.optim.Adam)


class NoOptimizer(Deep):
    def configure_optimizers(self) -> Any:
        return None


class Never(Deep):
    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.head(self.before(batch[0])), batch[1])


class Twice(TwoCalls):
    backbone_calls = 1


class Once(Deep):
    backbone_calls = 2


class Saves(Deep):
    """As a signal handler of the user's own would, wherever the signal finds the program."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.save_checkpoint("never.ckpt")
        return super().training_step(batch, batch_idx)


class NoLoss(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)


class ManyLosses(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.model(self.before(batch[0])))


class Iterated(Deep):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Hidden(Deep):
    """The layers are nowhere by a usual name."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = self.model
        del self.model

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.head(self.tower(self.before(batch[0]))), batch[1])


class Opaque:
    """A batch of which nobody knows what belongs to which sample."""

    def __init__(self, pairs: Any) -> None:
        self.x, self.y = torch.utils.data.default_collate(pairs)


class OpaqueBatches(Deep):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch.x, batch.y))


# Rank 1 leads; layers are on both.
PLAN = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 6], "samples": 16, "micro_samples": 8}]}
REFUSED: dict[str, tuple[Callable[[], Deep], dict[str, Any], dict[str, Any], str]] = {
    # module, the strategy's arguments, the Trainer's and "loader", the reason
    "manual": (Manual, {}, {}, "Manual optimizes manually.*strategy='hetero_balanced'"),
    "backward": (OwnBackward, {}, {}, r"OwnBackward overrides backward\(\).*strategy='hetero_balanced'"),
    "sync_batchnorm": (Deep, {}, {"sync_batchnorm": True}, "Trainer's sync_batchnorm=True.*trainer.sync_batchnorm=f"),
    "LBFGS": (Lbfgs, {}, {}, "LBFGS needs inner products"),
    "ZeRO": (Zero, {}, {}, "ZeroRedundancyOptimizer divides.*Use the optimizer that it wraps"),
    "uneven ZeRO": (UnevenZero, {}, {}, "UnevenZeroOptimizer divides.*Use the optimizer that it wraps"),
    "no optimizer": (NoOptimizer, {}, {}, "configure_optimizers returned none"),
    "never": (Never, {}, {}, "called the backbone 0 times, expected 1"),
    "twice": (Twice, {}, {}, "called the backbone at least 2 times, expected 1"),
    "once": (Once, {}, {}, "called the backbone 1 times, expected 2"),
    "saves": (Saves, {}, {}, "a checkpoint inside training_step.*call trainer.save_checkpoint in on_train_batch_end"),
    "no loss": (NoLoss, {}, {}, "training_step returned None on rank 1: to skip a batch so is not supported"),
    "many losses": (ManyLosses, {}, {}, r"must be a tensor with one element, got shape \(8, 1\)"),
    "loaders": (Deep, {}, {"loader": "two"}, "the train loader is a dict of loaders.*StackDataset"),
    "iterator": (Iterated, {}, {}, "dataloader_iter"),
    "hidden": (Hidden, {"backbone": None}, {}, r"backbone.*pipeline_layers\(\)"),
    "branched": (Branched, {}, {}, "chain.*pipeline_layers"),
    "opaque": (OpaqueBatches, {}, {"loader": "opaque"}, r"split_batch\(batch, sizes\)"),
}


def make_loader(kind: str) -> Any:
    if kind == "two":
        return {name: DataLoader(regression(32), batch_size=8) for name in "ab"}
    if kind == "opaque":
        return DataLoader(regression(32), batch_size=8, collate_fn=Opaque)
    return DataLoader(regression(32), batch_size=8, shuffle=True)


def job(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, (make, arguments, options, _) in REFUSED.items():
        options = dict(options)
        loader = make_loader(options.pop("loader", ""))
        trainer = rank_trainer(rank, world, pipeline(PLAN, **arguments), max_epochs=1, **options)
        try:
            trainer.fit(make(), loader)
            found[name] = "trained"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.stock_ddp("zero", "pipeline", refused="the state is divided already")
@pytest.mark.stock_ddp("lbfgs", "pipeline", refused="each rank has the gradients of its own layers")
@pytest.mark.stock_ddp(
    "manual", "manual_backward", "precision_mixed_manual", "pipeline",
    refused="several micro-batches are in `training_step` at a time",
)  # fmt: skip
@pytest.mark.stock_ddp("backward", "pipeline", refused="each stage has its own backward pass")
@pytest.mark.stock_ddp("sync_batchnorm", "pipeline", refused="ranks run different layers")
@pytest.mark.stock_ddp("dataloader_iter", "pipeline", refused="such batches cannot be divided")
@pytest.mark.stock_ddp("train_loaders", "pipeline", refused="one batch is cut into micro-batches")
@pytest.mark.stock_ddp("no_optimizer", "pipeline", refused="nothing to train; `validate`, `test` and `predict` work")
def test_modules_and_trainers() -> None:
    ranks = run_ranks(2, job, timeout_s=100.0)
    for name, (*_, reason) in REFUSED.items():
        for found in ranks:
            assert re.search(reason, found[name], re.DOTALL), (name, found[name])
