"""The code around a step, of a sharded model: each program trains as in one process, or is refused with the reason."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.ranks.balanced import sharded_models as models
from tests.ranks.balanced.sharded_kit import Deep, Outcome, Program, Sharded, alone, on_ranks, whole
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES


class GradientNorms(models.TensorParallel):
    """Lightning's norms of each parameter's gradient, and torch's of all: some have another mesh."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.nn.utils.get_total_norm(gradients))


class Reads(Sharded):
    """Reads each gradient, and writes each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.told.append(float(sum(whole(p.grad).abs().sum() for p in self.parameters())))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class Overridden(Sharded):
    """Lightning's hooks around the optimizer, and a scheduler that looks at a metric."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (self.trainer.global_step + 1) / 20)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.03, "norm")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Gathers(Deep):
    """Every rank's outputs, in the step; and another forward pass behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        self.told = float(torch.as_tensor(self.all_gather(y.detach())).sum())
        return {"loss": nn.functional.mse_loss(y, batch[1]), "y": y.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            assert torch.isfinite(self.loss(batch))


class Accumulates(models.Manual):
    """Three batches per step by hand, the gradients of the first two kept whole; and half a batch at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        steps = batch_idx % 3 == 2
        getattr(self, "set_requires_gradient_sync", bool)(steps)
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(nn.functional.mse_loss(self(x), y) * len(x) / len(batch[0]) / 3)
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class Hooked(Sharded):
    """Hooks on modules and, behind the reduction, on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)

    def on_fit_start(self) -> None:
        def halve(parameter: Tensor) -> None:
            parameter.grad = None if parameter.grad is None else parameter.grad * 0.5

        for parameter in self.last.parameters():
            parameter.register_post_accumulate_grad_hook(halve)


class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=1e-3)


class Averages(Callback):
    """An average of the weights, of each rank's parts."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert trainer.strategy.model is trainer.model
        now = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        self.mean = {name: 0.9 * self.mean.get(name, p) + 0.1 * p for name, p in now.items()}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.told = float(sum(whole(value).abs().sum() for value in self.mean.values()))


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = models.Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x), y) + 0.01 * (x @ self.net.first.weight.T).square().mean()


class Method(models.Inner):
    """Calls a method of its network that is not ``forward``, which uses a layer's weight outside of the layer."""

    def network(self) -> nn.Module:
        return Losses()

    def loss(self, batch: Any) -> Tensor:
        return self.net.loss_of(*batch)


class InTurns(models.Inner):
    """A head that no loss uses, and two in turns; a teacher that is not trained; a net that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(FEATURES, 1).double() for _ in range(3))
        self.teacher = models.Net().double().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        with torch.no_grad():
            taught = self.teacher(x)
        wrong = (self.net(x) - taught).square().mean() + self.net(0.5 * x).square().mean()
        return self.loss(batch) + wrong + self.heads[batch_idx % 2](x).square().mean()


class ByHand(models.Parts, models.Plain):
    """Layer by layer, differentiated without Lightning."""

    configure_model = Deep.configure_model


AUTO = {"shard": "auto"}
short = partial(Program, samples=88)  # five full batches and a half, twice
FINDER = partial(LearningRateFinder, num_training_steps=5, update_attr=False)
SCHEDULED = partial(GradientAccumulationScheduler, {0: 1, 1: 2})
PROGRAMS: dict[str, Program] = {
    "reads": short(Reads, callbacks=[Averages]),
    "overridden": short(Overridden, val=True, callbacks=[SCHEDULED, partial(EarlyStopping, "val")]),
    "gathers": short(Gathers, AUTO, {"num_sanity_val_steps": 2, "detect_anomaly": True}),
    "accumulates": Program(Accumulates, samples=96),  # no part of one sample, which has no halves
    "hooked": short(Hooked, callbacks=[Thaws]),
    "method": short(Method, AUTO, {"gradient_clip_val": 0.05}),
    "in turns": short(InTurns, AUTO),
    "by hand": short(ByHand, AUTO),
    "learning rate": short(Deep, AUTO, callbacks=[FINDER]),
}


FOUR = {"norms": Program(GradientNorms, {"tensor_parallel_size": 2}, {"max_epochs": 1}, samples=128)}


@cache
def trained(world: int) -> list[dict[str, Outcome | str]]:
    return run_ranks(world, on_ranks, PROGRAMS if world == 2 else FOUR, timeout_s=300)


@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in PROGRAMS), (4, "norms")])
def test_a_program_trains_as_in_one_process(world: int, name: str) -> None:
    program = (PROGRAMS if world == 2 else FOUR)[name]
    expected = alone(program)
    for rank in trained(world):
        outcome = rank[name]
        assert not isinstance(outcome, str), outcome
        assert outcome.weights.distance(expected.weights) <= program.exact
        assert outcome.metrics[0] == pytest.approx(expected.metrics[0], rel=1e-6)
        if expected.told is not None:
            assert outcome.told == pytest.approx(expected.told, rel=1e-9)
        assert len(set(outcome.samples)) >= 5


# ---- refused before the first batch, or before ranks would wait for each other ---------------------------------


class Outside(Sharded):
    """Forgets the layers around its blocks: under stock each rank trains its own."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=self.mesh)


class Splits(Sharded):
    """Pieces of four samples: as many as a rank's part has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pieces = zip(batch[0].split(4), batch[1].split(4), strict=True)
        return sum(nn.functional.mse_loss(self(x), y) * len(x) for x, y in pieces) / len(batch[0])


class SplitsByHand(models.Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
            self.manual_backward(nn.functional.mse_loss(self(x), y))
        self.optimizers().step()  # type: ignore[union-attr]


class Decides(models.Inner):
    """Uses a layer for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, FEATURES).double()

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.other(batch[0]) if float(batch[0].mean()) > 0 else batch[0], batch[1]))


REFUSED: dict[str, tuple[Program, str]] = {
    "averaging": (Program(Sharded, callbacks=[partial(StochasticWeightAveraging, 1e-2)]), "StochasticWeightAveraging:"),
    "pruning": (Program(Sharded, callbacks=[partial(ModelPruning, "l1_unstructured")]), "ModelPruning: this callback"),
    "outside": (Program(Outside), "first.weight, first.bias, last.weight and 1 more: trained, and not sharded"),
    "sync_batchnorm": (Program(Sharded, trainer={"sync_batchnorm": True}), "ModelParallelStrategy converts no layer"),
    "pieces": (Program(Splits), "do not call the sharded modules equally often"),
    "pieces by hand": (Program(SplitsByHand), "do not call the sharded modules equally often"),
    "a layer for some": (Program(Decides, AUTO), "with parts of 8/8 samples the ranks do not call the sharded"),
}


@cache
def refused() -> list[dict[str, Outcome | str]]:
    return run_ranks(2, on_ranks, {name: program for name, (program, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(name: str) -> None:
    for rank in refused():
        outcome = rank[name]
        assert isinstance(outcome, str) and REFUSED[name][1] in outcome, outcome
        assert "rank 0 has failed" not in outcome, "a rank ended of another's failure, not of the same"
