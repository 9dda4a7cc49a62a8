"""A small regression that each engine and one process train alike, and how what they end with is compared.

A situation returns facts, a dictionary of numbers, tensors, lists of them and texts. `right` runs it in one process
for the oracle, and on two ranks, and names each fact that differs on a rank.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tests.ranks.kit import rank_trainer
from tests.ranks.strangers.kit import UNEVEN, ends, trainer, two_stages

BATCH = 16  # of all ranks
DIVIDED: dict[str, dict[str, Any]] = {
    "balanced": UNEVEN,
    "stale": {"policy": "bsp"},  # exact: which rank is in time does not matter
    "pipeline": {"backbone": "net", "plan": two_stages(0, 2, 5, micro_samples=8)},
}
OURS = ("hetero_", "not supported", "not possible", "use strategy", "in a pipeline", "is held by rank")


class Small(LightningModule):
    """A float64 network of three layers; subclasses change one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.double()
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.5)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def numbers(samples: int = 32) -> TensorDataset:
    """Rows to learn from; the same in each process."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, generator=g, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def batches(dataset: Dataset, world: int, **kwargs: Any) -> DataLoader:
    """A loader as a user writes it: one rank's part of `BATCH`. In one process: stock DDP's order."""
    if world == 1:
        kwargs.setdefault(
            "sampler", DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)
        )
    return DataLoader(dataset, batch_size=BATCH // world, **kwargs)


def fit(
    rank: int,
    world: int,
    engine: str,
    module: LightningModule,
    loader: Any = None,
    val: Any = None,
    **kwargs: Any,
) -> Trainer:
    """Trains `numbers`, or the loader, on shares of 12 and 4, at a server, or in two stages."""
    fits = trainer(rank, world, engine, DIVIDED, **kwargs)
    fits.fit(module, batches(numbers(), world) if loader is None else loader, val)
    return fits


def unused(rank: int, world: int, engine: str, **kwargs: Any) -> Trainer:
    """A trainer for a module not all of whose parameters are used in each step: DDP has to look for them."""
    if engine == "ddp":
        return rank_trainer(rank, world, "ddp_find_unused_parameters_true", **kwargs)
    options = {**DIVIDED, "balanced": {**UNEVEN, "find_unused_parameters": True}}
    return trainer(rank, world, engine, options, **kwargs)


def _apart(got: Any, want: Any, tolerance: float) -> str | None:
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return f"has {list(got)}, not {list(want)}"
        said = {name: _apart(got[name], value, tolerance) for name, value in want.items()}
        return "; ".join(f"{name}: {text}" for name, text in said.items() if text) or None
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.is_meta or got.shape != want.shape:
            return f"{got} is not {want}"
        off = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
        return None if off <= tolerance else f"off by {off:.2e}"
    if isinstance(want, float):
        return (
            None if isinstance(got, float | int) and abs(got - want) <= tolerance else f"{got} is not {want}"
        )
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return (
            "; ".join(text for pair in zip(got, want, strict=True) if (text := _apart(*pair, tolerance)))
            or None
        )
    return None if got == want else f"{got} is not {want}"


@functools.cache
def _oracle(situation: Callable[..., Any], *args: Any) -> Any:
    """What one process ends with; computed once for all engines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return situation(0, 1, "single", *args)


def outcome(
    situation: Callable[..., Any],
    engine: str,
    *args: Any,
    tolerance: float = 1e-9,
    ranks: int = 2,
    timeout_s: float = 60.0,
) -> str:
    """What differs from one process with the whole batch, rank by rank; empty: nothing does."""
    ended = ends(situation, engine, *args, ranks=ranks, timeout_s=timeout_s)
    want = _oracle(situation, *args)
    said = {rank: _apart(got, want, tolerance) for rank, got in enumerate(ended)}
    return "\n".join(f"rank {rank}: {text}" for rank, text in said.items() if text)


def right(situation: Callable[..., Any], engine: str, *args: Any, **kwargs: Any) -> None:
    """Each rank ends with what one process ends with.

    Raises:
        AssertionError: it does not; says which facts differ.
    """
    said = outcome(situation, engine, *args, **kwargs)
    assert not said, f"{situation.__name__} under {engine}:\n{said}"


def right_or_refused(situation: Callable[..., Any], engine: str, *args: Any, **kwargs: Any) -> str | None:
    """As `right`, or refused in our words, which are returned."""
    try:
        said = outcome(situation, engine, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if any(words in str(error) for words in OURS):
            return str(error)
        raise
    assert not said, f"{situation.__name__} under {engine}:\n{said}"
    return None
