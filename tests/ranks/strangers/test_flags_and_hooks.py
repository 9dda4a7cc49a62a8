"""Lightning's own flags, hooks, callbacks and loggers, one after the other, under each engine."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    EMAWeightAveraging,
    ModelCheckpoint,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.ranks.kit import weights
from tests.ranks.strangers.kit import ENGINES, ends, everyone, trainer
from tests.ranks.strangers.more_kit import DIVIDED, Small, batches, fit, numbers, right


class Everything(Small):
    """Validates, tests and predicts, and logs while it does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = {"validated": 0, "tested": 0, "predicted": 0}
        self.validated_at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows["validated"] += len(batch[0])
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.rows["tested"] += len(batch[0])
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows["predicted"] += len(batch[0])
        return self.net(batch[0])

    def on_validation_end(self) -> None:
        self.validated_at.append(self.global_step)


def val(world: int, samples: int = 32) -> Any:
    return batches(numbers(samples), world, sampler=None)


def total(rows: dict[str, int], world: int) -> dict[str, int]:
    every = everyone(rows) if world > 1 else [rows]
    return {name: sum(one[name] for one in every) for name in rows}


class Steps(DummyLogger):
    """The steps at which values of a training step were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.hyper: list[Any] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        if "loss" in kwargs["metrics"]:
            self.steps.append(kwargs["step"])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyper.append(dict(params))


def limits(rank: int, world: int, engine: str) -> dict[str, Any]:
    """When training ends, how many batches there are, and when it validates and logs."""
    module, logger = Everything(), Steps()
    fits = fit(
        rank, world, engine, module, batches(numbers(96), world), val(world), max_epochs=3, min_epochs=2, max_steps=7,
        min_steps=2, max_time="00:01:00:00", limit_train_batches=4, limit_val_batches=1, limit_test_batches=1,
        limit_predict_batches=1, val_check_interval=2, num_sanity_val_steps=1, log_every_n_steps=2, logger=logger,
    )  # fmt: skip
    fits.test(module, val(world), verbose=False)
    fits.predict(module, val(world))
    seldom = Everything()
    fit(rank, world, engine, seldom, val=val(world, 16), max_epochs=2, check_val_every_n_epoch=2)
    return {
        **weights(module), "rows": total(module.rows, world), "ended": [fits.global_step, fits.current_epoch],
        "validated": [module.validated_at, seldom.validated_at], "logged": logger.steps if rank == 0 else [1, 3, 5],
    }  # fmt: skip


RUNS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit": {"overfit_batches": 1, "max_epochs": 2},
    "barebones": {"barebones": True, "enable_progress_bar": None, "enable_model_summary": None},
    "advanced": {"profiler": "advanced"},
    "pytorch": {},
    "careful": {"detect_anomaly": True, "inference_mode": False, "deterministic": "warn", "benchmark": False},
}


def small_run(rank: int, world: int, engine: str, name: str) -> dict[str, Any]:
    """fast_dev_run, overfit_batches, barebones, profilers, detect_anomaly, inference_mode=False, deterministic."""
    options = dict(RUNS[name])
    if name == "pytorch":
        folder = "profiles" if world > 1 else tempfile.mkdtemp()
        options["profiler"] = PyTorchProfiler(folder, "profiled", export_to_chrome=False)
    module = Everything()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = batches(numbers(48), world, **({"sampler": None} if name == "overfit" else {}))
        fits = fit(rank, world, engine, module, loader, val(world, 16), **options)
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    return {**weights(module), "step": fits.global_step}


class Named(Everything):
    """Hyperparameters, and a new loader for each epoch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return batches(numbers(16 * (1 + self.current_epoch)), self.trainer.world_size)


def reloaded(rank: int, world: int, engine: str) -> dict[str, Any]:
    """reload_dataloaders_every_n_epochs with loaders that grow, and hyperparameters for the logger."""
    module, logger = Named(), Steps()
    fits = trainer(
        rank, world, engine, DIVIDED, max_epochs=2, reload_dataloaders_every_n_epochs=1, logger=logger,
        enable_autolog_hparams=True,
    )  # fmt: skip
    fits.fit(module)
    return {**weights(module), "step": fits.global_step, "hyper": logger.hyper if rank == 0 else [{"width": 6}]}


def precisions(rank: int, world: int, engine: str) -> dict[str, Any]:
    """precision="64-true" and "bf16-true": the dtypes that the step meets, and what is trained."""
    told: dict[str, Any] = {}

    class Typed(Small):
        def loss(self, batch: Any) -> Any:
            told[str(self.trainer.precision)] = [str(t.dtype) for t in (*batch, self.net(batch[0]))]
            return super().loss(batch)

    for precision, tolerance in (("64-true", 0.0), ("bf16-true", 0.2)):
        module = Typed()
        fit(rank, world, engine, module, precision=precision)
        told["weights " + precision] = weights(module) if not tolerance else [
            str(p.dtype) for p in module.parameters()
        ] + [all(float((p - q).abs().max()) < tolerance for p, q in
                 zip(module.parameters(), Small().parameters(), strict=True))]  # fmt: skip
    return everyone(told)[0] if world > 1 else told  # rank 0 leads under the pipeline


