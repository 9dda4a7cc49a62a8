"""One rank of a job under outages: trains until it is killed, and notes each batch it has trained."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.faults.outages import BATCH, EPOCH_STEPS, LEAST, RANKS, SAMPLE_S, START_S, System
from benchmarks.ranks import quietly
from lightning_hetero import BoundedStalenessStrategy, LoadBalancedStrategy

WIDTH = 16


class Noted(Callback):
    """Writes a line for each batch: the time [s, monotonic], the samples of this rank, the optimizer's steps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, samples: int, step: int) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic()} {samples} {step}\n")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(len(batch[0]), trainer.global_step)


class Model(LightningModule):
    """A small network whose work is emulated by a sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net_of()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(SAMPLE_S * len(batch[0]))
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001)


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))


def loader() -> DataLoader[Any]:
    x = torch.randn(RANKS * BATCH * EPOCH_STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)


def under_lightning(system: System, folder: Path, notes: Noted) -> None:
    """Trains under one of ours, or under DDP from the newest checkpoint on."""
    strategy = {
        System.BALANCED: lambda: LoadBalancedStrategy(
            min_ranks=LEAST, process_group_backend="gloo", monitor=False
        ),
        System.STALE: lambda: BoundedStalenessStrategy(process_group_backend="gloo", monitor=False),
        System.DDP: lambda: DDPStrategy(process_group_backend="gloo"),
    }[system]()
    callbacks: list[Callback] = [notes]
    saved = folder / "checkpoints"
    if system is System.DDP:
        callbacks.append(ModelCheckpoint(saved, "{step:06d}", every_n_epochs=1, save_on_train_epoch_end=True))
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=-1, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        enable_checkpointing=system is System.DDP,
    )  # fmt: skip
    trainer.fit(Model(), loader(), ckpt_path=max(saved.glob("*.ckpt"), default=None))


def under_torchft(rank: int, folder: Path, notes: Noted) -> None:
    """Trains as a replica of torchft's manager; rank 0's process is the lighthouse, too.

    Gradients are averaged by `Manager.allreduce`: torchft's DistributedDataParallel (0.2.0) ends with an AssertionError
    on all ranks when one is lost.
    """
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    where = folder / "lighthouse"
    held: list[Any] = []
    if rank == 0:
        held.append(LighthouseServer(bind="127.0.0.1:0", min_replicas=LEAST, join_timeout_ms=1000))
        (folder / "part").write_text(held[0].address())
        (folder / "part").rename(where)
    while not where.exists():
        time.sleep(0.05)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = net_of()
    plain = torch.optim.Adam(net.parameters(), lr=0.001)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": plain.state_dict()}, min_replica_size=LEAST, rank=0,
        world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=where.read_text(),
        replica_id=f"rank{rank}-{os.getpid()}", hostname="127.0.0.1", timeout=timedelta(seconds=30),
    )  # fmt: skip
    optimizer = Optimizer(manager, plain)
    for x, y in endless():
        optimizer.zero_grad()
        time.sleep(SAMPLE_S * len(x))
        nn.functional.mse_loss(net(x), y).backward()
        for work in [manager.allreduce(p.grad) for p in net.parameters() if p.grad is not None]:
            work.wait()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:  # committed; else all do it again
            notes.note(len(x), manager.current_step())


def endless() -> Iterator[Any]:
    while True:
        yield from loader()


def main(start: Callable[[], None] = quietly) -> None:
    """``rank system folder path-of-notes``, by `outages.run`."""
    rank, system, folder, notes = int(sys.argv[1]), System(sys.argv[2]), Path(sys.argv[3]), Noted(Path(sys.argv[4]))
    start()
    time.sleep(START_S)
    if system is System.TORCHFT:
        under_torchft(rank, folder, notes)
    else:
        under_lightning(system, folder, notes)


if __name__ == "__main__":
    main()
