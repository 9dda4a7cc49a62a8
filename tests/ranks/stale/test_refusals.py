"""What the stale engine refuses, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import BoundedStalenessStrategy
from lightning_hetero.optim import UnevenZeroOptimizer
from tests.ranks.exact_models import Manual, Newton
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, quiet_trainer, rank_trainer, regression, stale

pytestmark = pytest.mark.ranks


class Synced(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(6)


class Plain(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(regression(40))


class Gathers(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.all_gather(loss.detach())
        return loss


class Saves(Toy):
    """As a signal handler of the user's own would, wherever the signal finds the program."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.save_checkpoint("never.ckpt")
        return super().training_step(batch, batch_idx)


def loader() -> DataLoader:
    return DataLoader(regression(48), batch_size=8)


def two_loaders() -> Any:
    return [loader(), loader()]


def stream() -> DataLoader:
    return DataLoader(Stream(), batch_size=8)


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu")
    return {"precision_plugin": MixedPrecision("16-mixed", device="cpu", scaler=scaler)}


class Zero(Toy):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


class UnevenZero(Toy):
    def configure_optimizers(self) -> Any:
        return UnevenZeroOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


class StepsLater(Manual):
    """Steps once more where there is no batch."""

    def on_train_epoch_end(self) -> None:
        self.optimizers().step()  # type: ignore[union-attr]


REFUSED: dict[str, tuple[Any, Any, Any, dict[str, Any], str, tuple[str, ...]]] = {
    "LBFGS": (Newton, loader, dict, {}, "TypeError", ("LBFGS", "parameter server", "another optimizer")),
    "SyncBatchNorm": (Synced, loader, dict, {}, "TypeError", ("SyncBatchNorm", "GroupNorm", "hetero_balanced")),
    "ZeRO": (Zero, loader, dict, {}, "TypeError", ("ZeroRedundancyOptimizer", "Use the optimizer that it wraps")),
    "uneven ZeRO": (UnevenZero, loader, dict, {}, "TypeError", ("UnevenZeroOptimizer divides", "it wraps")),
    "step without a batch": (StepsLater, loader, dict, {}, "RuntimeError", ("outside of a training batch",)),
    "sync_batchnorm": (
        Plain, loader, dict, {"sync_batchnorm": True}, "TypeError",
        ("the Trainer's sync_batchnorm=True", "trainer.sync_batchnorm=false"),
    ),
    "16-mixed, manual": (Manual, loader, scaled, {}, "TypeError", ("16-mixed", "manual", "bf16-mixed")),
    "stream": (Toy, stream, dict, {}, "TypeError", ("IterableDataset", "stream='finite'", "hetero_balanced")),
    "two loaders": (Toy, two_loaders, dict, {}, "TypeError", ("several train loaders", "StackDataset")),
    "save": (Saves, loader, dict, {}, "RuntimeError", ("a checkpoint inside training_step", "on_train_batch_end")),
    "collective": (
        Gathers, loader, dict, {}, "RuntimeError", ("all_gather", "inside training_step", "on_train_epoch_end")
    ),
}  # fmt: skip


def refused_job(rank: int, world: int) -> dict[str, tuple[str, str]]:
    said = {}
    for name, (make, data, strategy, trainer, _, _) in REFUSED.items():
        try:
            fit = rank_trainer(rank, world, stale(**{"policy": "bsp", **strategy()}), max_epochs=3, **trainer)
            fit.fit(make(), data())
        except Exception as error:
            said[name] = type(error).__name__, str(error)
    return said


@pytest.mark.stock_ddp("lbfgs", "stale", refused="the server makes the step, and does not have the loss")
@pytest.mark.stock_ddp(
    "sync_batchnorm", "all_gather_step", "stale", refused="ranks do not meet inside a batch"
)  # fmt: skip
@pytest.mark.stock_ddp(
    "precision_mixed_manual", "stale", refused="the loss scale would change within a batch"
)  # fmt: skip
@pytest.mark.stock_ddp("iterable", "stale", refused="needs `stream='finite'`")
@pytest.mark.stock_ddp("no_dataloader", "stale", refused="such batches cannot be divided")
@pytest.mark.stock_ddp("train_loaders", "stale", refused="samples are assigned from one order")
@pytest.mark.stock_ddp("zero", "stale", refused="the server has the state, once")
def test_what_cannot_work_is_refused_with_the_reason() -> None:
    for said in run_ranks(2, refused_job):
        for name, (*_, kind, parts) in REFUSED.items():
            assert said[name][0] in (kind, "RemoteFailureError"), said[name]
            for part in parts:
                assert part in said[name][1], (name, said[name])


@pytest.mark.stock_ddp("ddp_comm_hook", "stale", refused="there is no all-reduce")
def test_communication_hooks_are_refused() -> None:
    with pytest.raises(TypeError, match=r"communication hooks.*no.*here.*compression='bf16'"):
        quiet_trainer(devices=2, strategy=BoundedStalenessStrategy(ddp_comm_hook=allreduce_hook))


@pytest.mark.stock_ddp("model_averaging_period", "stale", refused="the ranks' weights drift apart")
def test_post_local_sgd_is_refused() -> None:
    with pytest.raises(TypeError, match=r"post-localSGD lets the ranks' weights drift.*strategy='ddp'"):
        quiet_trainer(devices=2, strategy=BoundedStalenessStrategy(model_averaging_period=4))
