"""BatchNorm on parts of a batch: two samples or none on every rank, in every batch, without an argument."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.balanced.runtime.pieces import least_samples
from lightning_hetero.shares.policy import BalancePolicy, ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.exact_models import Gan
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES, Scripted, Toy, balanced, rank_trainer, regression, single, weights

BATCH = 4  # on 2 ranks: global batches of 8


class NormedGan(Gan):
    """A GAN with BatchNorm in its generator."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.net = nn.Sequential(self.net[0], norm, self.net[1], self.net[2])


class Normed(Toy):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.net = nn.Sequential(self.net[0], norm, self.net[1], self.net[2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Images(Toy):
    """Normalises over pixels too, so one sample is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)), nn.BatchNorm1d(1, dtype=torch.float64), nn.Flatten(), *self.net
        )


class Uneven(Scripted):
    """Knows nothing of BatchNorm: as uneven as can be, ranks without samples too."""

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        BalancePolicy.observe(self, records)
        lone = (self._seen % 3) % 2
        self.shares = [(self.limits.total - lone, lone), (lone, self.limits.total - lone)][self._seen % 2]
        return ShareDecision(shares=self.shares, changed=True, reason="uneven")


class AllToOne(Scripted):
    """Rank 0 gets everything."""

    def start(self, **kwargs: Any) -> None:
        super().start(**kwargs)
        self.shares = (self.limits.total, 0)

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        super().observe(records)
        self.shares = (self.limits.total, 0)
        return ShareDecision(shares=self.shares, changed=True, reason="all to one")


class Shared(IterableDataset):
    def __iter__(self) -> Any:
        return iter(regression(27))


def noted(rank: int, world: int, samples: int, *, module: Any = NormedGan, batch: int = BATCH, **kwargs: Any) -> Any:
    """Trains two epochs; returns the shares of this rank and the samples its model saw, at each step."""
    parts: list[tuple[int, int]] = []
    trainer_arguments = kwargs.pop("trainer", {})
    loader = kwargs.pop("loader") if "loader" in kwargs else DataLoader(regression(samples), batch_size=batch)
    kwargs.setdefault("find_unused_parameters", module is NormedGan)

    class Noting(module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts.append((self.trainer.strategy.current_samples(), len(batch[0])))
            return super().training_step(batch, batch_idx)

    strategy = balanced(**{"policy": BalancePolicy(), **kwargs})
    rank_trainer(rank, world, strategy, max_epochs=2, **trainer_arguments).fit(Noting(), loader)
    return parts


def job(rank: int, world: int) -> dict[str, Any]:
    return {
        "tail of 3": noted(rank, world, 19),
        "tail of 1 part": noted(rank, world, 18),
        "accumulated": noted(rank, world, 19, module=Normed, trainer={"accumulate_grad_batches": 2}),
        "pieces": noted(rank, world, 29, module=Normed, max_samples=3, rebalance=False),
        "uneven": noted(rank, world, 43, module=Normed, policy=Uneven()),
        "none allowed": noted(rank, world, 43, module=Normed, min_samples=0, policy=Scripted()),
        "stream": noted(rank, world, 0, module=Normed, policy=Uneven(), stream="shared",
                        loader=DataLoader(Shared(), batch_size=BATCH)),
        "one each": noted(rank, world, 10, module=Images, batch=1),
        "global batch of 3": noted(rank, world, 9, module=Normed, global_batch_size=3),
    }  # fmt: skip


@cache
def runs() -> list[dict[str, Any]]:
    return run_ranks(2, job)


@pytest.mark.stock_ddp("batchnorm", "balanced")
@pytest.mark.parametrize(
    ("name", "totals"),
    [
        ("tail of 3", [8, 8, 3]),
        ("tail of 1 part", [8, 8, 2]),
        ("accumulated", [8, 8, 3]),
        ("uneven", [8, 8, 8, 8, 8, 3]),
        ("none allowed", [8, 8, 8, 8, 8, 3]),
        ("stream", [8, 8, 8, 3]),
        ("global batch of 3", [3, 3, 3]),
    ],
)
def test_a_rank_gets_two_samples_or_none(name: str, totals: list[int]) -> None:
    steps = list(zip(*(run[name] for run in runs()), strict=True))
    assert [sum(samples for samples, _ in step) for step in steps] == totals * 2
    for samples, computed in (part for step in steps for part in step):
        assert samples == 0 or samples >= 2
        assert computed == (samples or 2)


def test_which_modules_need_two_samples() -> None:
    for layer, least in (
        (nn.BatchNorm1d(3), 2),
        (nn.BatchNorm3d(3).eval(), 2),
        (nn.LazyBatchNorm2d(), 2),
        (nn.SyncBatchNorm(3), 1),
        (nn.InstanceNorm1d(3, track_running_stats=True), 1),
        (nn.GroupNorm(1, 3), 1),
    ):
        assert least_samples(nn.Sequential(nn.Linear(2, 3), layer)) == least


def alone(rank: int, world: int) -> tuple[Any, Any]:
    module = Normed()
    strategy = balanced(policy=AllToOne(), max_samples=8, min_samples=[8, 0])
    rank_trainer(rank, world, strategy).fit(module, DataLoader(regression(30), batch_size=BATCH))
    return weights(module), module.net[1].running_mean


def test_a_dummy_changes_no_statistics() -> None:
    """All samples on rank 0: weights and running statistics are one process's, and rank 1's dummies leave no trace."""
    oracle = Normed()
    single(oracle, regression(30), 8)
    (ours, _), (theirs, mean) = run_ranks(2, alone)
    assert ours.distance(weights(oracle)) < 1e-12
    trained = {k: v for k, v in weights(oracle).items() if "running" not in k and "tracked" not in k}
    assert all(torch.allclose(theirs[k], v, rtol=0, atol=1e-12) for k, v in trained.items())
    last = [t for t in (oracle.net[1].running_mean, mean)]
    assert isinstance(last[1], Tensor) and last[1].shape == last[0].shape
