"""Train loaders that cannot be divided by speed: trained on in equal parts, bit by bit as under stock DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from lightning_hetero import LoadBalancedStrategy
from lightning_hetero.base.setup import CHECKPOINT_KEY
from tests.ranks.exact_models import Gan, TokensByMethod, sequences
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, weights

SAMPLES = 26


class RankStream(IterableDataset):
    """A finite stream of each rank's own."""

    def __init__(self, rank: int, ready: bool = False) -> None:
        self.rank, self.ready = rank, ready

    def __iter__(self) -> Iterator[Any]:
        mine = [regression(SAMPLES)[i] for i in range(self.rank, SAMPLES, 2)]
        if not self.ready:
            return iter(mine)
        return (tuple(torch.stack(t) for t in zip(*mine[i : i + 3], strict=True)) for i in range(0, len(mine), 3))


class OwnLoader:
    """No DataLoader: shuffles by itself and yields batches, as many packages' do."""

    def __init__(self, rank: int) -> None:
        self.generator, self.dataset = torch.Generator().manual_seed(rank), regression(SAMPLES)

    def __iter__(self) -> Iterator[Any]:
        for i in range(4):
            chosen = torch.randperm(SAMPLES, generator=self.generator)[: 2 + i]
            yield [t[chosen] for t in self.dataset.tensors]


class SizedLoader(OwnLoader):
    def __len__(self) -> int:
        return 4


class OwnIterator(DataLoader):
    """A subclass that draws by itself."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(SizedLoader(3))


class OwnBatches(BatchSampler):
    """A subclass, which may promise something about its batches."""


class RankBatches(DistributedSampler):
    """A distributed sampler that yields lists, for ``batch_size=None``."""

    def __iter__(self) -> Iterator[Any]:
        mine = list(super().__iter__())
        return iter([mine[i : i + 3] for i in range(0, len(mine), 3)])

    def __len__(self) -> int:
        return -(-self.num_samples // 3)


class Listed(RankBatches):
    def __init__(self, data: Any, world: int, rank: int) -> None:
        super().__init__(data, num_replicas=world, rank=rank, seed=1)


class Both(Toy):
    """Trains on two loaders at once."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["a"]) + super().loss(batch["b"])


class Singles(Toy):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x[None], y[None]))


class Fetching(Toy):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def plain(**kwargs: Any) -> DataLoader:
    return DataLoader(regression(SAMPLES), **{"batch_size": 3, "shuffle": True, **kwargs})


def combined(rank: int) -> CombinedLoader:
    return CombinedLoader({"a": plain(), "b": SizedLoader(rank)}, "min_size")


