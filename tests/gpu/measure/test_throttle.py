"""`ThrottleCallback` on a GPU: what is stretched is the time of kernels, not that in which the host starts them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import Scenario, ThrottleCallback
from lightning_hetero.emulate.throttle import Throttle
from tests.gpu.kit import card_trainer, engine, of_kernels
from tests.gpu.ranks import run_card_ranks

pytestmark = of_kernels
CYCLES, STEPS, SPEED = 50_000_000, 6, 0.25  # some 25 ms a pass; only ratios matter


class Spins(LightningModule):
    """A layer that takes as long again in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def on_fit_start(self) -> None:
        self.layer.weight.register_hook(lambda grad: torch.cuda._sleep(CYCLES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sums(Callback):
    """Keeps, behind each batch, what the scenario has said so far and what it has taken [s]."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []

    def throttle(self, *args: Any, **options: Any) -> Throttle:
        self.pacer = (made := Throttle(*args, **options)).pacer
        return made

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.rows.append((self.pacer.wanted_s, self.pacer.taken_s))


def slowed(rank: int, world: int) -> tuple[float, float, float]:
    """Returns what the work of all steps but the first takes, what was wanted, and what it took [s]."""
    torch.nn.Linear(8, 1).cuda()(torch.ones(4, 8, device="cuda")).square().mean().backward()  # CUDA loads all it needs
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(2 * (STEPS - 1)):
        torch.cuda._sleep(CYCLES)
    ended.record()
    torch.cuda.synchronize()
    sums = Sums()
    callbacks = [ThrottleCallback(Scenario(speeds=[SPEED]), throttle=sums.throttle), sums]
    trainer = card_trainer(rank, world, engine("ddp", "nccl"), max_steps=STEPS, callbacks=callbacks)
    trainer.fit(Spins(), DataLoader(TensorDataset(torch.ones(4 * STEPS, 8)), batch_size=4))
    first, last = sums.rows[0], sums.rows[-1]
    return began.elapsed_time(ended) / 1e3, last[0] - first[0], last[1] - first[1]


def test_the_work_of_kernels_is_stretched() -> None:
    real_s, wanted_s, taken_s = run_card_ranks(1, slowed)[0]
    assert 0.8 < wanted_s / (real_s / SPEED) < 1.3
    assert 0.7 < taken_s / wanted_s < 1.3
