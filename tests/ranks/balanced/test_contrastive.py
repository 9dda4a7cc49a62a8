"""Losses over the rows of all ranks, whose parts are unequal: the weights are those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero import ShardedBalancedStrategy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Scripted, balanced, rank_trainer, single
from tests.ranks.strangers import kit

EXACT = 1e-12
SAMPLES, BATCH, DIM = 38, 12, 4  # the last batch has fewer samples than there are ranks
TOLD = "self.all_gather of rows with gradients"

SPELLINGS: dict[str, Callable[[Any], Tensor]] = {
    "flatten": lambda g: g.flatten(0, 1),
    "view": lambda g: g.view(-1, g.shape[-1]),
    "reshape": lambda g: g.reshape(g.size(0) * g.size(1), -1),
    "cat of a tuple": lambda g: torch.cat(tuple(g)),
    "cat of a list": lambda g: torch.cat(list(g), dim=0),
    "cat of unbind": lambda g: torch.cat(g.unbind()),
    "cat of indices": lambda g: torch.cat([g[i] for i in range(len(g))]),
    "concatenate of chunks": lambda g: torch.concatenate(g.chunk(g.size(0))).flatten(end_dim=1),
}


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64) for _ in range(2))
    return TensorDataset(x, y, torch.randint(3, (SAMPLES,), generator=g))


class Clip(LightningModule):
    """Two towers and a temperature; each row against those of all ranks, as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.images, self.texts = nn.Linear(5, DIM).double(), nn.Linear(5, DIM).double()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def rows(self, n: int) -> Tensor:
        """Where this rank's rows are among those of all."""
        ranks = torch.as_tensor(self.all_gather(torch.full((n,), self.global_rank), sync_grads=True)).flatten()
        return (ranks < self.global_rank).sum().clamp(max=len(ranks) - n) + torch.arange(n)

    def everyone(self, z: Tensor) -> Tensor:
        return torch.as_tensor(self.all_gather(z, sync_grads=True)).view(-1, DIM)

    def loss(self, images: Tensor, texts: Tensor, batch: Any) -> Tensor:
        rows = self.rows(len(images))
        logits = images @ self.everyone(texts).T, texts @ self.everyone(images).T
        return sum(F.cross_entropy(self.scale.exp() * one, rows) for one in logits) / 2  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(F.normalize(self.images(batch[0])), F.normalize(self.texts(batch[1])), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Whole(Clip):
    """Each rank computes the loss of all rows."""

    def loss(self, images: Tensor, texts: Tensor, batch: Any) -> Tensor:
        self.rows(len(images))
        logits = self.scale.exp() * self.everyone(images) @ self.everyone(texts).T
        rows = torch.arange(len(logits))
        return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


class Collections(Clip):
    """Gathers both at once."""

    def loss(self, images: Tensor, texts: Tensor, batch: Any) -> Tensor:
        rows = self.rows(len(images))
        every: Any = self.all_gather({"images": images, "texts": [texts]}, sync_grads=True)
        logits = images @ every["texts"][0].view(-1, DIM).T, texts @ every["images"].view(-1, DIM).T
        return sum(F.cross_entropy(self.scale.exp() * one, rows) for one in logits) / 2  # type: ignore[return-value]


class Supervised(Clip):
    """Two views of each sample in one tensor; which rows belong together is gathered, too. Own rows are masked."""

    def loss(self, images: Tensor, texts: Tensor, batch: Any) -> Tensor:
        z, labels = torch.cat([images, texts]), batch[2].repeat(2)
        every, own = torch.as_tensor(self.all_gather(labels, sync_grads=True)).flatten(), self.rows(len(z))
        logits = (self.scale.exp() * z @ self.everyone(z).T).index_put(
            (torch.arange(len(z)), own), torch.tensor(-1e9).double()
        )
        same = (labels[:, None] == every).double()
        return -(F.log_softmax(logits, 1) * same).clamp(min=-1e3).sum(1).div(same.sum(1)).mean()


class Undefined(Clip):
    """The loss of a rank without samples is NaN."""

    def loss(self, images: Tensor, texts: Tensor, batch: Any) -> Tensor:
        loss = super().loss(images, texts, batch)
        return loss * float("nan") if getattr(self.trainer.strategy, "current_samples", int)() == 0 < self.on else loss

    @property
    def on(self) -> int:
        return self.trainer.world_size - 1


class ByHand(Clip):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Summed(Clip):
    """A sum over the rank's rows."""

    def loss(self, images: Tensor, texts: Tensor, batch: Any) -> Tensor:
        return super().loss(images, texts, batch) * len(images) / (30 if self.trainer.world_size == 1 else 10)


CASES: dict[str, tuple[type[Clip], dict[str, Any], dict[str, Any]]] = {
    "own rows": (Clip, {}, {}),
    "all rows on each rank": (Whole, {}, {}),
    "collections": (Collections, {}, {}),
    "two views, labels gathered": (Supervised, {}, {}),
    "NaN of a dummy": (Undefined, {}, {}),
    "accumulation": (Clip, {}, {"accumulate_grad_batches": 2}),
    "manual optimization": (ByHand, {}, {}),
    "sum": (Summed, {"loss_reduction": "sum"}, {}),
}


def distance(module: nn.Module, other: dict[str, Any]) -> float:
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
    return max(float((p - other[name]).detach().abs().max()) for name, p in whole.items())


def expected(make: type[Clip], **options: Any) -> dict[str, Tensor]:
    """In the test's process: where there are ranks, one device would gather from them, too."""
    module = make()
    single(module, data(), BATCH, max_epochs=1, **options)
    return {name: p.detach() for name, p in module.named_parameters()}


Found = dict[str, tuple[float, set[tuple[int, ...]]]]
"""By case: the distance from one process, and the shares there were."""


def exact_job(rank: int, world: int, wanted: dict[str, dict[str, Tensor]]) -> Found:
    found: Found = {}
    for name, (make, arguments, options) in CASES.items():
        module, parts = make(), set[tuple[int, ...]]()
        strategy = balanced(min_samples=0, **arguments)
        module.on_train_batch_end = (  # type: ignore[method-assign]
            lambda *_, s=strategy, p=parts: p.add(s._run.part.shares)  # pyright: ignore
        )
        loader = DataLoader(data(), batch_size=BATCH // world)
        rank_trainer(rank, world, strategy, max_epochs=1, **options).fit(module, loader)
        found[name] = distance(module, wanted[name]), parts
    return found


@pytest.mark.stock_ddp("all_gather_step", "balanced")
def test_weights_are_those_of_one_process() -> None:
    wanted = {name: expected(make, **options) for name, (make, _, options) in CASES.items()}
    for found in run_ranks(3, exact_job, wanted):
        for name, (far, parts) in found.items():
            assert far <= EXACT, name
            assert any(not min(shares) for shares in parts) and len(parts) > 2, name


class Fixed(Clip):
    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


class Layers(Fixed):
    def configure_model(self) -> None:
        if self.trainer.world_size > 1:
            for part in (self.images, self.texts):
                fully_shard(part, mesh=self.trainer.strategy.device_mesh["data_parallel"])  # type: ignore[attr-defined]


class WholeFixed(Whole, Fixed):
    pass


class WholeLayers(Whole, Layers):
    pass


def sharded_job(rank: int, world: int, wanted: list[dict[str, Tensor]]) -> list[float]:
    far = []
    for make, plain in zip((Layers, WholeLayers), wanted, strict=True):
        strategy = ShardedBalancedStrategy(
            monitor=False, process_group_backend="gloo", policy=Scripted(), exchange_every=1, min_samples=0
        )
        module, loader = make(), DataLoader(data(), batch_size=BATCH // world)
        rank_trainer(rank, world, strategy, max_epochs=1).fit(module, loader)
        far.append(distance(module, plain))
    return far


def test_weights_of_a_sharded_model_are_those_of_one_process() -> None:
    wanted = [expected(Fixed), expected(WholeFixed)]
    assert max(far for found in run_ranks(3, sharded_job, wanted) for far in found) <= EXACT


# ---- the shape ------------------------------------------------------------------------------------------------


class Spelled(Clip):
    """One step; each way to put the rows together, with gradients, and without a leading dimension of ranks' number."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.every: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, loss = batch[0], self.images(batch[0]).sum()
        for name, spelled in SPELLINGS.items():
            leaf = x.clone().requires_grad_()
            every: Any = self.all_gather(leaf, sync_grads=True)
            self.shapes[name] = tuple(every.shape)
            rows = spelled(every)
            weights = torch.arange(1.0, rows.numel() + 1).double().view_as(rows)
            (own,) = torch.autograd.grad((rows * weights).sum(), leaf)
            self.every[name] = [*rows.flatten().tolist(), *own.flatten().tolist()]
        flat: Any = self.all_gather(x[:, 0])
        self.every["one dimension"] = flat.flatten().tolist()
        assert torch.equal(flat.view(-1), torch.cat(tuple(flat))) and self.all_gather(x.clone()).requires_grad is False  # type: ignore[union-attr]
        return loss


def spelled_job(rank: int, world: int, options: Any) -> Any:
    strategy = "ddp" if options is None else balanced(policy=None, **options)
    module, loader = Spelled(), DataLoader(data(), batch_size=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TOLD)
        rank_trainer(rank, world, strategy, max_steps=1).fit(module, loader)
    return module.shapes, module.every


@pytest.mark.parametrize("shares", [[12, 4], [8, 8]])
def test_every_spelling_has_the_rows_in_the_order_of_the_parts(shares: list[int]) -> None:
    order = list(DistributedSampler(data(), num_replicas=1, rank=0))[:16]  # type: ignore[arg-type]
    rows = data().tensors[0][order]
    for rank, (shapes, every) in enumerate(run_ranks(2, spelled_job, {"min_samples": shares, "max_samples": shares})):
        assert set(shapes.values()) == {(2, 8, 5) if shares == [8, 8] else (1, 16, 5)}
        before = sum(shares[:rank]) * 5
        slopes = [2.0 * (before + i + 1) for i in range(shares[rank] * 5)]  # of both ranks' sums, as stock DDP's
        for name in SPELLINGS:
            assert every[name] == [*rows.flatten().tolist(), *slopes], name
        assert every["one dimension"] == rows[:, 0].tolist()


def stock_job(rank: int, world: int) -> list[float]:
    far = []
    for make in (Clip, Whole):
        ours, stock = make(), make()
        loader = DataLoader(data(), batch_size=6, drop_last=True)
        rank_trainer(rank, world, balanced(policy=None, rebalance=False), max_epochs=1).fit(ours, loader)
        rank_trainer(rank, world, "ddp", max_epochs=1).fit(stock, loader)
        far.append(distance(ours, {name: p.detach() for name, p in stock.named_parameters()}))
    return far


def test_equal_parts_train_as_under_stock_ddp() -> None:
    """Up to the order of a batch: stock DDP's ranks take turns in drawing, ours have pieces."""
    assert max(far for both in run_ranks(2, stock_job) for far in both) <= EXACT


# ---- what is told, and what is refused ------------------------------------------------------------------------


class Counting(Clip):
    """Takes positions for granted that unequal parts do not have."""

    def rows(self, n: int) -> Tensor:
        return torch.arange(n)


def told_job(rank: int, world: int) -> list[int]:
    counts = []
    for make in (Clip, Counting):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = DataLoader(data(), batch_size=8)
            rank_trainer(rank, world, balanced(policy=None, **kit.UNEVEN), max_epochs=1).fit(make(), loader)
        counts.append(sum(TOLD in str(w.message) for w in caught))
    return counts


def test_positions_are_told_of_once_unless_they_are_gathered() -> None:
    assert run_ranks(2, told_job) == [[0, 1], [0, 0]]


class ByRank(Clip):
    def everyone(self, z: Tensor) -> Tensor:
        every: Any = self.all_gather(z, sync_grads=True)
        return torch.cat([every[rank] for rank in range(self.trainer.world_size)])


def refused_job(rank: int, world: int, engine: str, make: type[Clip], options: dict[str, Any]) -> None:
    strategy = balanced(**options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TOLD)
        rank_trainer(rank, world, strategy, max_epochs=1).fit(make(), DataLoader(data(), batch_size=8))


def test_pieces_are_refused_and_so_are_rows_by_rank() -> None:
    said = kit.refusal(refused_job, "balanced", Clip, {"max_samples": [4, 4]})
    assert "divides into pieces" in said and "accumulate_grad_batches" in said
    with pytest.raises(IndexError, match="rebalance=False"):
        run_ranks(2, refused_job, "balanced", ByRank, {})