def one_list_each(rank: int, world: int) -> DataLoader:
    def first(samples: Any) -> Any:
        return samples[0]

    class Rows(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(t[index] for t in self.tensors)

    data = Rows(*regression(SAMPLES).tensors)
    return DataLoader(data, batch_size=1, sampler=Listed(data, world, rank), collate_fn=first)


Case = tuple[Callable[[], LightningModule], Callable[[int, int], Any], dict[str, Any], tuple[str, ...]]
CASES: dict[str, Case] = {
    "streams": (
        Toy, lambda r, w: DataLoader(RankStream(r), batch_size=3), {},
        ("IterableDataset", "stream='finite'", "stream='infinite'", "stream='shared'"),
    ),
    "streams of batches": (
        Toy, lambda r, w: DataLoader(RankStream(r, True), batch_size=None), {}, ("makes its own batches", "batch_size"),
    ),
    "own loader": (Toy, lambda r, w: OwnLoader(r), {}, ("type OwnLoader", "torch.utils.data.DataLoader")),
    "own loader, sized": (Toy, lambda r, w: SizedLoader(r), {"accumulate_grad_batches": 2}, ("type SizedLoader",)),
    "own loader, GAN": (Gan, lambda r, w: SizedLoader(r), {}, ("type SizedLoader",)),
    "own iterator": (Toy, lambda r, w: OwnIterator(regression(SAMPLES), sampler=DistributedSampler(
        regression(SAMPLES), w, r)), {}, ("OwnIterator.__iter__ does not draw",)),
    "one of two": (Both, lambda r, w: combined(r), {}, ("type SizedLoader",)),
    "single items": (Singles, lambda r, w: plain(batch_size=None), {}, ("single items", "set batch_size")),
    "batch sampler": (
        Toy, lambda r, w: DataLoader(
            regression(SAMPLES), batch_sampler=OwnBatches(SequentialSampler(range(SAMPLES)), 3, False)
        ), {}, ("custom batch sampler (OwnBatches)", "LoadBalancedStrategy(batch_sampler='pool')"),
    ),
    "batch sampler, own division": (
        Toy, lambda r, w: DataLoader(
            regression(SAMPLES), batch_sampler=OwnBatches(SequentialSampler(range(r, SAMPLES, w)), 3, False)
        ), {"use_distributed_sampler": False}, ("custom batch sampler",),
    ),
    "sampler of lists": (
        Toy, lambda r, w: DataLoader(
            regression(SAMPLES), batch_size=None, sampler=Listed(range(SAMPLES), w, r)
        ), {}, ("custom batch sampler (Listed)", "pool"),
    ),
    "sampler of lists, one each": (
        Toy, lambda r, w: one_list_each(r, w), {}, ("Listed yields lists", "pass it as batch_sampler"),
    ),
    "sampler without a length": (
        Toy, lambda r, w: DataLoader(regression(SAMPLES), batch_size=3, sampler=iter(range(r, SAMPLES, w))),
        {"use_distributed_sampler": False, "max_epochs": 1}, ("has no length", "give it a __len__"),
    ),
    "dataloader_iter": (Fetching, lambda r, w: plain(), {}, ("dataloader_iter", "take `batch` instead")),
}  # fmt: skip


class Logged(Callback):
    """What a fit logged: the values of each step, on this rank."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trained(rank: int, world: int, name: str, strategy: Any) -> tuple[Any, ...]:
    make, loader, options, _ = CASES[name]
    torch.manual_seed(rank)
    module, logged = make(), Logged()
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": 2, "callbacks": [logged], **options})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, loader(rank, world))
    told = [str(w.message) for w in said if "equal parts" in str(w.message)]
    checkpoint = CHECKPOINT_KEY in dump(trainer)
    return weights(module), logged.values, trainer.global_step, checkpoint, told


def dump(trainer: Trainer) -> dict[str, Any]:
    return trainer.strategy.with_state({}) if isinstance(trainer.strategy, LoadBalancedStrategy) else {}


def job(rank: int, world: int) -> dict[str, tuple[Any, Any]]:
    def both(name: str) -> tuple[Any, Any]:
        ddp = {"process_group_backend": "gloo", "find_unused_parameters": CASES[name][0] is Gan}
        ours = LoadBalancedStrategy(**ddp, monitor=False)
        return trained(rank, world, name, DDPStrategy(**ddp)), trained(rank, world, name, ours)

    return {name: both(name) for name in CASES}


@cache
def runs() -> list[dict[str, tuple[Any, Any]]]:
    return run_ranks(2, job)


@pytest.mark.stock_ddp("iterable", "no_dataloader", "batch_sampler", "dataloader_iter", "balanced")
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_divided_trains_as_under_stock_ddp(name: str) -> None:
    for rank, results in enumerate(runs()):
        stock, ours = results[name]
        assert all(torch.equal(stock[0][k], ours[0][k]) for k in stock[0])
        assert stock[1] == ours[1] and stock[1]
        assert stock[2] == ours[2] > 0
        assert not ours[3]  # a checkpoint is stock DDP's
        assert len(ours[4]) == (rank == 0) and not stock[4]
        for part in CASES[name][-1] if rank == 0 else ():
            assert part in ours[4][0]


# ---- with what stock DDP has not -----------------------------------------------------------------------------


class TokenStream(IterableDataset):
    def __init__(self, rank: int, world: int) -> None:
        self.first, self.every = rank, world

    def __iter__(self) -> Iterator[Any]:
        data = sequences()
        return iter([data[i] for i in range(self.first, 40, self.every)])


class TokensWeighted(TokensByMethod):
    """The mean over the tokens of all ranks, by hand."""

    batch_weight = None  # type: ignore[assignment]

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[2].sum()
        total = tokens.clone()
        dist.all_reduce(total)
        return super().loss(batch) * tokens / total * dist.get_world_size()


def weighted(rank: int, world: int) -> tuple[Any, Any, str, list[str]]:
    loader = DataLoader(TokenStream(rank, world), batch_size=4)
    ours, by_hand = TokensByMethod(), TokensWeighted()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy = LoadBalancedStrategy(process_group_backend="gloo", monitor=False, max_samples=5)
        rank_trainer(rank, world, strategy, reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(ours, loader)
    told = [str(w.message) for w in said if "equal parts" in str(w.message)]
    rank_trainer(rank, world, DDPStrategy(process_group_backend="gloo"), max_epochs=3).fit(by_hand, loader)
    with pytest.raises(ValueError) as error:
        strategy = LoadBalancedStrategy(process_group_backend="gloo", monitor=False, global_batch_size=8)
        rank_trainer(rank, world, strategy, max_epochs=1).fit(Toy(), loader)
    return weights(ours), weights(by_hand), str(error.value), told


def test_arguments_hold_or_are_named() -> None:
    """``batch_weight`` weighs equal parts too; bounds of shares have no effect; another global batch is refused."""
    for rank, (ours, by_hand, refused, told) in enumerate(run_ranks(2, weighted)):
        assert ours.distance(by_hand) < 1e-14
        assert "global_batch_size=8 needs a train loader whose batches can be divided" in refused
        assert "stream='shared'" in refused
        assert len(told) == (rank == 0)  # once, however often the loaders are loaded
        assert all("Without effect: max_samples" in text for text in told)


def again(rank: int, world: int) -> tuple[list[Any], list[str]]:
    both, fits = CombinedLoader({"a": plain(), "b": plain()}, "min_size"), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            module = Both()
            strategy = LoadBalancedStrategy(process_group_backend="gloo", monitor=False, rebalance=False)
            rank_trainer(rank, world, strategy, max_epochs=1).fit(module, both)
            fits.append(weights(module))
    return fits, [str(w.message) for w in said if "equal parts" in str(w.message)]


def test_a_second_fit_divides_the_users_loaders_anew() -> None:
    """A `CombinedLoader` keeps the copies that the first fit read."""
    for (first, second), told in run_ranks(2, again):
        assert not told and first.distance(second) == 0.0
