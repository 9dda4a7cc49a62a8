"""One rank of the items' benchmark; started by torchrun, writes steps and named ranks as JSON on rank 0."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from benchmarks.torchrun import as_rank
from lightning_hetero import LoadBalancedStrategy, StragglerMonitor
from lightning_hetero.demo import VOCABULARY, encode, topics_text

RANKS, BATCH, LONGEST = 2, 8, 1024
FIXED_S, PER_TOKEN_S = 1e-3, {"padded": 2.5e-6, "packed": 8e-6}  # steps of some 12 ms
SLOW_RANK, SLOW_FROM, SLOWER = 1, 80, 1.3


class Paragraphs(Dataset[Tensor]):
    """Paragraphs of Python's help topics, as characters; their lengths are skewed."""

    def __init__(self) -> None:
        self.texts = [encode(text[:LONGEST]) for text in topics_text().split("\n\n") if len(text) > 1]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]

    def costs(self) -> list[float]:
        return [float(len(text)) for text in self.texts]


def padded(texts: list[Tensor]) -> Tensor:
    return pad_sequence(texts, batch_first=True)


def packed(texts: list[Tensor]) -> Tensor:
    return torch.cat(texts)[None]


COLLATE = {"padded": padded, "packed": packed}


class Emulated(LightningModule):
    """A small real step; then its device is busy for a time in proportion to the tokens, padding included."""

    def __init__(self, per_token_s: float, slow_from: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
        self.per_token_s, self.slow_from = per_token_s, slow_from

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        began_s = time.perf_counter()
        loss = F.cross_entropy(self.net(batch[:, :64]).flatten(0, 1), batch[:, :64].flatten())
        slow = self.slow_from is not None and self.global_rank == SLOW_RANK and self.global_step >= self.slow_from
        work_s = (FIXED_S + self.per_token_s * batch.numel()) * (SLOWER if slow else 1.0)
        time.sleep(max(0.0, work_s - (time.perf_counter() - began_s)))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Noting(StragglerMonitor):
    """Notes who is named by which measurement: the steps that it has seen so far."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(prog_bar=False, **kwargs)
        self.found: list[tuple[int, int, float]] = []  # measurement, rank, slowdown
        self.seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        add = self._test.add

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = add(*args, **kwargs)
            self.found += [(self.seen, one.rank, one.slowdown) for one in found]
            self.seen += 1
            return found

        self._test.add = noted  # type: ignore[method-assign]


class Stopwatch(Callback):
    def __init__(self) -> None:
        self.starts_s: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts_s.append(time.perf_counter())

    def on_train_end(self, *args: Any) -> None:
        self.starts_s.append(time.perf_counter())


def tokens(batch: Tensor) -> int:
    return batch.numel()


def train(kind: str, engine: str, steps: int, data: Paragraphs, slow_from: int | None = None) -> dict[str, Any]:
    """Runs one training; returns its time, without the first ten steps, and what the monitor has named."""
    ours: dict[str, Any] = {
        "ours": {"batch_cost": tokens},
        "ours, samples": {},
        "ours, cut by cost": {"batch_cost": tokens, "sample_costs": data.costs()},
    }
    watch = Stopwatch()
    if engine in ours:
        strategy: Any = LoadBalancedStrategy(process_group_backend="gloo", monitor=False, **ours[engine])
        monitor = Noting()
    else:
        strategy, monitor = DDPStrategy(process_group_backend="gloo"), Noting(batch_cost=tokens)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[watch, monitor],
    )  # fmt: skip
    gc.collect()
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=COLLATE[kind])
    trainer.fit(Emulated(PER_TOKEN_S[kind], slow_from), loader)
    return {"total_s": watch.starts_s[-1] - watch.starts_s[10], "found": monitor.found, "seen": monitor.seen}


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Returns the runs by kind of data and engine, those with a slow rank, and the lengths of the data."""
    data = Paragraphs()
    runs = {
        "padded": ("DDP", "ours", "DDP again", "ours, samples"),
        "packed": ("DDP", "ours", "ours, cut by cost"),
    }
    result: dict[str, Any] = {kind: {engine: [] for engine in engines} for kind, engines in runs.items()}
    result["slow"] = []
    lengths = sorted(len(text) for text in data.texts)
    result["lengths"] = [len(lengths), lengths[len(lengths) // 2], lengths[9 * len(lengths) // 10], lengths[-1]]
    train("padded", "DDP", 20, data)
    for _ in range(repeats):
        for kind, engines in runs.items():
            for engine in engines:
                result[kind][engine].append(train(kind, engine, steps, data))
        result["slow"].append(train("padded", "DDP", 2 * SLOW_FROM, data, slow_from=SLOW_FROM))
    return result



if __name__ == "__main__":
    _path, _repeats, _steps = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(int(_repeats), int(_steps)))
