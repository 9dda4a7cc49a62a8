"""The largest batch of each rank, found by trial: what is found, and that nothing else is left of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_hetero import (
    HeteroBatchSizeFinder,
    LoadBalancedStrategy,
    Scenario,
    ShardedBalancedStrategy,
    ThrottleCallback,
)
from tests.ranks.balanced.memory_kit import Wall
from tests.ranks.exact_models import Manual
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression, weights

SAMPLES = 96


class Busy(Toy):
    """All that a trial must leave as it was; the step gathers, reduces, draws and counts."""

    def __init__(self) -> None:
        super().__init__()
        first, act, last = self.net
        self.net = nn.Sequential(first, act, nn.BatchNorm1d(16, dtype=torch.float64), nn.Dropout(0.1), last)
        self.metric = MeanMetric(dist_sync_on_step=True)
        self.frozen = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.batch_size = 4
        self.steps: list[int] = []
        self.before: list[Any] = []

    def on_fit_start(self) -> None:
        if self.trainer.world_size > 1:
            self.before = [weights(self), torch.get_rng_state()]

    def on_train_start(self) -> None:
        saved, drawn = self.before
        assert weights(self).distance(saved) == 0.0 and torch.equal(torch.get_rng_state(), drawn)
        assert all(not optimizer.state for optimizer in self.trainer.optimizers) and self.trainer.global_step == 0
        assert all(p.grad is None for p in self.parameters()) and not self.trainer.callback_metrics
        assert self.metric.update_count == 0
        self.steps.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(len(batch[0]))
        with torch.no_grad():
            self.frozen += 1
        everyone = torch.as_tensor(self.all_gather(batch[0].mean()))
        self.trainer.strategy.barrier()
        self.metric(float(everyone.mean()))
        self.log("rows", everyone.sum(), sync_dist=True)
        return super().training_step(batch, batch_idx)


class Drawn(TensorDataset):
    """Samples that are changed by chance."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 1e-3 * torch.rand(1, dtype=x.dtype), y


class Resumed(Busy):
    def on_train_start(self) -> None:
        pass


def fitted(rank: int, world: int, module: Any, finder: Any, caps: list[int] | None = None, **options: Any) -> Any:
    strategy = balanced(policy=None, **options)
    emulated = [] if caps is None else [ThrottleCallback(Scenario(speeds=[1.0] * world, mem_samples=caps))]
    fit = rank_trainer(rank, world, strategy, callbacks=[finder, *emulated], max_epochs=1)
    fit.fit(module, DataLoader(Drawn(*regression(SAMPLES).tensors), batch_size=4, shuffle=True))
    return strategy, fit


