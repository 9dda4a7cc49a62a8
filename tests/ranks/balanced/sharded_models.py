"""Modules that are sharded: each is right for one process, and changes one thing of `Deep`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from tests.ranks.balanced.sharded_kit import WIDTH, Block, Deep, Sharded
from tests.ranks.exact_models import GanStep, SyncNorm
from tests.ranks.kit import FEATURES


class Groups(Sharded):
    """Two parameter groups, and a scheduler of each step."""

    def configure_optimizers(self) -> Any:
        rest = [*self.first.parameters(), *self.last.parameters()]
        groups = [{"params": self.blocks.parameters(), "lr": 3e-3}, {"params": rest, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Wrapped(Sharded):
    """Activation checkpointing by a wrapper."""

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        for i, block in enumerate(self.blocks):
            self.blocks[i] = checkpoint_wrapper(block)
        super().shard(mesh, **options)


class Recomputed(Deep):
    """Activation checkpointing in the forward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.last(x)


class Reentrant(Recomputed):
    reentrant = True


class Compiled(Sharded):
    """Each block is compiled."""

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        for block in self.blocks:
            block.compile(backend="aot_eager")
        super().shard(mesh, **options)


class Kept(Sharded):
    """The parameters of a block stay whole from its forward to its backward pass."""

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        super().shard(mesh, reshard_after_forward=False)


class Bf16(Sharded):
    """FSDP's own mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()  # torch before 2.13 has no loss of two types

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        super().shard(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


class Hybrid(Sharded):
    """Sharded among pairs of ranks, replicated between the pairs."""

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        super().shard(init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard")))


class TensorParallel(Sharded):
    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        for block in self.blocks:
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index]
        super().shard(mesh, **options)


class Net(nn.Module):
    """`Deep` without Lightning, its output layer tied to nothing."""

    def __init__(self, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = norm()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.norm(self.first(x))))


class Inner(Deep):
    """What most users write: the step calls a network, nobody calls the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.last
        torch.manual_seed(2)
        self.net = self.network().double()

    def network(self) -> nn.Module:
        return Net()

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("nobody calls this")

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class Normed(Inner):
    """Batch statistics couple the ranks; BatchNorm that is not trained does not."""

    optimizer = staticmethod(lambda parameters: torch.optim.SGD(parameters, 0.05))

    def network(self) -> nn.Module:
        return Net(SyncNorm)


class Parts(Deep):
    """The step calls layer by layer."""

    scale: nn.Parameter

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x), batch[1])


class Direct(Parts):
    """A parameter of the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * self.scale, batch[1]))


class Tied(Parts):
    """A layer of the blocks is used before them, too; and two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, WIDTH).double()
        self.other.weight = self.first.weight

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.other(batch[0]).square().mean()


class TiedSharded(Tied):
    configure_model, shard = Sharded.configure_model, Sharded.shard

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return self.last(y) + self.other(x).sum(1, keepdim=True)

    def loss(self, batch: Any) -> Tensor:
        return Deep.loss(self, batch)


class Frozen(Sharded):
    """The first half is not trained, its BatchNorm least of all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(0, nn.Sequential(nn.BatchNorm1d(WIDTH).double(), Block().double()))
        for p in [*self.first.parameters(), *self.blocks[0].parameters()]:
            p.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.blocks[0].eval()


class Manual(Sharded):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.differentiate(self.loss(batch))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class Plain(Manual):
    """Differentiates without Lightning: `ModelParallelStrategy` trains the same."""

    def differentiate(self, loss: Tensor) -> None:
        loss.backward()


class Gan(GanStep, Inner):
    """Two networks with an optimizer and a scheduler each, toggled; two backward passes per step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[call-arg]

    def configure_optimizers(self) -> Any:
        both = [torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.SGD(self.judge.parameters(), 1e-2)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.98) for one in both]


class GanSharded(Gan):
    def configure_model(self) -> None:
        if self.mesh is not None:
            for one in (self.judge, self.net):  # a root would stay whole, with the flags of another optimizer's turn
                if not isinstance(one, FSDPModule):
                    fully_shard(one, mesh=self.mesh, reshard_after_forward=True)


class Sum(Deep):
    """A sum over the batch, divided by ``of``: what the ranks' mean makes of it on that many."""

    of = 1

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0]) / (16 * self.of)


class HalfSum(Sum):
    of = 2


class Tokens(Sharded):
    """Mean over the tokens of sequences of unequal lengths, NaN for a batch without any."""

    def loss(self, batch: Any) -> Tensor:
        x, y, present = batch
        wrong = (self(x).squeeze(-1) - y) ** 2
        return (wrong * present).sum() / present.sum()


class Poisoned(Deep):
    """Gives NaN on a batch that does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dummy = getattr(self.trainer.strategy, "current_samples", lambda: None)() == 0
        return loss * float("nan") if dummy else loss


class HybridPoisoned(Poisoned, Hybrid):
    """The same, where pairs of ranks share the parameters."""


class Logs(Groups):
    """Means, metrics, and all loops."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.absolute = MeanSquaredError(), MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        self.error(y.detach(), batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        loss = nn.functional.mse_loss(y, batch[1])
        self.log("mean", y.detach().mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", y.detach().max(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "y": y.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        y = self(batch[0])
        self.absolute(y, batch[1])
        self.log("absolute", self.absolute)
        self.log("val", nn.functional.mse_loss(y, batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])
