"""What users' modules do differently from `pipeline_kit.Deep`, one thing each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from tests.ranks.pipeline.kit import LAYERS, WIDTH, Block, Deep


class Skipping(Deep):
    """The backbone's input is used behind it, too."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.before(x).relu()
        return F.mse_loss(self.head(self.model(x) + x), y)


class TwoCalls(Deep):
    """The backbone is called twice, the second time with what came of the first."""

    backbone_calls = 2

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.model(self.before(x))
        return F.mse_loss(self.head(self.model(h.sin()) + h), y)


class Listed(Deep):
    """An `nn.ModuleList`, walked in order."""

    def backbone(self) -> nn.Module:
        return nn.ModuleList(Block() for _ in range(LAYERS))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.before(x)
        for layer in self.model:  # type: ignore[union-attr]
            x = layer(x)
        return F.mse_loss(self.head(x), y)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return self.block(x) * mask, mask


class Tuples(Deep):
    """Two tensors travel from layer to layer, one of them without a gradient."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(Pair() for _ in range(LAYERS)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out, _ = self.model((self.before(x), (x[:, :1] > 0).to(x.dtype) + 0.5))
        return F.mse_loss(self.head(out), y)


class Frozen(Deep):
    """Nothing is trained before the backbone, nor in two of its layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for part in (self.before, self.model[0], self.model[4]):  # type: ignore[index]
            part.requires_grad_(False)


class Unused(Deep):
    """A parameter in a layer and one outside that no loss depends on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.model[3].idle = nn.Parameter(torch.ones(2, dtype=torch.float64))  # type: ignore[index]


class Momentum(Deep):
    """SGD with momentum, two parameter groups, and a schedule that moves at every step."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.model.parameters()}, {"params": [*self.before.parameters(), *self.head.parameters()],
                                                        "lr": 3e-3, "weight_decay": 0.1}]  # fmt: skip
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
        schedule = {"scheduler": ExponentialLR(optimizer, 0.97), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Summed(Deep):
    """The loss is a sum over the batch; DDP takes the ranks' mean of it."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.head(self.model(self.before(x))), y, reduction="sum") / 16


class Weighted(Deep):
    """The loss is a mean over what each sample counts, not over samples."""

    @staticmethod
    def batch_weight(batch: Any) -> float:
        return float((batch[0][:, 0].abs() + 0.1).sum())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        weight = x[:, :1].abs() + 0.1
        return (F.mse_loss(self.head(self.model(self.before(x))), y, reduction="none") * weight).sum() / weight.sum()


class Dictionary(Deep):
    """``training_step`` returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.head(self.model(self.before(x)))
        values = {"mean": out.mean(), "square": out.square().mean()}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=len(x))
        return {"loss": F.mse_loss(out, y), "out": out.detach()}


class Dropping(Deep):
    """Dropout in every layer and before the backbone."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(Block(dropout=0.3) for _ in range(LAYERS)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.head(self.model(F.dropout(self.before(x), 0.2, self.training))), y)


class Normed(Deep):
    """BatchNorm in the layers and outside."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS // 2)))


class Branched(Deep):
    """The backbone adds two layers up: no chain."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    def backbone(self) -> nn.Module:
        return self.Two()


class Breaks(Deep):
    """The last layer fails in the third step."""

    def backbone(self) -> nn.Module:
        class Bad(Block):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                Bad.calls += 1
                if Bad.calls > 8 and torch.distributed.get_rank() == 0:
                    raise ZeroDivisionError("layer 5 has had enough")
                return super().forward(x)

        return nn.Sequential(*(Block() for _ in range(5)), Bad())


def as_dict(pairs: Any) -> Any:
    return torch.utils.data.default_collate(pairs)
