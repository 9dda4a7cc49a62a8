"""More of strangers: state of modules, data and loops."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.ranks.kit import weights
from tests.ranks.strangers.kit import ENGINES, everyone, refusal, trainer
from tests.ranks.strangers.more_kit import BATCH, DIVIDED, Small, batches, fit, numbers, right, right_or_refused, unused


def weights_of_classes(rank: int, world: int, engine: str) -> dict[str, Any]:
    """pytorch#63916 kind: weights in a buffer are renewed at the start of each epoch."""

    class Weighted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(2, dtype=torch.float64))

        def on_train_epoch_start(self) -> None:
            self.weight = torch.tensor([1.0, 1.0 + self.current_epoch], dtype=torch.float64)

        def loss(self, batch: Any) -> Any:
            x, y = batch
            weight = self.weight[(y > 0).long()]
            return (weight * (self.net(x) - y).square()).mean()

    module = Weighted()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def frozen_statistics(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2551, PL#18930: train() is overridden so that BatchNorm stays in eval mode."""

    class Frozen(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[1] = nn.BatchNorm1d(6).double()
            with torch.no_grad():
                self.net[1].running_mean.fill_(0.2)

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            for m in self.modules():
                if isinstance(m, nn.BatchNorm1d):
                    m.eval()
            return self

        def on_train_epoch_start(self) -> None:
            self.train()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    module = Frozen()
    fit(rank, world, engine, module, val=batches(numbers(), world, sampler=None), max_epochs=2)
    return weights(module)


def buffer_outside_of_checkpoints(rank: int, world: int, engine: str) -> dict[str, Any]:
    """pytorch#63916 kind: register_buffer(persistent=False), a table in a layer, and a scale set in a hook."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, 6, dtype=torch.float64), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.table.cos()

    class Tabled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[3] = Rotated()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)

        def on_train_epoch_start(self) -> None:
            self.scale.fill_(1.0 + self.current_epoch)
            self.net[3].table.mul_(0.9)

        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * self.scale

    module = Tabled()
    fit(rank, world, engine, module, max_epochs=2)
    return {**weights(module), "table": module.net[3].table.clone(), "scale": module.scale.clone()}


def counted_confusion(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#3728 kind: a matrix of counts as plain attribute, summed over ranks at the end of an epoch."""
    told: list[Any] = []

    class Counted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.counts = torch.zeros(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with torch.no_grad():
                cell = 2 * (y > 0).long() + (x[:, :1] > 0).long()
                self.counts += torch.bincount(cell.flatten(), minlength=4).view(2, 2)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            told.append(self.trainer.strategy.reduce(self.counts.clone(), reduce_op="sum"))
            self.counts.zero_()

    module = Counted()
    fit(rank, world, engine, module, max_epochs=2)
    return {"told": told}


def loss_on_the_module(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2026 kind: losses are summed on the module, their mean is logged at the end of the epoch."""

    class Summed(Small):
        def on_train_epoch_start(self) -> None:
            self.total, self.rows = torch.zeros((), dtype=torch.float64), torch.zeros(())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.total += loss.detach() * len(batch[0])
            self.rows += len(batch[0])
            return loss

        def on_train_epoch_end(self) -> None:
            total = self.trainer.strategy.reduce(self.total, reduce_op="sum")
            rows = self.trainer.strategy.reduce(self.rows, reduce_op="sum")
            self.log("mean", total / rows)

    module = Summed()
    fits = fit(rank, world, engine, module)
    return {"mean": fits.callback_metrics["mean"]}


def moving_loss_in_a_buffer(rank: int, world: int, engine: str) -> dict[str, Any]:
    """pytorch#63916: a running mean of the loss in a buffer; the ranks end with one value of it."""

    class Smoothed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("smooth", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.smooth = 0.9 * self.smooth + 0.1 * loss.detach()
            return loss

    module = Smoothed()
    fit(rank, world, engine, module)
    told = everyone(float(module.smooth)) if world > 1 else [float(module.smooth)]
    kept = {k: v for k, v in weights(module).items() if k != "smooth"}
    return {**kept, "near": all(0.01 < value < 1.5 for value in told)}


def keys_of_a_checkpoint(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#3545, PL#1982: on_save_checkpoint reads states, on_load_checkpoint changes them; ckpt_path='last'."""
    folder = "kept" if world > 1 else tempfile.mkdtemp()
    facts: dict[str, Any] = {}

    class Saved(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            facts["sum"] = float(sum(v.sum() for v in checkpoint["state_dict"].values()))
            moments = checkpoint["optimizer_states"][0]["state"]
            facts["moments"] = float(sum(v["exp_avg_sq"].sum() for v in moments.values()))
            checkpoint["mine"] = len(checkpoint["state_dict"])

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            facts["mine"] = checkpoint["mine"]
            checkpoint["state_dict"]["net.4.weight"].zero_()

    def keep() -> Any:
        return {"callbacks": [ModelCheckpoint(folder, save_last=True)], "enable_checkpointing": True}

    module = Saved()
    fit(rank, world, engine, module, max_epochs=1, **keep())
    first = dict(facts) if rank == 0 else {}
    module = Saved()
    fits = trainer(rank, world, engine, DIVIDED, max_epochs=2, **keep())
    fits.fit(module, batches(numbers(), world), ckpt_path="last")
    first = everyone(first)[0] if world > 1 else first
    return {**weights(module), **first, "mine": facts["mine"], "step": fits.global_step}


def best_of_a_fit(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's documentation: fit, then test and validate of the best checkpoint."""
    folder = "best" if world > 1 else tempfile.mkdtemp()

    class Tested(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    module = Tested()
    best = ModelCheckpoint(folder, monitor="val", save_top_k=1)
    val = batches(numbers(), world, sampler=None)
    fits = fit(
        rank, world, engine, module, val=val, max_epochs=2, callbacks=[best], enable_checkpointing=True
    )
    (tested,) = fits.test(module, val, ckpt_path="best", verbose=False)
    (again,) = fits.validate(module, val, ckpt_path="best", verbose=False)
    told = fits.predict(module, val)
    every = sum(float(t.sum()) for t in told)
    total = sum(everyone(every)) if world > 1 else every
    return {"best": best.best_model_score, **tested, **again, "predicted": total}


def weighted_sampler(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#12866, PL#10946: a WeightedRandomSampler whose weights are changed at an epoch's end."""
    seen: list[set[int]] = []

    class Seen(Small):
        def on_train_epoch_start(self) -> None:
            self.seen: set[int] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen |= set(batch[2].tolist())
            return self.loss(batch[:2])

        def on_train_epoch_end(self) -> None:
            seen.append(self.seen)
            sampler.weights = torch.tensor([0.0] * 16 + [1.0] * 16, dtype=torch.float64)

    x, y = numbers().tensors
    sampler = WeightedRandomSampler([1.0] * 16 + [0.0] * 16, 32)
    module = Seen()
    fit(
        rank,
        world,
        engine,
        module,
        batches(TensorDataset(x, y, torch.arange(32)), world, sampler=sampler),
        max_epochs=2,
    )
    told = [set().union(*parts) for parts in zip(*everyone(seen), strict=True)] if world > 1 else seen
    return {"first": max(told[0]) < 16, "second": min(told[1]) >= 16}


class Sentences(Dataset):
    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.lengths = [2 + int(n) for n in torch.randint(0, 5, (32,), generator=g)]
        self.rows = [torch.randn(n, 3, generator=g, dtype=torch.float64) for n in self.lengths]

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Any:
        return self.rows[i], self.rows[i].sum().sin()


def padded(rows: list[Any]) -> Any:
    xs = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return xs, torch.tensor([len(x) for x, _ in rows]), torch.stack([y for _, y in rows])


class Recurrent(Small):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 3, batch_first=True).double()
        with torch.no_grad():
            for p in self.rnn.parameters():
                p.fill_(0.2)

    def loss(self, batch: Any) -> Any:
        x, lengths, y = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.rnn(packed)
        return (self.net(last[-1]).squeeze(1) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


def sorted_sentences(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#3668 kind: sentences padded by the collate function, an LSTM over packed sequences."""
    data = Sentences()
    module = Recurrent()
    loader = batches(data, world, collate_fn=padded)
    fits = fit(rank, world, engine, module, loader, max_epochs=2)
    return {**weights(module), "loss": fits.callback_metrics["loss"]}


def reentrant_checkpoint(rank: int, world: int, engine: str, reentrant: bool) -> dict[str, Any]:
    """torch.utils.checkpoint inside a layer, reentrant or not."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    class Saving(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = Again().double()
            with torch.no_grad():
                for p in self.net[2].parameters():
                    p.fill_(0.1)

    module = Saving()
    fit(rank, world, engine, module)
    return weights(module)


def views_after_transfer(rank: int, world: int, engine: str, before: bool) -> dict[str, Any]:
    """PL#3399, PL#10469: a batch hook makes two rows of each."""

    class Doubled(Small):
        def double_rows(self, batch: Any) -> Any:
            x, y = batch
            return torch.cat([x, x + 0.1]), torch.cat([y, y])

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return self.double_rows(batch) if before else batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch if before else self.double_rows(batch)

    module = Doubled()
    fit(rank, world, engine, module)
    return weights(module)


def two_branches(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#17212 kind: which head is used depends on the epoch."""

    class Branched(Small):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]).double()
            with torch.no_grad():
                for p in self.heads.parameters():
                    p.fill_(0.5)

        def loss(self, batch: Any) -> Any:
            x, y = batch
            head = self.heads[self.current_epoch % 2]
            return (head(self.net(x)) - y).square().mean()

    module = Branched()
    unused(rank, world, engine, max_epochs=2).fit(module, batches(numbers(), world))
    return weights(module)


def more_epochs(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#4481, PL#21296: a hook ends an epoch by -1, another raises max_epochs."""

    class Longer(Small):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.trainer.fit_loop.max_epochs = 3

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch == 1 and batch_idx == 1 else None

    module = Longer()
    fits = fit(rank, world, engine, module)
    return {**weights(module), "step": fits.global_step, "epoch": fits.current_epoch}


def last_batches(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's documentation: hooks ask is_last_batch, num_training_batches and the loader."""
    told: list[Any] = []

    class Asks(Small):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.is_last_batch:
                told.append([batch_idx, self.trainer.num_training_batches, self.trainer.global_step])

        def on_train_epoch_start(self) -> None:
            loader = self.trainer.train_dataloader
            told.append([len(loader.dataset), len(loader), loader.num_workers])

    module = Asks()
    fit(rank, world, engine, module, max_epochs=2)
    return {"told": told}


class Rows(IterableDataset):
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return 32 // self.world

    def __iter__(self) -> Any:
        x, y = numbers().tensors
        for i in range(self.rank, 32, self.world):
            yield x[i], y[i]


def stream_with_a_length(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#15734 kind: an IterableDataset with a length, divided by rank."""
    module = Small()
    loader = DataLoader(Rows(rank, world), batch_size=BATCH // world)
    fits = fit(rank, world, engine, module, loader, max_epochs=2)
    return {**weights(module), "step": fits.global_step}


class Modular(LightningDataModule):
    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.scale = world, 1.0

    def setup(self, stage: str) -> None:
        full = numbers(48)
        self.data = ConcatDataset(
            [Subset(full, range(0, 32)), Subset(full, range(40, 48)), Subset(full, range(32, 40))]
        )

    def train_dataloader(self) -> Any:
        return batches(self.data, self.world)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * self.scale, batch[1]

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}


def hooks_of_a_datamodule(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#3399: a data module with hooks and ConcatDataset of Subsets; the module changes its scale each epoch."""

    class Scales(Small):
        def on_train_epoch_start(self) -> None:
            self.trainer.datamodule.scale = 1.0 + 0.5 * self.current_epoch

    module = Scales()
    fits = trainer(rank, world, engine, DIVIDED, max_epochs=2)
    fits.fit(module, datamodule=Modular(world))
    return weights(module)


def kept_workers(rank: int, world: int, engine: str) -> dict[str, Any]:
    """torch's documentation: persistent_workers and a worker_init_fn."""
    module = Small()
    loader = batches(
        numbers(),
        world,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=first_of_worker,
        multiprocessing_context="fork",
    )
    fit(rank, world, engine, module, loader, max_epochs=2)
    return weights(module)


def first_of_worker(worker: int) -> None:
    torch.manual_seed(worker)


def validated_in_a_hook(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#15860 kind: after each epoch the module runs over its validation loader by itself."""
    told: list[Any] = []

    class Runs(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                told.append(float(sum(self.loss(batch) for batch in batches(numbers(), 1, sampler=None))))

    module = Runs()
    fit(rank, world, engine, module)
    return {"told": told}


@pytest.mark.stock_ddp("frozen_norm")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("situation", "how"),
    [
        (frozen_statistics, []),
        (reentrant_checkpoint, [True]),
        (reentrant_checkpoint, [False]),
        (two_branches, []),
    ],
)
@pytest.mark.short("pipeline", "frozen_statistics", "reentrant_checkpoint-how1", "two_branches")
def test_layers(situation: Any, how: list[Any], engine: str) -> None:
    right(situation, engine, *how)


@pytest.mark.stock_ddp("buffers_set")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [weights_of_classes, buffer_outside_of_checkpoints])
@pytest.mark.short("buffer_outside_of_checkpoints", "stale", "pipeline")
def test_buffers_set_in_hooks(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("kept_by_steps")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [counted_confusion, loss_on_the_module, moving_loss_in_a_buffer])
@pytest.mark.short("counted_confusion", "moving_loss_in_a_buffer", "pipeline")
def test_kept_by_steps(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("hooks_checkpoint", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])  # pipeline: ranks but rank 0 get an empty state
def test_keys_of_a_checkpoint(engine: str) -> None:
    right(keys_of_a_checkpoint, engine, tolerance=1e-8)


@pytest.mark.stock_ddp(
    "hooks_checkpoint", "pipeline", differs="weights and optimizer states are in it on rank 0 only"
)  # fmt: skip
def test_what_of_a_checkpoint_is_on_rank_0_only_is_told_elsewhere() -> None:
    assert "on rank 0 only" in refusal(keys_of_a_checkpoint, "pipeline")


@pytest.mark.stock_ddp("ckpt_path")
@pytest.mark.parametrize("engine", ENGINES)
def test_best_of_a_fit(engine: str) -> None:
    right(best_of_a_fit, engine, tolerance=1e-7)


@pytest.mark.stock_ddp("workers", "samplers")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "situation", [weighted_sampler, sorted_sentences, kept_workers, hooks_of_a_datamodule]
)
def test_data(situation: Any, engine: str) -> None:
    right(situation, engine, tolerance=1e-7)


@pytest.mark.stock_ddp("hooks_transfer_rows", "balanced", "stale")
@pytest.mark.stock_ddp("hooks_transfer_rows", "pipeline", refused="the module needs `split_batch(batch, sizes)`")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.short("True", "balanced", "stale")
def test_views(engine: str, before: bool) -> None:
    if engine == "pipeline":
        assert "split_batch" in refusal(views_after_transfer, engine, before)
    else:
        right(views_after_transfer, engine, before)


@pytest.mark.stock_ddp("iterable", "balanced")
@pytest.mark.stock_ddp("iterable", "stale", refused="needs `stream='finite'`")
@pytest.mark.stock_ddp("iterable", "pipeline", refused="needs `stream='shared'`")
@pytest.mark.parametrize("engine", ENGINES)
def test_stream_with_a_length(engine: str) -> None:
    assert bool(right_or_refused(stream_with_a_length, engine)) == (engine != "balanced")


@pytest.mark.stock_ddp("epoch_ended")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [more_epochs, last_batches])
@pytest.mark.short("more_epochs", "stale", "pipeline")
def test_loops(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("layers_in_hooks", "balanced", "stale")
@pytest.mark.stock_ddp("layers_in_hooks", "pipeline", refused="the layers are on several ranks")
@pytest.mark.parametrize("engine", ENGINES)
def test_validated_in_a_hook(engine: str) -> None:
    assert bool(right_or_refused(validated_in_a_hook, engine)) == (engine == "pipeline")
