"""Models of the exactness tests: each is right for one process and changes one thing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset

from tests.ranks.kit import FEATURES, Toy

SEQUENCES, TOKENS = 400, 5


class Groups(Toy):
    """Two parameter groups and a scheduler stepped every step."""

    def configure_optimizers(self) -> Any:
        first, _, last = self.net.children()
        groups = [{"params": first.parameters(), "lr": 3e-3}, {"params": last.parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoHeads(Toy):
    """Uses its heads in turns, so that every step leaves parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.heads = nn.ModuleList(nn.Linear(16, 1, dtype=torch.float64) for _ in range(2))
        self.net = nn.Sequential(*list(self.net.children())[:2])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.heads[batch_idx % 2](self.net(x)), y)


class GanStep:
    """Two optimizers, each toggled, two backward passes per step, of a module with ``net`` and ``judge``."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        maker, judge = self.optimizers()
        logits = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(maker)
        fooled = self.judge(self.net(x))
        self.manual_backward(logits(fooled, torch.ones_like(fooled)))
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        real, fake = self.judge(y), self.judge(self.net(x).detach())
        self.manual_backward(logits(real, torch.ones_like(real)) + logits(fake, torch.zeros_like(fake)))
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)


class Gan(GanStep, Toy):
    """Manual optimization: two optimizers, each toggled, two backward passes per step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(6)
        self.judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.float64)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.SGD(self.judge.parameters(), 1e-2)]


class Accumulating(Toy):
    """Manual optimization that accumulates three batches, without synchronising the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        steps = batch_idx % 3 == 2
        no_sync = getattr(self.trainer.model, "no_sync", nullcontext)
        with nullcontext() if steps else no_sync():
            self.manual_backward(self.loss(batch) / 3)
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class Manual(Toy):
    """Manual optimization at its plainest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _summed(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _summed(grad)


def _summed(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


class SyncNorm(nn.Module):
    """Normalises with the statistics of all ranks' samples, differentiably (torch's own wants CUDA)."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])])
        if dist.is_initialized():
            sums = _Sum.apply(sums)
        n = x.shape[1]
        mean = sums[:n] / sums[-1]
        return (x - mean) / (sums[n : 2 * n] / sums[-1] - mean**2 + 1e-5).sqrt()


class Normed(Toy):
    """Batch statistics couple the ranks; behind them an in-place activation, as in every ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], SyncNorm(), nn.ReLU(inplace=True), self.net[2])

    def configure_optimizers(self) -> Any:
        # Not Adam: the first bias has gradient 0, and Adam would make steps out of its rounding error.
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Tokens(Toy):
    """Mean over the tokens of variable-length sequences, NaN for a batch without any."""

    def loss(self, batch: Any) -> Tensor:
        x, y, present = batch
        wrong = (self.net(x).squeeze(-1) - y) ** 2
        return (wrong * present).sum() / present.sum()


class TokensByMethod(Tokens):
    def batch_weight(self, batch: Any) -> float:
        return tokens_of(batch)


class SumLoss(Toy):
    """A sum over the batch, divided by ``of``: what stock DDP makes of it on that many ranks."""

    def __init__(self, of: int = 1) -> None:
        super().__init__(lr=1e-3)
        self.of = of

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0]) / self.of


class PoisonedDummy(Toy):
    """Gives NaN on a batch that does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dummy = getattr(self.trainer.strategy, "current_samples", lambda: None)() == 0
        return loss * float("nan") if dummy else loss


class Newton(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class OwnSampler(DistributedSampler):
    """A subclass is taken as it is: rank r keeps its own samples when shares are equal."""


def tokens_of(batch: Any) -> float:
    return float(batch[2].sum())


def sequences(rows: int = SEQUENCES) -> TensorDataset:
    """The first ``rows`` sequences of 0 to 5 tokens; every fifth is empty."""
    g = torch.Generator().manual_seed(8)
    x = torch.randn(SEQUENCES, TOKENS, FEATURES, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, TOKENS + 1, (SEQUENCES,), generator=g)
    lengths[::5] = 0
    return TensorDataset(*TensorDataset(x, x.sum(-1).sin(), (torch.arange(TOKENS) < lengths[:, None]).double())[:rows])
