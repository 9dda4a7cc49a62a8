"""Emulated devices, what is trained on them, and by whom; pure but for the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import Scenario
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.types import Cluster, Link

PER_RANK = 16
LAYERS = 8
WORK: dict[str, Any] = {"sample_s": 4e-3, "step_s": 8e-3}  # an equal share takes 72 ms on a device of speed 1
SPELLS = {"probability": 1 / 30, "factor": 6.0, "steps": 8}
SLOW = Link(bandwidth_bytes_per_s=5e6, latency_s=1e-4)
WIDTH = 128  # 0.53 MB of gradients: a ring of four takes 0.16 s over slow links
STATIC = ("balanced", "stale", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Devices and a model.

    Attributes:
        name: for people.
        scenario: emulates the devices; a speed for each.
        link: between any two devices; None: what processes of this machine have.
        engines: that train it; ``auto`` may take any of them.
    """

    name: str
    scenario: Scenario
    link: Link | None = None
    engines: tuple[str, ...] = STATIC

    @property
    def ranks(self) -> int:
        return len(self.scenario.speeds)

    @property
    def cluster(self) -> Cluster | None:
        """Devices and links, where the links are emulated."""
        if self.link is None:
            return None
        return replace(equal_cluster(self.ranks), links=((self.link,) * self.ranks,) * self.ranks)


def _mix(*speeds: float, **more: Any) -> Scenario:
    return Scenario(speeds=speeds, **WORK, **more)


CASES = (
    Case(name="equal", scenario=_mix(1.0, 1.0, 1.0, 1.0)),
    Case(name="2:1", scenario=_mix(1.0, 0.5)),
    Case(name="1:1:1/2:1/4", scenario=_mix(1.0, 1.0, 0.5, 0.25)),
    Case(name="1:1:1:1/8", scenario=_mix(1.0, 1.0, 1.0, 0.125)),
    Case(name="spells", scenario=_mix(1.0, 1.0, 1.0, 1.0, spells=SPELLS)),
    Case(name="slow link", scenario=_mix(1.0, 1.0, 1.0, 1.0), link=SLOW, engines=("balanced", "pipeline")),
)
QUICK = ("1:1:1/2:1/4", "slow link")


class Net(LightningModule):
    """Layers of equal work; what they really compute is small against what is emulated."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
            self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.layers(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader(case: Case, steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """Returns the data of a whole training, the same on all ranks."""
    x = torch.randn(PER_RANK * case.ranks * steps, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=PER_RANK)