def found_job(rank: int, world: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    module, finder = Busy(), HeteroBatchSizeFinder(steps_per_trial=2, init_val=3)
    strategy, fit = fitted(rank, world, module, finder, [25, 9])
    told["power"] = finder.sizes, finder.optimal_batch_size, module.batch_size, strategy.global_batch_size
    told["shares"], told["steps"] = strategy.shares, module.steps
    fit.save_checkpoint("found.ckpt")

    again = HeteroBatchSizeFinder()
    again.search = lambda *_: pytest.fail("a trial")  # type: ignore[method-assign]
    other = rank_trainer(rank, world, balanced(policy=None), callbacks=[again], max_epochs=2)
    other.fit(Resumed(), DataLoader(regression(SAMPLES), batch_size=4, shuffle=True), ckpt_path="found.ckpt")
    told["resumed"] = again.sizes, again.optimal_batch_size

    module, finder = Toy(), HeteroBatchSizeFinder("binsearch", margin=0.2)
    wall = Wall(module, "backward", {0: 25, 1: 9}[rank])
    strategy, _ = fitted(rank, world, module, finder, global_batch_size=16)
    told["binsearch"] = finder.sizes, finder.optimal_batch_size, strategy.global_batch_size
    told["bounded"], told["failures"] = strategy.shares[1] <= 7, wall.failures > 0

    finder = HeteroBatchSizeFinder(max_val=8)
    fitted(rank, world, Toy(), finder)
    told["enough"] = finder.sizes
    return told


def test_each_rank_gets_what_fits_and_nothing_else_has_changed() -> None:
    for rank, told in enumerate(run_ranks(2, found_job)):
        assert told["power"] == ((24, 6), 30, 15, 30) and told["shares"] == (24, 6)
        assert told["resumed"] == ((24, 6), 30)
        assert told["binsearch"] == ((20, 7), 16, 16) and told["bounded"] and told["failures"]
        assert told["enough"] == (8, 8)
        assert told["steps"][:3] == [told["shares"][rank]] * 3


def exact_job(rank: int, world: int) -> float:
    """Trains as a run that was given what the other has found."""
    searched, given = Toy(), Toy()
    torch.manual_seed(rank)
    fitted(rank, world, searched, HeteroBatchSizeFinder(init_val=3), [25, 9])
    strategy = balanced(policy=None, max_samples=[24, 6], global_batch_size=30)
    torch.manual_seed(rank)
    loader = DataLoader(Drawn(*regression(SAMPLES).tensors), batch_size=4, shuffle=True)
    rank_trainer(rank, world, strategy, max_epochs=1).fit(given, loader)
    return weights(searched).distance(weights(given))


def test_training_is_that_of_the_numbers_found() -> None:
    assert run_ranks(2, exact_job) == [0.0, 0.0]


# ---- in the first steps ---------------------------------------------------------------------------------------


class Sizes(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def auto_job(rank: int, world: int) -> tuple[list[int], int]:
    module = Sizes()
    wall = Wall(module, "forward", {1: 5}.get(rank))
    fit = rank_trainer(rank, world, balanced(policy=None, max_samples="auto"), max_epochs=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ran out of memory")
        fit.fit(module, DataLoader(regression(SAMPLES), batch_size=8, shuffle=True))
    return module.sizes, wall.failures


def test_the_first_steps_learn_what_fits() -> None:
    (free, failed), (short, met) = run_ranks(2, auto_job)
    assert not failed and max(free) > 8
    assert 1 <= met <= 2 and max(short[-4:]) <= 5


def growing_job(rank: int, world: int) -> bool:
    strategy, module = balanced(policy=None, max_samples="auto"), Sizes()
    careful: list[bool] = []
    module.on_train_start = lambda: careful.append(strategy._run.cap.careful)  # type: ignore # pyright: ignore
    rank_trainer(rank, world, strategy, max_steps=1).fit(module, DataLoader(regression(SAMPLES), batch_size=8))
    return careful == [True]


def test_shares_grow_step_by_step() -> None:
    """What that means is tested with `MemoryCap`."""
    assert run_ranks(2, growing_job) == [True, True]


# ---- what is refused ------------------------------------------------------------------------------------------


def refused_job(rank: int, world: int) -> dict[str, str]:
    told: dict[str, str] = {}

    def refuse(name: str, kind: Any, finder: Any, module: Any, **options: Any) -> None:
        with pytest.raises(kind) as error:
            fitted(rank, world, module, finder, **options)
        told[name] = str(error.value)

    refuse("stock", MisconfigurationException, BatchSizeFinder(), Toy())
    refuse("by hand", MisconfigurationException, HeteroBatchSizeFinder(), Manual())
    refuse("both", ValueError, HeteroBatchSizeFinder(), Toy(), max_samples=4)
    small = Toy()
    Wall(small, "forward", {0: 0}.get(rank))
    refuse("none", ValueError, HeteroBatchSizeFinder(), small)
    refuse("auto by hand", ValueError, HeteroBatchSizeFinder(), Manual(), max_samples="auto")
    fit = rank_trainer(rank, world, balanced(policy=None), max_epochs=1)
    with pytest.raises(ValueError, match="distributed strategies"):  # Lightning's, before it asks anybody
        Tuner(fit).scale_batch_size(Toy(), DataLoader(regression(SAMPLES), batch_size=4))
    return told


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    for told in run_ranks(2, refused_job):
        assert "lightning_hetero.HeteroBatchSizeFinder()" in told["stock"]
        assert "automatic optimization" in told["by hand"] and "automatic optimization" in told["auto by hand"]
        assert "max_samples=4" in told["both"] and "rank 0" in told["none"]


@pytest.mark.parametrize("bad", [{"mode": "linear"}, {"init_val": 0}, {"margin": 1.0}, {"steps_per_trial": 0}])
def test_bad_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HeteroBatchSizeFinder(**bad)


def test_auto_is_a_word_of_max_samples() -> None:
    assert LoadBalancedStrategy(max_samples="auto").settings.learns
    assert ShardedBalancedStrategy(max_samples="auto").settings.learns
