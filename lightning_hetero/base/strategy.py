"""`HeteroStrategy`: what the strategies of all engines are to Lightning (layer L)."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch import distributed as dist

from lightning_hetero.base import checks
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, SharedSettings
from lightning_hetero.base.checks import warn_of_emulation
from lightning_hetero.base.loaders import OneDeviceFit
from lightning_hetero.base.metrics import gather_unequal, integer_mean_, is_mean
from lightning_hetero.base.nodes import UnevenNodesStrategy
from lightning_hetero.base.refusals import Refusals
from lightning_hetero.base.run import EngineRun
from lightning_hetero.base.setup import CHECKPOINT_KEY, LastFit, sum_up
from lightning_hetero.callbacks.reporting import Reporting
from lightning_hetero.lightning_compat import trainer_callbacks
from lightning_hetero.lightning_compat.strategies import syncs_batch_norm
from lightning_hetero.types import Event, LossReduction, StepReport

Run = TypeVar("Run", bound=EngineRun[Any])


class HeteroStrategy(UnevenNodesStrategy, Reporting, Generic[Run]):
    """The arguments, hooks and answers that the strategies of all engines share; not itself a strategy.

    It stands before one of Lightning's strategies, the stock one: `DDPStrategy`, or `ModelParallelStrategy`. On one
    device every engine is that one: nothing begins, and hooks do what the base class does. Batches are the loader's
    unless `OneDeviceFit` says otherwise.

    Args:
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` x devices, as in DDP.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch; of sums the ranks'
            mean is taken, as by DDP: the sum over the global batch divided by the number of devices.
        own_data: whether the train dataset has other samples under the same index on each rank, so that they stay
            there. ``None``: three samples of it are read and compared when training begins; ``False``: none is.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule serves too.
        monitor: say in one line at the end of a fit who did what. Numbers while training: `StragglerMonitor`.
        accelerator: as in the stock strategy; the Trainer sets it.
        **stock: the arguments of the stock strategy.

    Attributes:
        given: arguments of the stock strategy.
        stock: what takes them: Lightning's strategy first, then what it makes.
        engine: the engine's word, in checkpoints and in the alias ``hetero_<engine>``.
        refusals: what the engine refuses on several devices.
        evaluates: whether the engine takes part in evaluations outside of a fit.
        chosen_by: the `AutoStrategy` that has chosen it, and looks again; None: the user has.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an unknown argument.
    """

    stock: ClassVar[tuple[type, ...]]
    engine: ClassVar[str]
    refusals: ClassVar[Refusals] = Refusals()
    evaluates: ClassVar[bool] = False
    chosen_by: Any = None

    def __init__(
        self,
        *,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **stock: Any,
    ) -> None:  # fmt: skip
        self.shared = SharedSettings(
            global_batch_size=global_batch_size, batch_sampler=batch_sampler, loss_reduction=loss_reduction,
            batch_weight=batch_weight, own_data=own_data,
        )  # fmt: skip
        checks.check_flags(monitor=monitor)
        if stock.pop("controller", None) is not None:  # Hydra's group is above every engine's
            other = "HeteroPipelineStrategy(controller=...)"
            raise TypeError(f"{type(self).__name__} has no controller: drop it, or use {other}")
        checks.check_arguments(stock, type(self), *self.stock)
        timeout = stock.setdefault("timeout", timedelta(seconds=1800))
        if not isinstance(timeout, timedelta | None):
            raise TypeError(f"timeout={timeout!r} must be a datetime.timedelta, or None")
        super().__init__(**stock)
        self.accelerator = accelerator  # pyright: ignore[reportAttributeAccessIssue]
        self.timeout, self.given, self._monitor = timeout, stock, monitor
        self._run: Run | None = None
        self._one_device: OneDeviceFit | None = None  # while it fits on one device
        self._finished: dict[str, Any] = {}  # what the last fit would write into a checkpoint
        self._kept = LastFit()
        self._untold: list[Event] = []  # of the last fit

    def __repr__(self) -> str:  # what Fabric prints when it refuses a strategy of the Trainer
        batch, shares = self.global_batch_size, "/".join(map(str, self.shares))
        known = f"global batch {'of the loader' if batch is None else batch}{f', shares {shares}' if shares else ''}"
        other = ", and not for pytorch_lightning's: import lightning.pytorch instead"  # its Trainer's error shows this
        other = other if "pytorch_lightning" in sys.modules else ""
        return f"<{type(self).__name__} for lightning.pytorch.Trainer{other}: hetero_{self.engine}, {known}>"

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_run": None, "_one_device": None, "failures": None}

    # ---- set-up and teardown ----------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, trainer: Trainer) -> Run:
        """Returns the state of the run that begins; the process group exists, the module is not yet set up."""

    def setup_environment(self) -> None:
        trainer = self._attached_trainer()
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if trainer is not None and fitting and self.chosen_by is not None and self.chosen_by.takes_over(trainer):
            trainer.strategy.setup_environment()
            return
        super().setup_environment()
        if trainer is None or self._run is not None or self._one_device is not None:
            return
        if fitting:
            warn_of_emulation(self.precision_plugin, self.root_device, self.global_rank)
        if any(isinstance(callback, BatchSizeFinder) for callback in trainer_callbacks(trainer)):
            raise MisconfigurationException(
                "Lightning's BatchSizeFinder is not supported with distributed strategies. Under 'hetero_balanced'"
                " lightning_hetero.HeteroBatchSizeFinder() finds each rank's largest batch; max_samples='auto' of"
                " LoadBalancedStrategy and ShardedBalancedStrategy learns it in the first steps"
            )
        if self.world_size == 1:
            if fitting:
                self._begin_on_one_device(trainer)
        elif fitting or self.evaluates:
            self._kept = LastFit() if fitting else self._kept
            self._run = self.begin(trainer)

    def _attached_trainer(self) -> Trainer | None:
        """The trainer of the module, as soon as there are both."""
        with suppress(RuntimeError):  # the module says so if it has no trainer yet
            return None if self.lightning_module is None else self.lightning_module.trainer
        return None

    def _begin_on_one_device(self, trainer: Trainer) -> None:
        self._kept = LastFit()
        self._one_device = OneDeviceFit(trainer, self.shared, type(self).__name__)
        if idle := self.idle_on_one_device():
            given = ", ".join(f"{name}={value!r}" for name, value in idle.items())
            name, stock = type(self).__name__, self.stock[0].__name__
            rank_zero_warn(f"on one device {name} trains as {stock} does: {given} has no effect")

    def idle_on_one_device(self) -> dict[str, Any]:
        """Returns arguments that were given and would change what is trained, if there were several devices."""
        return {}

    def process_dataloader(self, dataloader: object) -> object:
        trainer, run = self._attached_trainer(), self._run
        if trainer is None or not trainer.training:
            return dataloader
        if self._one_device is not None:
            return self._one_device.process(dataloader)
        return dataloader if run is None else run.binder.process(dataloader)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1:
            self.refusals.check_optimizers(self.optimizers)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.chosen_by is not None:
            self.chosen_by.look(batch_idx)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.chosen_by is not None:
            self.chosen_by.look(None)
        if self._run is not None:
            sum_up(self._run, self.step_report, told=self._monitor and self.is_global_zero)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        run, failures = self._run, self.failures
        if run is not None and run.sizes_differ(exception):
            checks.name_changed_rows(exception, type(self).__name__)
        if run is not None:
            run.fail(exception)
        elif failures is not None:  # the run was about to begin
            failures.report(exception)
        checks.name_lost_peer(exception, self.global_rank, failures)

    def teardown(self) -> None:
        self.keep()
        (alone, self._one_device), (run, self._run) = (self._one_device, None), (self._run, None)
        if alone is not None:
            self._finished = alone.state_dict()
            alone.close()
        if run is not None:
            if run.fitting:
                self._finished = {} if run.failed else run.state_dict()
                self._untold = run.step_events()  # a trace asks once more: `on_fit_end` comes after this
            run.end()
        elif self.failures is not None:
            self.failures.leave()
        super().teardown()

    def keep(self) -> None:
        """Keeps what is asked for after a fit, e.g. in a notebook; nothing after an evaluation."""
        if self._one_device is not None or (self._run is not None and self._run.fitting):
            size, effective = self.global_batch_size, self.effective_batch_size
            self._kept = replace(self._kept, global_batch_size=size, effective_batch_size=effective, shares=self.shares)

    def check_module(self, module: LightningModule) -> None:
        """Refuses a module that the engine cannot train on several devices.

        Raises:
            TypeError: with the reason.
        """
        if self.world_size > 1:
            self.refusals.check_module(module, syncs_batch_norm=syncs_batch_norm(self))

    @property
    @abstractmethod
    def agreed(self) -> dict[str, Any]:
        """The arguments of the stock strategy that must be the same on all ranks."""

    # ---- collectives ------------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers also tensors that differ in one dimension, see `gather_unequal`."""
        gather = partial(super().all_gather, group=group, sync_grads=sync_grads)
        with self.waiting_for_peers():
            if self.world_size == 1 or not isinstance(tensor, Tensor):
                return gather(tensor)
            counted = partial(self.counted_rows, group, sync_grads)
            return gather_unequal(tensor, gather, group=group, engine=self.engine, counted=counted)

    def counted_rows(self, group: Any, sync_grads: bool, sizes: Sequence[int]) -> Sequence[int]:
        """Returns how many of the rows that each rank of a group gives to `all_gather` are those of samples."""
        return sizes

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self.waiting_for_peers():
            return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.waiting_for_peers():
            super().barrier(*args, **kwargs)

    def waiting_for_peers(self) -> AbstractContextManager[None]:
        """Collectives that a step asks for, e.g. by ``self.log(..., sync_dist=True)``, are not this rank's work."""
        return nullcontext() if self._run is None else self._run.waiting()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of integers are exact."""
        whole = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if whole and is_mean(reduce_op) and dist.is_initialized():
            return integer_mean_(tensor, group)
        return super().reduce(tensor, group, reduce_op)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with checks.naming_full_disk(filepath):
            super().save_checkpoint(self.with_state(checkpoint), filepath, storage_options)

    def with_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the checkpoint with the engine's state under our one key: of the fit that runs, or of the last one.

        A copy: what hooks have been given stays what stock DDP gives them.
        """
        fit = self._run if self._run is not None and self._run.fitting else self._one_device
        state = self._finished if fit is None else fit.state_dict()
        return {**checkpoint, CHECKPOINT_KEY: {"format": 1, "engine": self.engine, **state}} if state else checkpoint

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with checks.naming_damage(checkpoint_path):
            checkpoint = self.read_checkpoint(checkpoint_path, *args, **kwargs)
        self.take_state(checkpoint)
        return checkpoint

    def read_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns what is in a checkpoint."""
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def take_state(self, checkpoint: dict[str, Any]) -> None:
        """Hands the fit what is under our one key, written by any engine; nothing, for a checkpoint of stock DDP.

        It is taken out: hooks see what stock DDP has saved.
        """
        state = checkpoint.pop(CHECKPOINT_KEY, {})
        if self._one_device is not None:
            self._one_device.resume(state)
        elif self._run is not None and self._run.fitting:
            self._run.resume(state)

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int | None:
        """Samples of all ranks per step; ``None`` before the loaders are known, unless it was given."""
        known = self._run.binder.global_batch_size if self._run is not None else self._kept.global_batch_size
        if self._one_device is not None:
            known = self._one_device.global_batch_size
        return known if known is not None else self.shared.global_batch_size

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per optimizer step: the global batch times ``accumulate_grad_batches``."""
        size, trainer = self.global_batch_size, self._attached_trainer()
        if self._run is None and self._one_device is None and self._kept.effective_batch_size is not None:
            return self._kept.effective_batch_size
        return None if size is None or trainer is None else size * trainer.accumulate_grad_batches

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full batch, as last decided, also after the fit; empty before anything is."""
        if self._one_device is not None:
            size = self.global_batch_size
            return () if size is None else (size,)
        return self._kept.shares if self._run is None else self._run.shares

    @property
    def measures(self) -> bool:
        return self._run is not None

    def current_samples(self) -> int | None:
        return None if self._run is None else self._run.current_samples()

    def ask_report(self) -> None:
        if self._run is not None:
            self._run.ask_report()

    def step_report(self) -> StepReport | None:
        """Samples, own work and waiting of all ranks; ``None`` if nothing (new) is known; after a fit its last one."""
        if self._run is None:
            return self._kept.report
        report = self._run.step_report()
        if report is not None:
            self._kept = replace(self._kept, report=report)
        return report

    @property
    def meets(self) -> bool:
        return self._run is None or self._run.meets

    def take_reports(self) -> list[StepReport] | None:
        return None if self._run is None else self._run.take_reports()

    def step_events(self) -> list[Event]:
        untold, self._untold = self._untold, []
        return untold if self._run is None else [*untold, *self._run.step_events()]

    def about(self) -> dict[str, Any]:
        return {"engine": self.engine}

    def engine_metrics(self) -> dict[str, float]:
        return {} if self._run is None else self._run.engine_metrics()

    def summary(self) -> str | None:
        return None if self._run is None else self._run.summary()

    # ---- names ------------------------------------------------------------------------------------------------