# ---- what is written ----------------------------------------------------------------------------------------------


def written(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Checkpoints, progress bar and summary as Lightning makes them if nobody says anything; two loggers."""
    folder = Path("out" if world > 1 else tempfile.mkdtemp())
    module = Everything()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = fit(
            rank, world, engine, module, batches(numbers(), world), val(world, 16), max_epochs=2, log_every_n_steps=1,
            default_root_dir=folder, enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True,
            logger=[CSVLogger(folder), TensorBoardLogger(folder)], profiler="simple",
            callbacks=[RichProgressBar(), RichModelSummary(), (clock := Timer(duration="00:00:10:00"))],
        )  # fmt: skip
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    (best,) = [name for name in files if name.endswith(".ckpt")]
    lines = (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    again = Everything.load_from_checkpoint(folder / best, weights_only=True)
    events = any("tfevents" in name for name in files)
    return {**weights(module), "best": Path(best).name, "head": sorted(lines[0].split(",")), "rows": len(lines),
            "again": weights(again), "events": events, "timed": clock.time_elapsed("train") > 0,
            "bar": sorted(fits.progress_bar_metrics)}  # fmt: skip


class Writes(BasePredictionWriter):
    """Keeps predictions as they come, and all of them when an epoch is over."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder, self.sums = folder, 0.0

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.sums += float(prediction.sum())

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, self.folder / f"{trainer.global_rank}.pt")


def in_turn(rank: int, world: int, engine: str) -> dict[str, Any]:
    """One Trainer validates, fits, tests, predicts and fits on."""
    folder = Path("kept" if world > 1 else tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    module, writer = Everything(), Writes(folder)
    fits = trainer(rank, world, engine, DIVIDED, max_epochs=1, callbacks=[writer])
    told = [fits.validate(module, val(world), verbose=False)[0]["val"]]
    fits.fit(module, batches(numbers(), world), val(world))
    first = weights(module)
    told += [fits.test(module, val(world), verbose=False)[0]["test"]]
    fits.predict(module, val(world))
    kept = torch.load(folder / f"{rank}.pt")
    fits.fit_loop.max_epochs = 2
    fits.fit(module, batches(numbers(), world), val(world))
    every = everyone([writer.sums, float(sum(p.sum() for p in kept))]) if world > 1 else [[writer.sums] * 2]
    return {"told": told, "first": first, **weights(module), "rows": total(module.rows, world),
            "predicted": [sum(column) for column in zip(*every, strict=True)]}  # fmt: skip


def saved(rank: int, world: int, engine: str) -> dict[str, Any]:
    """ModelCheckpoint's ways to save: every n steps, the last, weights only, in a thread; and an average of weights."""
    folder = Path("saved" if world > 1 else tempfile.mkdtemp())
    keep: dict[str, Any] = {"dirpath": folder, "save_top_k": -1}
    module = Everything()
    average = EMAWeightAveraging(decay=0.5)
    io = AsyncCheckpointIO()
    fits = trainer(
        rank, world, engine, DIVIDED, max_epochs=2, enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(**keep, filename="{step}", every_n_train_steps=3, save_last=True),
            ModelCheckpoint(**keep, filename="weights-{epoch}", save_weights_only=True, monitor="val"), average,
        ],
        **({"plugins": [io]} if world == 1 else {}),
    )  # fmt: skip
    if world > 1:
        fits.strategy.checkpoint_io = io
    fits.fit(module, batches(numbers(48), world), val(world, 16))
    io.teardown()
    names = sorted(os.listdir(folder))
    light = torch.load(folder / "weights-epoch=1.ckpt", weights_only=False)
    return {**weights(module), "names": names, "light": light["state_dict"], "bare": "optimizer_states" in light,
            "last": torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]}  # fmt: skip


# ---- hooks --------------------------------------------------------------------------------------------------------

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
OF_HOOKS = [n for kind in (ModelHooks, DataHooks, CheckpointHooks, Callback) for n, value in vars(kind).items()
            if callable(value) and not n.startswith("_") and n != "configure_sharded_model"]  # fmt: skip
OF_STEPS = ["optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
            "configure_optimizers", "configure_callbacks"]  # fmt: skip


