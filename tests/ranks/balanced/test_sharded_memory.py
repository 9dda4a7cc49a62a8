"""A rank that runs out of memory with a sharded model: the weights are those of one process that has enough."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_hetero import ShardedBalancedStrategy
from tests.ranks.balanced.memory_kit import BATCH, EPOCHS, EXACT, SAMPLES, Limits, Outcome, Wall, fitted
from tests.ranks.balanced.sharded_kit import goes_on_without_memory
from tests.ranks.exact_models import PoisonedDummy, Tokens, sequences, tokens_of
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Scripted, Toy, Weights, regression, single

pytestmark = goes_on_without_memory


class Sharded(Toy):
    """Shards its layers, and what is left of it."""

    def configure_model(self) -> None:
        if self.trainer.world_size > 1 and isinstance(self.trainer.strategy, ShardedBalancedStrategy):
            assert self.device_mesh is not None
            self.shard(self.device_mesh["data_parallel"])

    def shard(self, mesh: Any) -> None:
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)


class Replicated(Sharded):
    """Each half of the ranks holds the whole model."""

    def shard(self, mesh: Any) -> None:
        super().shard(init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicas", "shards")))


class Parallel(Sharded):
    """Two ranks compute each layer together."""

    def shard(self, mesh: Any) -> None:
        assert self.device_mesh is not None
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        super().shard(mesh)


class ShardedTokens(Sharded, Tokens):
    pass


class Poisoned(Sharded, PoisonedDummy):
    pass


class Checkpointed(Sharded):
    """Its activations are computed again; its layers have no root in common."""

    def shard(self, mesh: Any) -> None:
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(checkpoint(self.net, x, use_reentrant=False), y)


class Twice(Sharded):
    """Uses each parameter twice, and returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.net(x) + self.net(-2 * x), y), "rows": x}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["rows"].shape == batch[0].shape and not outputs["rows"].requires_grad


class OwnBackward(Sharded):
    """A backward pass that is no plain one."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3 * loss).backward()


class Logs(Sharded):
    """Logs in each way there is; `rows` are counted by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torchmetrics.SumMetric()
        self.steps: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        self.log("early", x.mean(), on_step=True, on_epoch=True, sync_dist=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        for kind in ("max", "min", "sum"):
            self.log(kind, getattr(x, kind)(), reduce_fx=kind, on_step=False, on_epoch=True, sync_dist=True)
        self.rows(torch.full((len(x),), 1.0))
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += [float(self.trainer.callback_metrics[name]) for name in ("early_step", "loss_step")]


def sharded(**kwargs: Any) -> ShardedBalancedStrategy:
    made = {"policy": Scripted(), "monitor": False, "process_group_backend": "gloo", "exchange_every": 1}
    return ShardedBalancedStrategy(**{**made, **kwargs})


def whole(module: nn.Module) -> Weights:
    return Weights({k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in module.state_dict().items()})


def job(
    rank: int, world: int, make: Any, where: str, limits: Limits, args: dict[str, Any], trainer: dict[str, Any]
) -> Outcome:
    module = make()
    wall = Wall(module, where, limits.get(rank))
    data = sequences(SAMPLES) if isinstance(module, Tokens) else None
    fit, samples, told = fitted(rank, world, module, sharded(**args), data, **trainer)
    logged = {k: float(v) for k, v in fit.callback_metrics.items()}
    logged |= {f"step {i}": value for i, value in enumerate(getattr(module, "steps", ()))}
    return whole(module), samples, wall.failures, told, logged


THREE = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}

