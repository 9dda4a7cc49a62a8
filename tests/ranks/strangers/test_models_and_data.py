"""Models, optimizers and data that a stranger may bring along, under the engines that no other test shows it for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.ranks.kit import weights
from tests.ranks.strangers.kit import ENGINES, refusal, trainer
from tests.ranks.strangers.more_kit import BATCH, DIVIDED, Small, batches, fit, numbers, right


class Tied(Small):
    """Two layers share one weight, on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = nn.Linear(6, 6).double()
        self.net[4].weight = self.net[2].weight  # type: ignore[assignment]


def tied(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = Tied()
    with torch.no_grad():
        module.net[4].bias.fill_(0.1)  # type: ignore[operator]
    fit(rank, world, engine, module)
    return weights(module)


class Normed(torch.optim.SGD):
    """LAMB's kind: a norm over all gradients inside of the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()
        return loss


def norm_of_all(rank: int, world: int, engine: str) -> dict[str, Any]:
    class Own(Small):
        def configure_optimizers(self) -> Any:
            return Normed(self.parameters(), lr=0.1)

    module = Own()
    fit(rank, world, engine, module)
    return weights(module)


class Branches(Small):
    """Two towers side by side: no sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(3, 1).double()
        with torch.no_grad():
            for p in self.side.parameters():
                p.fill_(0.3)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return (self.net(x) * self.side(x) - y).square().mean()


def branches(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = Branches()
    fit(rank, world, engine, module)
    return weights(module)


def averaged_with_statistics(rank: int, world: int, engine: str) -> dict[str, Any]:
    """SWA goes over the data once more for the statistics of BatchNorm."""

    class Norms(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def loss(self, batch: Any) -> Any:
            x, y = batch
            return super().loss((x + 0 * self.norm(x), y))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Norms()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swa, val = StochasticWeightAveraging(0.01, swa_epoch_start=1), batches(numbers(), world, sampler=None)
        fit(rank, world, engine, module, val=val, max_epochs=3, callbacks=[swa])
    facts = {name: value for name, value in weights(module).items() if "running" not in name}
    return {**facts, "renewed": bool((module.norm.running_mean != 0).all())}


def scaled_by_hand(rank: int, world: int, engine: str) -> dict[str, Any]:
    """precision="16-mixed" in manual optimization: the scaler is the plugin's."""

    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.float()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss([t.float() for t in batch]))
            optimizer.step()
            optimizer.zero_grad()

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)  # type: ignore[arg-type]
    module = Manual()
    fits = trainer(rank, world, engine, DIVIDED, **({"plugins": [plugin]} if world == 1 else {}))
    if world > 1:
        fits.strategy.precision_plugin = plugin
    fits.fit(module, batches(numbers(), world))
    return {**weights(module), "scale": scaler.get_scale()}


class Dicts(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch["names"]) == len(batch["deep"][0])
        return self.loss((batch["deep"][0], batch["y"]))


def dictionaries(rows: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(rows)
    return {"deep": [x], "y": y, "names": [f"row {i}" for i in range(len(x))]}


class Whole:
    """A batch of a class of the user's own, which moves and divides itself."""

    def __init__(self, rows: Any) -> None:
        self.x, self.y = torch.utils.data.default_collate(rows)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.x, self.y = self.x.to(*args, **kwargs), self.y.to(*args, **kwargs)
        return self

    def split(self, sizes: Any) -> Any:
        made = []
        for x, y in zip(self.x.split(sizes), self.y.split(sizes), strict=True):
            made.append(Whole.__new__(Whole))
            made[-1].x, made[-1].y = x, y
        return made


class Wholes(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss((batch.x, batch.y))


class Strict(DataLoader):
    """Needs an argument that nobody else knows."""

    def __init__(self, *args: Any, secret: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.secret = secret


def kinds_of_batches(rank: int, world: int, engine: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for module, collate in ((Dicts(), dictionaries), (Wholes(), Whole)):
        fit(rank, world, engine, module, batches(numbers(), world, collate_fn=collate))
        told[type(module).__name__] = weights(module)
    module = Small()
    sampler = batches(numbers(), world).sampler if world == 1 else None
    fits = fit(rank, world, engine, module, Strict(numbers(), batch_size=BATCH // world, sampler=sampler, secret=7))
    return {**told, **weights(module), "secret": getattr(fits.train_dataloader, "secret", None)}


class Own:
    """No DataLoader: it yields batches."""

    def __init__(self, rank: int, world: int) -> None:
        self.loader = DataLoader(numbers(), batch_size=BATCH // world)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def no_loader(rank: int, world: int, engine: str) -> None:
    fit(rank, world, engine, Small(), Own(rank, world))


class Pool(BatchSampler):
    """A subclass, which may promise something about its batches."""


def batch_sampler(rank: int, world: int, engine: str) -> None:
    pool = Pool(SequentialSampler(range(32)), 8, False)
    fit(rank, world, engine, Small(), DataLoader(numbers(), batch_sampler=pool))


class Iterated(Small):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def iterated(rank: int, world: int, engine: str) -> None:
    fit(rank, world, engine, Iterated())


@pytest.mark.stock_ddp("tied")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_on_both_sides_of_a_cut(engine: str) -> None:
    right(tied, engine)


@pytest.mark.stock_ddp("optimizer_norm", "balanced")
@pytest.mark.stock_ddp("optimizer_norm", "stale", refused="the server makes the step, and has no closure to call")
def test_a_norm_of_all_gradients_in_the_step() -> None:
    right(norm_of_all, "balanced")
    assert "Normed.step() needs a closure" in refusal(norm_of_all, "stale")


@pytest.mark.stock_ddp("layers", "StochasticWeightAveraging_norm", "precision_mixed_manual", "balanced")
@pytest.mark.stock_ddp("layers", "StochasticWeightAveraging_norm", "stale")
def test_branches_averaged_statistics_and_a_scaler_by_hand() -> None:
    for engine in ("balanced", "stale"):
        right(branches, engine)
        right(averaged_with_statistics, engine)
    right(scaled_by_hand, "balanced", tolerance=1e-3)


@pytest.mark.stock_ddp("subclasses")
@pytest.mark.stock_ddp("batch_kinds", "balanced", "stale")
@pytest.mark.parametrize("engine", ENGINES)
def test_batches_and_loaders_of_any_kind(engine: str) -> None:
    right(kinds_of_batches, engine)


REFUSED = {no_loader: "of type Own cannot be divided", batch_sampler: "(batch_sampler='pool')",
           iterated: "training_step(dataloader_iter)"}  # fmt: skip


@pytest.mark.stock_ddp(
    "no_dataloader", "dataloader_iter", "stale", "pipeline", refused="such batches cannot be divided"
)  # fmt: skip
@pytest.mark.stock_ddp("batch_sampler", "stale", "pipeline", refused="needs `batch_sampler='pool'`")
@pytest.mark.parametrize("engine", ["stale", "pipeline"])
def test_batches_that_cannot_be_divided_are_refused(engine: str) -> None:
    for situation, words in REFUSED.items():
        assert words in refusal(situation, engine)
