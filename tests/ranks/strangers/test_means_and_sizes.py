"""Means of an epoch and rates, where parts are not equal and a batch's first dimension is not the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from tests.ranks.strangers import kit

SAMPLES = 40  # two global batches of 16 and one of 8
OPTIONS = {"balanced": kit.UNEVEN, "stale": {"policy": "bsp"}, "federated": kit.UNEVEN}


class Numbers(Dataset):
    """Sample i is a sequence of i % 3 + 1 rows whose value is i * i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((i % 3 + 1, 1), float(i * i))


def time_major(samples: list[Tensor]) -> Any:
    return torch.stack([s[0].expand(5, 1) for s in samples], dim=1)


def weights_first(samples: list[Tensor]) -> Any:
    return torch.ones(3), torch.stack([s[0] for s in samples])


def nodes(samples: list[Tensor]) -> Any:
    return {"x": torch.cat(samples), "graph": torch.repeat_interleave(torch.tensor([len(s) for s in samples]))}


def packed(samples: list[Tensor]) -> Any:
    return pack_sequence(samples, enforce_sorted=False)


def plain(samples: list[Tensor]) -> Any:
    return torch.stack([s[0] for s in samples])


def values(batch: Any) -> Tensor:
    """Of each sample in a batch."""
    if isinstance(batch, dict):
        count = int(batch["graph"].max()) + 1
        return torch.stack([batch["x"][batch["graph"] == g][0] for g in range(count)])
    if hasattr(batch, "unsorted_indices"):
        return nn.utils.rnn.pad_packed_sequence(batch, batch_first=True)[0][:, 0]
    if isinstance(batch, tuple):
        return batch[1]
    return batch[0] if batch.dim() == 3 else batch


class Logging(LightningModule):
    """Logs the mean over a batch in the step and in hooks; with a constant number where it is told to."""

    def __init__(self, constant: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.constant = constant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mean = values(batch).mean()
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": self.constant}
        self.log("step", mean, **options)
        self.log_dict({"dict": mean}, **options)
        return mean * self.weight.sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", values(batch).mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=self.constant)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", values(batch).mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=self.constant)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


BATCHES: dict[str, tuple[Any, int | None]] = {
    "time first": (time_major, None),
    "weights first": (weights_first, None),
    "nodes": (nodes, None),
    "packed sequences": (packed, None),
    "a constant, the loader's": (plain, 8),
    "a constant, 1": (plain, 1),
}


def means(rank: int, world: int, engine: str, pieces: bool) -> dict[str, dict[str, float]]:
    """PL#10093, PL#3668: Lightning infers the batch size, or a user gives a constant."""
    found = {}
    options = {**OPTIONS, "balanced": {"max_samples": [3, 2]}} if pieces else OPTIONS
    for name, (collate, constant) in BATCHES.items():
        if pieces and collate is not plain:
            continue
        trainer = kit.trainer(rank, world, engine, options)
        trainer.fit(Logging(constant), DataLoader(Numbers(), batch_size=8, collate_fn=collate))
        found[name] = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return found


@pytest.mark.stock_ddp("log_epoch", "time_major", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale", "in pieces"])
def test_means_of_an_epoch_count_samples(engine: str) -> None:
    right = sum(i * i for i in range(SAMPLES)) / SAMPLES
    keys = ["step", "dict"] if engine == "stale" else ["step", "dict", "start", "end"]
    for found in kit.ends(means, "balanced" if engine == "in pieces" else engine, engine == "in pieces"):
        for name, logged in found.items():
            assert [logged[key] for key in keys] == pytest.approx([right] * len(keys), rel=1e-5), name


def own_means(rank: int, world: int, engine: str) -> tuple[float, list[int]]:
    """PL#4646: each client has data of its own, in batches of its own size."""
    sizes: list[int] = []

    class Own(Logging):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sizes.append(batch.shape[1])
            self.log("rank", torch.tensor(float(self.global_rank)), on_step=False, on_epoch=True, sync_dist=True)
            return self.weight.sum()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    loader = DataLoader(Numbers(), batch_size=8, collate_fn=time_major)
    trainer = kit.trainer(rank, world, engine, OPTIONS)
    trainer.fit(Own(None), loader)
    return float(trainer.callback_metrics["rank"]), sizes


def test_federated_means_count_samples() -> None:
    (mean, zero), (_, one) = kit.ends(own_means, "federated")
    assert mean == pytest.approx(sum(one) / (sum(zero) + sum(one)), rel=1e-6)


class Rates(CSVLogger):
    def __init__(self) -> None:
        super().__init__(".")
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append({key: float(value) for key, value in metrics.items()})


class Own(Callback):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch))


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rates(rank: int, world: int, engine: str) -> list[dict[str, float]]:
    """PL#20235: samples and items per second of all devices, and of this one."""
    logger, own = Rates(), Own()
    monitor = ThroughputMonitor(batch_size_fn=len, length_fn=lambda batch: 10 * len(batch), window_size=3)
    options = {**OPTIONS, "pipeline": {"backbone": "net", "plan": kit.two_stages(0, 1, 3, micro_samples=8)}}
    trainer = kit.trainer(
        rank, world, engine, options, logger=logger, log_every_n_steps=1, callbacks=[monitor, own], max_epochs=2
    )
    trainer.fit(Small(), DataLoader(Numbers(), batch_size=8, collate_fn=plain, drop_last=True))
    rows = [row for row in logger.rows if "train/samples_per_sec" in row]
    for row in rows:
        row["own"] = own.sizes[0]
    return rows


@pytest.mark.stock_ddp("ThroughputMonitor")
@pytest.mark.parametrize("engine", ["balanced", "stale", "pipeline", "federated"])
def test_throughput_is_that_of_all_ranks(engine: str) -> None:
    rows, _ = kit.ends(rates, engine)
    assert rows
    for row in rows:
        batches = row["train/batches_per_sec"] / 2  # two of DDP's make a global one
        assert row["train/samples_per_sec"] == pytest.approx(16 * batches, rel=1e-6)
        assert row["train/items_per_sec"] == pytest.approx(160 * batches, rel=1e-6)
        if engine == "balanced":
            assert row["train/device/samples_per_sec"] == pytest.approx(12 * batches, rel=1e-6)