def noting(kind: type, names: Sequence[str], calls: list[str]) -> type:
    """A subclass whose hooks are noted: their name, and the batch's index."""

    def noted(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            index = [a for a in (*args, *kwargs.values()) if isinstance(a, int)] if "_batch_" in name else []
            calls.append(f"{name} {index}" if index else name)
            return getattr(super(cls, self), name)(*args, **kwargs)

        return hook

    found = {name: noted(name) for name in dict.fromkeys(names) if hasattr(kind, name)}
    cls = type(kind.__name__, (kind,), found)
    return cls


class Data(LightningDataModule):
    """With a state of its own."""

    trainer: Any

    def train_dataloader(self) -> Any:
        return batches(numbers(), self.trainer.world_size)

    def val_dataloader(self) -> Any:
        return val(self.trainer.world_size)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"seven": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Built(Everything):
    """Its layers are made in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.net = self.net, None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net, self.kept = self.kept, None  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def hooked(rank: int, world: int, engine: str) -> dict[str, Any]:
    """All calls of a module's, a callback's and a data module's hooks, in each of a Trainer's uses."""
    calls: dict[str, list[str]] = {"module": [], "callback": [], "data": []}
    module = noting(Built, [*OF_HOOKS, *OF_STEPS], calls["module"])()
    data = noting(Data, OF_HOOKS, calls["data"])()
    watch = noting(Callback, [n for n in OF_HOOKS if n != "state_key"], calls["callback"])()
    fits = trainer(
        rank, world, engine, {**DIVIDED, "balanced": {}}, max_epochs=2, num_sanity_val_steps=1, callbacks=[watch],
        gradient_clip_val=1.0,
    )  # fmt: skip
    fits.fit(module, data)
    fits.save_checkpoint("hooked.ckpt")
    fits.fit_loop.max_epochs = 3
    fits.fit(module, data, ckpt_path="hooked.ckpt")
    fits.validate(module, data, verbose=False)
    fits.test(module, data, verbose=False)
    fits.predict(module, data)
    return {"loaded": data.loaded, "weights": weights(module), **calls}


def without(calls: list[str], *names: str) -> list[str]:
    return [call for call in calls if call.split(" ")[0] not in names]


class Raises(Callback):
    """Raises on every rank."""

    def __init__(self, hook: str) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise KeyError("the user's own", hook)

        setattr(self, hook, fail)


class Sized(Small):
    batch_size = 4


def raised(rank: int, world: int, engine: str) -> list[str]:
    """An exception of the user's comes out of trainer.fit as it was raised; a finder of Lightning's is refused."""
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        fit(rank, world, engine, Sized(), callbacks=[BatchSizeFinder()])
    told: list[str] = []
    for hook in ("on_fit_start", "on_train_batch_start", "on_validation_start", "on_train_end"):
        try:
            train = batches(numbers(16), world)
            fit(rank, world, engine, Everything(), train, val(world, 16), callbacks=[Raises(hook)])
        except Exception as error:
            told.append(f"{type(error).__name__} {error.args}")
    return told


class StepsByHand(Everything):
    """Warm-up, a step left out and a step around Lightning's wrapper, in `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 + self.global_step)
        if batch_idx % 3 == 0:
            optimizer_closure()
        elif batch_idx % 3 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer.optimizer.step(closure=optimizer_closure)


def steps_by_hand(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = StepsByHand()
    fits = fit(rank, world, engine, module, batches(numbers(48), world))
    return {**weights(module), "step": fits.global_step}


class Plateau(Everything):
    """ReduceLROnPlateau on a validated value, or on each step's loss."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        monitor = "val" if self.interval == "epoch" else "loss"
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": monitor, "interval": self.interval}}  # fmt: skip


def plateau(rank: int, world: int, engine: str, interval: str) -> dict[str, Any]:
    module = Plateau(interval)
    fits = fit(rank, world, engine, module, val=val(world), max_epochs=3)
    return {**weights(module), "rate": fits.optimizers[0].param_groups[0]["lr"]}


class Stops(Everything):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stopped(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = Stops()
    fits = fit(rank, world, engine, module, batches(numbers(64), world), val(world, 16), max_epochs=3)
    return {**weights(module), "step": fits.global_step, "validated": module.validated_at}


class Counts(Everything):
    """Counts its steps, and those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.drawn = 0, {"zero": 0, "only": 0}

    @rank_zero_only
    def draw(self) -> None:
        self.drawn["only"] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.drawn["zero"] += self.trainer.is_global_zero
        self.draw()
        return super().training_step(batch, batch_idx)


def counted(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = Counts()
    fit(rank, world, engine, module, batches(numbers(48), world))
    return {**weights(module), "calls": module.calls, "drawn": total(module.drawn, world)}


class Clips(Everything):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = float(nn.utils.clip_grad_norm_(self.parameters(), 0.1))


def clipped(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = Clips()
    fit(rank, world, engine, module)
    return {**weights(module), "norm": module.norm}


class NoOptimizer(Everything):
    def configure_optimizers(self) -> Any:
        return None


def no_optimizer(rank: int, world: int, engine: str) -> dict[str, Any]:
    module = NoOptimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = fit(rank, world, engine, module, val=val(world))
    return {**weights(module), "val": fits.callback_metrics["val"]}


@pytest.mark.stock_ddp("accelerator", "max_epochs", "limit_batches", "val_check_interval", "log_every_n_steps")
@pytest.mark.parametrize("engine", ENGINES)
def test_limits_and_intervals(engine: str) -> None:
    right(limits, engine)


@pytest.mark.stock_ddp("fast_dev_run", "overfit_batches", "barebones", "deterministic", "profiler")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.short("pipeline", "fast_dev_run-stale", "overfit-stale", "barebones-stale", "pytorch", "careful")
def test_small_and_careful_runs(name: str, engine: str) -> None:
    right(small_run, engine, name)


@pytest.mark.stock_ddp("reload_dataloaders", "enable_autolog_hparams")
@pytest.mark.parametrize("engine", ENGINES)
def test_loaders_are_made_again(engine: str) -> None:
    right(reloaded, engine)


@pytest.mark.stock_ddp("precision_true")
@pytest.mark.parametrize("engine", ENGINES)
def test_precisions(engine: str) -> None:
    right(precisions, engine)


@pytest.mark.stock_ddp("default_root_dir", "loggers", "profiler", "ProgressBar", "ModelSummary", "Timer", "ckpt_path")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_without_being_asked_for(engine: str) -> None:
    right(written, engine)


@pytest.mark.stock_ddp("entry_points", "BasePredictionWriter")
@pytest.mark.parametrize("engine", ENGINES)
def test_one_trainer_for_everything(engine: str) -> None:
    right(in_turn, engine)


@pytest.mark.stock_ddp("ModelCheckpoint", "WeightAveraging", "plugins")
@pytest.mark.parametrize("engine", ENGINES)
def test_ways_to_save(engine: str) -> None:
    right(saved, engine)


@functools.cache
def by_ddp(situation: Any) -> list[Any]:
    return ends(situation, "ddp")


@pytest.mark.stock_ddp("hooks_setup", "hooks_train", "hooks_evaluation", "hooks_step", "callbacks")
@pytest.mark.stock_ddp("hooks_transfer", "hooks_loaders", "hooks_checkpoint", "balanced", "stale")
@pytest.mark.stock_ddp("hooks_transfer", "pipeline", differs="called for each micro-batch")
@pytest.mark.stock_ddp(
    "hooks_loaders", "pipeline", differs="`train_dataloader` is called once more in a fit, to plan"
)  # fmt: skip
@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_are_called_as_under_stock_ddp(engine: str) -> None:
    for ours, stock in zip(ends(hooked, engine), by_ddp(hooked), strict=True):
        torch.testing.assert_close(ours["weights"], stock["weights"], rtol=0, atol=1e-12)
        seen = ("train_dataloader", *TRANSFER) if engine == "pipeline" else ()
        assert without(ours["data"], *seen) == without(stock["data"], *seen)
        for who in ("module", "callback", "loaded"):
            assert ours[who] == stock[who], who
        more = 2 if engine == "pipeline" else 0  # fits
        assert ours["data"].count("train_dataloader") == stock["data"].count("train_dataloader") + more


@pytest.mark.stock_ddp("exceptions")
@pytest.mark.stock_ddp("BatchSizeFinder", "balanced", refused="`HeteroBatchSizeFinder` does it instead")
@pytest.mark.stock_ddp("BatchSizeFinder", "stale", "pipeline", refused="Lightning refuses it under DDP, too")
@pytest.mark.parametrize("engine", ENGINES)
def test_exceptions_reach_the_caller(engine: str) -> None:
    assert ends(raised, engine) == by_ddp(raised)


@pytest.mark.stock_ddp("hooks_step", "epoch_ended")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [steps_by_hand, stopped])
def test_steps_and_ends_of_epochs(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("calls_counted", "no_optimizer", "rank_zero", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
@pytest.mark.parametrize("situation", [counted, no_optimizer])
def test_steps_that_count_and_modules_that_do_not_learn(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("gradients_clipped", "balanced", "pipeline")
@pytest.mark.parametrize("engine", ["balanced", "pipeline"])
@pytest.mark.short("balanced")
def test_clipped_in_a_hook(engine: str) -> None:
    right(clipped, engine)


@pytest.mark.stock_ddp("plateau_epoch")
@pytest.mark.parametrize("engine", ENGINES)
def test_plateaus_of_epochs(engine: str) -> None:
    right(plateau, engine, "epoch")


@pytest.mark.stock_ddp("plateau_step", "balanced", "pipeline")
@pytest.mark.parametrize("engine", ["balanced", "pipeline"])
def test_plateaus_of_steps(engine: str) -> None:
    right(plateau, engine, "step")