CASES: dict[str, tuple[int, Any, str, Limits, dict[str, Any], dict[str, Any]]] = {
    "forward, accumulation, clipping": (2, Sharded, "forward", {1: 4}, {}, THREE),
    "backward, accumulation, clipping": (2, Sharded, "backward", {1: 4}, {}, THREE),
    "forward, all ranks, dict": (2, Twice, "forward", {0: 3, 1: 4}, {}, {}),
    "backward, all ranks, dict": (2, Twice, "backward", {0: 3, 1: 4}, {}, {}),
    "forward, checkpointed, two roots": (2, Checkpointed, "forward", {1: 4}, {}, {}),
    "backward, tokens": (2, ShardedTokens, "backward", {1: 4}, {"batch_weight": tokens_of}, {}),
    "forward, tokens": (2, ShardedTokens, "forward", {1: 4}, {"batch_weight": tokens_of}, {}),
    "forward, own backward": (2, OwnBackward, "forward", {1: 4}, {}, {}),
    "backward, own backward": (2, OwnBackward, "backward", {1: 4}, {}, {}),
    "forward, replicas": (4, Replicated, "forward", {1: 2, 2: 3}, {}, THREE),
    "backward, replicas": (4, Replicated, "backward", {1: 2, 2: 3}, {}, THREE),
    "dummies that are NaN": (4, Poisoned, "forward", {}, {"min_samples": 0}, THREE),
    "dummies that are NaN, backward": (4, Poisoned, "backward", {1: 2}, {"min_samples": 0}, THREE),
    "learned in the first steps": (2, Sharded, "forward", {1: 4}, {"max_samples": "auto"}, THREE),
    "planned": (2, Sharded, "forward", {0: 3, 1: 3}, {"max_samples": 3}, THREE),
    "planned, tensor-parallel": (
        4, Parallel, "forward", {}, {"max_samples": 3, "tensor_parallel_size": 2, "global_batch_size": BATCH}, THREE),
    "planned, tokens": (2, ShardedTokens, "forward", {0: 3, 1: 3}, {"max_samples": 3, "batch_weight": tokens_of}, {}),
    "planned, cut again": (2, Twice, "forward", {1: 2}, {"max_samples": 3}, {}),
    "planned, cut again, backward": (2, Twice, "backward", {1: 2}, {"max_samples": 3}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short(
    "planned, tokens", "backward, replicas", "forward, all ranks, dict", "learned in the first steps",
    "backward, own backward", "forward, accumulation, clipping", "forward, checkpointed, two roots", "planned",
)
def test_weights_are_those_of_one_process(name: str) -> None:
    world, make, where, limits, args, trainer = CASES[name]
    outcomes = run_ranks(world, job, make, where, limits, args, trainer)
    expected = make()
    data = sequences(SAMPLES) if issubclass(make, Tokens) else regression(SAMPLES)
    single(expected, data, BATCH, **{"max_epochs": EPOCHS, **trainer})
    for rank, (trained, samples, failures, told, _) in enumerate(outcomes):
        assert trained.distance(whole(expected)) <= EXACT
        planned = args.get("max_samples") == 3
        assert bool(failures) == bool(told) == (rank in limits and (not planned or limits[rank] < 3))
        assert not failures or (max(samples) > limits[rank] and failures <= 4), "it knows what does not fit"


@cache
def logged_with_memory() -> list[Outcome]:
    return run_ranks(2, job, Logs, "forward", {}, {}, {})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_logged_values_are_those_of_whole_batches(where: str) -> None:
    short, enough = run_ranks(2, job, Logs, where, {1: 4}, {}, {}), logged_with_memory()
    assert short[1][2] and not enough[1][2]
    for mine, theirs in zip(short, enough, strict=True):
        assert mine[4] == pytest.approx(theirs[4], rel=1e-12)
    assert short[0][4]["rows"] == SAMPLES


# ---- what smaller pieces do not cure --------------------------------------------------------------------------


class Talks(Sharded):
    """Asks the others how they are, before or behind the wall."""

    first = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.first:
            self.all_gather(torch.zeros(1))
        loss = self.loss(batch)
        self.all_gather(loss.detach())
        return loss


class TalksLater(Talks):
    first = False


class Kept(Sharded):
    def shard(self, mesh: Any) -> None:
        super().shard(mesh)
        self.net.set_reshard_after_backward(False)  # type: ignore[operator]


class Whole(Sharded):
    """Its batches have a part that nobody can cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, torch.zeros(len(batch[0]) + 1)] if self.trainer.training else batch


INCURABLE: Mapping[str, tuple[Any, str, int, str]] = {
    "one sample": (Sharded, "forward", 0, "not even as few samples fit as there can be"),
    "one sample, backward": (Sharded, "backward", 0, "not even as few samples fit as there can be"),
    "talked before": (Talks, "forward", 4, "training_step had already communicated with the other ranks"),
    "talks behind": (TalksLater, "forward", 4, "training_step communicates with the other ranks"),
    "talks in pieces": (TalksLater, "backward", 4, "once per piece on this rank and once on the others"),
    "kept": (Kept, "forward", 4, "set_reshard_after_backward(False)"),
    "no way to cut": (Whole, "forward", 4, "it is not known which dimension is that of the samples"),
}


def incurable_job(rank: int, world: int) -> dict[str, str]:
    """Every rank fails in the same place, so that none waits for another and one job does for all cases."""
    told: dict[str, str] = {}
    for name, (make, where, limit, _) in INCURABLE.items():
        module = make()
        Wall(module, where, limit)
        with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as error:
            fitted(rank, world, module, sharded())
        told[name] = str(error.value)
    return told


def test_what_smaller_pieces_do_not_cure_is_raised_with_the_cause_and_the_reason() -> None:
    for told in run_ranks(2, incurable_job):
        for name, (*_, reason) in INCURABLE.items():
            assert "no room for" in told[name] and reason in told[name], (name, told[name])
