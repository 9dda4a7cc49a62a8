"""More of strangers: callbacks of Lightning and of lightning-bolts on unequal devices."""

from __future__ import annotations

import copy
import math
import os
import tempfile
import time
import zipfile
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    SpikeDetection,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.ranks.kit import weights
from tests.ranks.strangers.kit import ENGINES, ends, everyone, refusal
from tests.ranks.strangers.more_kit import Small, batches, fit, numbers, right, right_or_refused


class Twins(Small):
    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return (self.net(x) - self.target(x + 0.1).detach() - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class MovingTarget(Callback):
    tau = initial = 0.9

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            for (name, online), (_, target) in zip(
                pl_module.net.named_parameters(), pl_module.target.named_parameters(), strict=True
            ):
                if "weight" in name:
                    target.data = self.tau * target.data + (1 - self.tau) * online.data
        steps = len(trainer.train_dataloader) * trainer.max_epochs
        self.tau = 1 - (1 - self.initial) * (math.cos(math.pi * trainer.global_step / steps) + 1) / 2


def byol_target(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#150: BYOLMAWeightUpdate, a target that follows the network, slower and slower."""
    module, callback = Twins(), MovingTarget()
    fit(rank, world, engine, module, max_epochs=2, callbacks=[callback])
    return {**weights(module), "tau": callback.tau}


class OnlineEvaluator(Callback):
    def __init__(self) -> None:
        self.head = nn.Linear(6, 1).double()
        with torch.no_grad():
            self.head.weight.fill_(0.1)
            self.head.bias.zero_()
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
        self.seen = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.model = self.head
        if trainer.world_size > 1:
            self.model = nn.parallel.DistributedDataParallel(self.head)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        x, y = batch
        with torch.no_grad():
            seen = pl_module.net[:4](x)
        loss = (self.model(seen) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += len(x)


def online_evaluator(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#947, bolts#309: SSLOnlineEvaluator, a head that the callback trains through a DDP wrapper of its own."""
    module, callback = Small(), OnlineEvaluator()
    fit(rank, world, engine, module, callbacks=[callback])
    return {**weights(module), "head": callback.head.weight.detach().clone()}


class ModuleMonitor(Callback):
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.handles = [m.register_forward_hook(self._hook(n)) for n, m in pl_module.named_modules() if n]

    def _hook(self, name: str) -> Any:
        def hook(module: Any, inputs: Any, out: Any) -> None:
            self.seen[name] = self.seen.get(name, 0) + len(inputs[0])

        return hook

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self.handles:
            handle.remove()


def module_monitor(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#839: ModuleDataMonitor, forward hooks on all submodules."""
    module, callback = Small(), ModuleMonitor()
    fit(rank, world, engine, module, callbacks=[callback])
    seen = callback.seen
    if world > 1:
        parts = everyone(callback.seen)
        seen = {name: sum(p.get(name, 0) for p in parts) for name in sorted({n for p in parts for n in p})}
    return {**weights(module), "seen": dict(sorted(seen.items()))}


class GradientVerification(Callback):
    def __init__(self) -> None:
        self.clean: bool | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            pl_module.eval()
            out = pl_module.net(x)
            out[1].sum().backward()
            pl_module.train()
        assert x.grad is not None
        self.clean = bool((x.grad[[0, 2, 3]] == 0).all()) and bool((x.grad[1] != 0).any())
        pl_module.zero_grad()


def gradient_verification(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#839: BatchGradientVerificationCallback, a backward pass of its own before the first batch."""
    module, callback = Small(), GradientVerification()
    fit(rank, world, engine, module, callbacks=[callback])
    return {**weights(module), "clean": callback.clean}


class Exampled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, 3, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.net(x)


def summary_of_sizes(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's ModelSummary with example_input_array: a forward pass before training."""
    module = Exampled()
    fit(rank, world, engine, module, callbacks=[ModelSummary(max_depth=2)], enable_model_summary=True)
    return weights(module)


def counted_hooks(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's LambdaCallback: each hook is called as often as under DDP."""
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    names = (
        "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
        "on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end",
    )  # fmt: skip

    class Validated(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    module = Validated()
    fit(
        rank, world, engine, module, val=batches(numbers(), world, sampler=None), max_epochs=2,
        callbacks=[LambdaCallback(**{name: count(name) for name in names})],
    )  # fmt: skip
    return {**weights(module), "counts": counts}


class Breaks(Callback):
    def __init__(self, kind: type[BaseException], only: int | None = None) -> None:
        self.kind, self.only = kind, only

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1 and self.only in (None, trainer.global_rank):
            raise self.kind("broken by the user")


class KeepsFile(OnExceptionCheckpoint):
    def teardown(self, *args: Any, **kwargs: Any) -> None:
        pass


def comes_within(patience_s: float, path: str) -> None:
    """Waits until a file is there and whole: a copy on its way has no end yet."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and not (os.path.exists(path) and zipfile.is_zipfile(path)):
        time.sleep(0.02)


def saved_on_exception(rank: int, world: int, engine: str, kind: str, only: int | None) -> dict[str, Any]:
    """PL#20187, PL#19827: OnExceptionCheckpoint, where all ranks raise, or one does (stock DDP hangs then)."""
    folder = "kept" if world > 1 else tempfile.mkdtemp()
    module = Small()
    error = {"ZeroDivisionError": ZeroDivisionError, "KeyboardInterrupt": KeyboardInterrupt}[kind]
    raised = ""
    try:
        fit(
            rank, world, engine, module,
            callbacks=[Breaks(error, only), KeepsFile(folder)], enable_checkpointing=True,
        )  # fmt: skip
    except BaseException as e:
        raised = type(e).__name__ + str(e)[:100]
    path = os.path.join(folder, "on_exception.ckpt")
    if rank > 0 and only is None:  # nobody is waited for after an exception, and rank 0 is the one that writes
        comes_within(20.0, path)
    kept = (
        torch.load(path, weights_only=False)
        if os.path.exists(path)
        else {"state_dict": {}, "global_step": None}
    )
    return {"raised": raised, "step": kept["global_step"], **{k: v for k, v in kept["state_dict"].items()}}


def spikes(rank: int, world: int, engine: str, bad: bool) -> dict[str, Any]:
    """Lightning's SpikeDetection: ranks decide together in each batch."""

    class Spiked(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1000.0 if bad and batch_idx == 3 else 1.0)

    module = Spiked()
    raised = ""
    spike = SpikeDetection(exclude_batches_path="skip" if world > 1 else "/tmp/skip_more", rtol=20.0)
    try:
        fit(rank, world, engine, module, batches(numbers(64), world), callbacks=[spike])
    except Exception as e:
        raised = type(e).__name__ + (str(e)[:150] if "Spike" not in type(e).__name__ else "")
    return {"raised": raised, **({} if bad else weights(module))}


def stopped_by_train_loss(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's EarlyStopping on a value of training steps, checked at the end of a train epoch."""

    class Logged(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

    module = Logged()
    stop = EarlyStopping("loss", stopping_threshold=0.4, check_on_train_epoch_end=True, patience=1)
    fits = fit(rank, world, engine, module, max_epochs=12, callbacks=[stop])
    return {**weights(module), "epochs": fits.current_epoch, "best": stop.best_score}


def saved_by_time(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's ModelCheckpoint(train_time_interval=...): rank 0's clock decides."""

    folder = "timed" if world > 1 else tempfile.mkdtemp()
    module = Small()
    keep = ModelCheckpoint(
        folder, train_time_interval=timedelta(microseconds=1), save_top_k=-1, filename="{step}"
    )
    fit(rank, world, engine, module, callbacks=[keep], enable_checkpointing=True)
    files = sorted(os.listdir(folder))
    one = torch.load(os.path.join(folder, files[0]), weights_only=False)["state_dict"]
    return {**weights(module), "files": files, "first": one}


def monitors(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's LearningRateMonitor, DeviceStatsMonitor and progress bar, with a cyclic momentum."""

    class Scheduled(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.CyclicLR(
                optimizer, 0.01, 0.1, step_size_up=1, cycle_momentum=True
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Scheduled()
    logger = CSVLogger("logs" if world > 1 else tempfile.mkdtemp())
    fit(
        rank, world, engine, module, batches(numbers(48), world), logger=logger, log_every_n_steps=1,
        callbacks=[LearningRateMonitor(log_momentum=True), DeviceStatsMonitor(), TQDMProgressBar()],
        enable_progress_bar=True,
    )  # fmt: skip
    rows = [r for r in logger.experiment.metrics if "lr-SGD" in r] if rank == 0 else []
    told = [[r["lr-SGD"] for r in rows], [r["lr-SGD-momentum"] for r in rows]]
    return {**weights(module), "told": everyone(told)[0] if world > 1 else told}


def backbone_finetuning(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#20340: BackboneFinetuning; the ranks' weights part under stock DDP when it thaws."""

    class Tuned(Small):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[:2]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    module = Tuned()
    tune = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, train_bn=True)
    fit(rank, world, engine, module, max_epochs=2, callbacks=[tune])
    return weights(module)


class Table(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows.append({k: float(v) for k, v in sorted(trainer.callback_metrics.items())})


def table_of_metrics(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#839: PrintTableMetricsCallback, a table of each epoch's values."""

    class Logged(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    module, table = Logged(), Table()
    fit(
        rank,
        world,
        engine,
        module,
        val=batches(numbers(), world, sampler=None),
        max_epochs=2,
        callbacks=[table],
    )
    return {"rows": table.rows}


class Neighbours(Callback):
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.total = 0

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.kept.append(batch[0].sum(1))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        own = torch.cat(self.kept)
        every = pl_module.all_gather(own).flatten() if trainer.world_size > 1 else own
        self.sum, self.total = float(every.sum()), len(every)
        self.kept.clear()


def neighbours(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#839: KNNOnlineEvaluator, the callback keeps batches of validation, gathers them at its end."""

    class Validated(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    module, callback = Validated(), Neighbours()
    fit(rank, world, engine, module, val=batches(numbers(), world, sampler=None), callbacks=[callback])
    return {"sum": callback.sum, "total": callback.total}


@pytest.mark.stock_ddp("callbacks")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [table_of_metrics, neighbours])
@pytest.mark.short("neighbours", "pipeline")
def test_watchers_of_lightning_bolts(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("forward_hooks", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_watchers_of_layers(engine: str) -> None:
    right(module_monitor, engine)


@pytest.mark.stock_ddp("forward_hooks", "pipeline", refused="what they keep is where the layer is")
def test_watchers_of_layers_are_refused() -> None:
    assert "the forward hook" in refusal(module_monitor, "pipeline")


@pytest.mark.stock_ddp("moving_average", "balanced")
@pytest.mark.stock_ddp(
    "moving_average", "stale", differs="refused where a rank has missed an update, which `policy='bsp'` prevents"
)  # fmt: skip
@pytest.mark.parametrize("engine", ["balanced", "stale"])
@pytest.mark.parametrize("situation", [byol_target, gradient_verification])
def test_callbacks_of_lightning_bolts_that_run_layers(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp(
    "moving_average", "pipeline", refused="the layers are on several ranks; use `WeightAveraging`"
)  # fmt: skip
@pytest.mark.parametrize("situation", [byol_target, gradient_verification, online_evaluator])
def test_callbacks_that_run_layers_are_refused(situation: Any) -> None:
    assert right_or_refused(situation, "pipeline")


def test_a_head_of_a_callback() -> None:
    """Under balanced the head's gradient is the mean over ranks, whose parts differ in size; nobody can notice."""
    right(online_evaluator, "stale")


@pytest.mark.stock_ddp("BackboneFinetuning", "balanced", "stale")
@pytest.mark.stock_ddp("BackboneFinetuning", "pipeline", refused="it compares the weights of all layers")
@pytest.mark.parametrize("engine", ENGINES)
def test_finetuning(engine: str) -> None:
    assert bool(right_or_refused(backbone_finetuning, engine)) == (engine == "pipeline")


@pytest.mark.stock_ddp(
    "ModelSummary", "EarlyStopping", "ModelCheckpoint", "LambdaCallback", "LearningRateMonitor",
    "ProgressBar"
)  # fmt: skip
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "situation", [summary_of_sizes, counted_hooks, stopped_by_train_loss, saved_by_time, monitors]
)
@pytest.mark.short("summary_of_sizes", "counted_hooks-pipeline", "stopped_by_train_loss", "saved_by_time", "monitors")
def test_callbacks_of_lightning(situation: Any, engine: str) -> None:
    right(situation, engine, tolerance=1e-7)


@pytest.mark.stock_ddp("SpikeDetection")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.short("True", "False-pipeline")
def test_spike_detection(engine: str, bad: bool) -> None:
    right(spikes, engine, bad)


@pytest.mark.stock_ddp("OnExceptionCheckpoint")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["ZeroDivisionError", "KeyboardInterrupt"])
@pytest.mark.short("KeyboardInterrupt", "ZeroDivisionError-balanced")
def test_saved_on_an_exception_of_all_ranks(engine: str, kind: str) -> None:
    right(saved_on_exception, engine, kind, None)


@pytest.mark.stock_ddp("OnExceptionCheckpoint", "stale", "pipeline")
@pytest.mark.parametrize("engine", ["stale", "pipeline"])
def test_saved_on_an_exception_of_one_rank(engine: str) -> None:
    first, second = ends(saved_on_exception, engine, "ZeroDivisionError", 1)
    assert (
        first["raised"] and first["step"] == 2 and second["raised"] == "ZeroDivisionErrorbroken by the user"
    )
