"""Models of the stale engine's exactness tests: each is right for one process and changes one thing."""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.predictors import Predictor
from lightning_hetero.types import AffineCost
from tests.ranks.data.indexed import indexed
from tests.ranks.exact_models import Gan, Manual, TwoHeads
from tests.ranks.kit import Toy, regression


class WithOptimizer(Toy):
    """Any optimizer by name."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.name)(self.parameters(), **self.options)


class Signs(torch.optim.Optimizer):
    """A user's optimizer: momentum, applied by its sign, and a count of its own in the state."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), count=0)
                state["count"] += 1
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                p.add_(torch.tanh(state["mean"] * 50), alpha=-group["lr"] / state["count"] ** 0.5)
        return loss


class UserOptimizer(Toy):
    def configure_optimizers(self) -> Any:
        return Signs(self.parameters(), lr=0.02)


class PerEpoch(Toy):
    """A scheduler stepped every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class OneCycle(Toy):
    """Learning rate and momentum go up and down, every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15, cycle_momentum=True)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class OwnClipping(Toy):
    """Clips through the module's hook, more and more."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = 0.05 / (1 + self.global_step)
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class ZeroByModule(Toy):
    """Zeroes by the module, not by the optimizer."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


class Decaying(TwoHeads):
    """Heads in turns under weight decay and momentum: a missing gradient must not become a zero."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class Frozen(Toy):
    """The first layer is frozen, and the optimizer has it nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        next(iter(self.net.children())).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Unfreezing(Toy):
    """Begins with the last layer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class Unfreeze(BaseFinetuning):
    """Adds the first layer to the optimizer at the second epoch, as users of Lightning do."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=5e-3)


class Tied(Toy):
    """Two layers share their weights."""

    def __init__(self) -> None:
        super().__init__()
        first, tanh, last = self.net.children()
        torch.manual_seed(7)
        middle = nn.Linear(16, 16, dtype=torch.float64)
        again = nn.Linear(16, 16, dtype=torch.float64)
        again.weight = middle.weight
        self.net = nn.Sequential(first, tanh, middle, nn.Tanh(), again, nn.Tanh(), last)


class ChannelsLast(Toy):
    """Convolutions whose weights are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.net = nn.Sequential(
            nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 8, (2, 1), padding=(1, 0)), nn.Tanh(), nn.Conv2d(8, 4, (3, 1)),
            nn.Flatten(), nn.Linear(4, 1),
        ).to(torch.float64, memory_format=torch.channels_last)  # type: ignore[call-overload]


class Norm(Toy):
    """BatchNorm whose output is only looked at, so that the weights do not depend on how the batch was split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64, affine=False)

    def loss(self, batch: Any) -> Tensor:
        self.norm(batch[0])
        return super().loss(batch)

    def on_train_epoch_end(self) -> None:
        pickle.dumps(self.net), pickle.dumps(self.norm)  # as a checkpoint does with one that is a hyperparameter
        assert not self.norm._forward_hooks and not self.norm._forward_pre_hooks


class GanByParts(Gan):
    """Nothing is toggled: the maker's backward leaves gradients on the judge, which its part's ``zero_grad`` drops."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        maker, judge = self.optimizers()  # type: ignore[misc]
        logits = nn.functional.binary_cross_entropy_with_logits
        self.net.zero_grad()
        fooled = self.judge(self.net(x))
        self.manual_backward(logits(fooled, torch.ones_like(fooled)))
        maker.step()
        self.judge.zero_grad()
        real, fake = self.judge(y), self.judge(self.net(x).detach())
        self.manual_backward(logits(real, torch.ones_like(real)) + logits(fake, torch.zeros_like(fake)))
        judge.step()


class ManualClip(Manual):
    """Manual optimization that clips."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        optimizer.step()


class ManualSchedule(Manual):
    """Manual optimization that steps schedulers every batch and every epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.lr_schedulers()[0].step()  # type: ignore[index]

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step()  # type: ignore[index,call-arg]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler
        return [optimizer], [schedule.ExponentialLR(optimizer, 0.95), schedule.ExponentialLR(optimizer, 0.7)]


class Indexed(Toy):
    """Batches carry the samples' indices; notes what was trained on, and leaves out what counts nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, x, y = batch
        if getattr(self.trainer.strategy, "current_samples", lambda: len(index))():
            self.seen.append(index.tolist())
        return super().training_step((x, y), batch_idx)


def with_nan(samples: int, at: int) -> TensorDataset:
    """Indexed regression data with one sample that has no finite gradient."""
    index, x, y = indexed(samples).tensors
    x = x.clone()
    x[at] = float("nan")
    return TensorDataset(index, x, y)


class Counted(Callback):
    """Notes what the server has counted at the end of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(trainer.strategy.server_metrics())


class Constant(Predictor):
    """Believes that every rank takes a millisecond per sample, whatever the machine is busy with."""

    def update(self, samples: int, compute_s: float) -> None:
        self.updates += 1

    def cost(self) -> AffineCost:
        return AffineCost(fixed_s=0.0, per_sample_s=1e-3)

    def std_s(self, samples: float) -> float:
        return 0.0


class Watched(Toy):
    """Notes a checksum of its weights at both ends of every validation."""

    def __init__(self, rank: int, slow_s: float = 0.0) -> None:
        super().__init__()
        # No bias before BatchNorm, which takes it off again: its gradient would be rounding, which Adam makes steps of.
        first = nn.Linear(6, 16, bias=False)
        self.net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.rank, self.slow_s = rank, slow_s
        self.sums: list[tuple[str, int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.slow_s if self.rank == 1 and batch_idx % 3 == 1 else 0.0)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def note(self, what: str) -> None:
        total = sum(float((t.double() ** 2).sum()) for t in self.state_dict().values())
        self.sums.append((what, self.trainer.global_step, total))

    def on_validation_start(self) -> None:
        self.note("start")

    def on_validation_epoch_start(self) -> None:
        self.note("epoch")

    def on_validation_end(self) -> None:
        self.note("end")


def pair(world: int = 2) -> tuple[DataLoader, DataLoader]:
    return DataLoader(regression(), batch_size=24 // world), DataLoader(regression(70, seed=9), batch_size=10)
