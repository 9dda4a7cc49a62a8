"""`LoadBalancedStrategy`: stock DDP with batches sized to the devices (layer L).

One training batch, with the collaborator that does the work:

    fetch -> parts [data] -> open: weight [weighting] -> forward -> * weight -> backward -> own gradients complete
                                                                        |-> stopwatch stops [cluster.clock]
                                                                        '-> record sent, not waited for [transport]
    next fetch: records due by now -> predict, solve, maybe change the shares [controller, policy]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.controller import StepReport
from lightning_hetero.balanced.loaders import BatchSettings
from lightning_hetero.balanced.policy import BalancePolicy, ShareBounds, scale_shares
from lightning_hetero.balanced.run import BalancedRun
from lightning_hetero.balanced.weighting import LossReduction
from lightning_hetero.data.stream import StreamMode
from lightning_hetero.glue.checks import check_choice, check_counts, check_ddp_arguments, name_lost_peer
from lightning_hetero.glue.metrics import integer_mean_, is_mean, weighted_mean_
from lightning_hetero.glue.setup import CHECKPOINT_KEY, add_monitor, register
from lightning_hetero.predictors import Predictor
from lightning_hetero.types import Event

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.strategy import _StrategyRegistry

    from lightning_hetero.callbacks import BatchRebalancer

__all__ = ["LoadBalancedStrategy"]


class LoadBalancedStrategy(DDPStrategy):
    """Synchronous data parallelism with per-rank batches re-sized so that all ranks finish together (LB-BSP).

    A drop-in for `DDPStrategy`: the global batch stays what stock DDP would train on and the gradient is the mean over
    its samples, so the trained weights are those of a single process; only the time per step changes.

    Args:
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` x devices, as in DDP.
        predictor: models a rank's time: ``"kalman"``, ``"ewma"``, ``"last"``, or a `Predictor`.
        dead_band: relative gain of the predicted step time below which shares stay.
        cooldown: measurements to let pass after a change of shares.
        min_samples: least samples per rank (one number, or one per rank); default a quarter of the equal share.
        max_samples: most samples per rank; default four times the equal share. If together they hold less than the
            global batch, it is accumulated over several batches.
        quantum: shares are multiples of this, e.g. for compiled or tensor-core-friendly shapes.
        policy: a whole `BalancePolicy`, instead of ``predictor``, ``dead_band`` and ``cooldown``.
        rebalance: ``False`` keeps equal shares (exact weighting and metrics stay).
        exchange_every: exchange measurements every k steps; default: every step, fewer when steps are short.
        stream: what an `IterableDataset` is: ``"infinite"`` per rank, or ``"shared"`` by all ranks.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch; of sums the ranks'
            mean is taken, as by DDP: the sum over the global batch divided by the number of devices.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule serves too.
        waiting_modules: module types, besides `SyncBatchNorm`, that wait for peers inside forward or backward.
        sample_weighted_metrics: per-step means over ranks (``self.log(..., sync_dist=True)``) count samples, or what
            ``batch_weight`` counts; means of an epoch count ``batch_size``, as Lightning's always do.
        monitor: add a `StragglerMonitor` if the Trainer has none.
        process_group_backend, timeout, start_method, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, **kwargs: as in
            `DDPStrategy`; ``kwargs`` go to `DistributedDataParallel`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument of `DDPStrategy` that cannot hold here, with the reason.
    """

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        predictor: str | Predictor = "kalman",
        dead_band: float = 0.02,
        cooldown: int = 0,
        min_samples: int | Sequence[int] | None = None,
        max_samples: int | Sequence[int] | None = None,
        quantum: int = 1,
        policy: BalancePolicy | None = None,
        rebalance: bool = True,
        exchange_every: int | None = None,
        stream: StreamMode | None = None,
        batch_sampler: Literal["refuse", "pool"] = "refuse",
        loss_reduction: LossReduction = "mean",
        batch_weight: Callable[[Any], float] | None = None,
        waiting_modules: Sequence[type[nn.Module]] = (),
        sample_weighted_metrics: bool = True,
        monitor: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable | None = None,
        ddp_comm_wrapper: Callable | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        check_ddp_arguments(kwargs, ddp_comm_state, type(self).__name__)
        check_counts(global_batch_size=global_batch_size, quantum=quantum, exchange_every=exchange_every)
        check_choice("stream", stream, (None, "infinite", "shared"))
        check_choice("batch_sampler", batch_sampler, ("refuse", "pool"))
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )
        if policy is not None and (predictor, dead_band, cooldown) != ("kalman", 0.02, 0):
            raise ValueError("give either a whole policy, or predictor, dead_band and cooldown, not both")
        self.policy = policy or BalancePolicy(predictor=predictor, dead_band=dead_band, cooldown=cooldown)
        self.timeout = timeout
        self.ddp_arguments = dict(kwargs)
        self.rebalance = rebalance
        self.sample_weighted_metrics = sample_weighted_metrics
        self._settings = BatchSettings(
            global_batch_size=global_batch_size,
            bounds=ShareBounds(lower=min_samples, upper=max_samples),
            quantum=quantum,
            stream=stream,
            batch_sampler=batch_sampler,
            exchange_every=exchange_every,
        )
        self._loss_reduction: LossReduction = loss_reduction
        self._batch_weight = batch_weight
        self._waiting = (nn.SyncBatchNorm, *waiting_modules)
        self._monitor = monitor
        self._run: BalancedRun | None = None

    def __repr__(self) -> str:  # what Fabric prints when it refuses a strategy of the Trainer
        return f"<{type(self).__name__} for lightning.pytorch.Trainer>"

    # ---- set-up and teardown ----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING and self._run is None:
            if self._monitor:
                add_monitor(trainer)
            self._run = BalancedRun(self, trainer)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._run is not None:
            assert self.lightning_module is not None
            self._run.probe.attach(self.lightning_module)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1 and any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers):
            raise TypeError(
                "LBFGS decides from the loss whether to evaluate again, and the loss differs between ranks, so the"
                " ranks would part ways (as they can under strategy='ddp'); use one device or another optimizer"
            )

    def process_dataloader(self, dataloader: object) -> object:
        run = self._run
        if run is None or not run.trainer.training:
            return dataloader
        return run.binder.process(dataloader)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._run is not None:
            self._run.failed = True
        name_lost_peer(exception, self.global_rank)

    def teardown(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()
        super().teardown()

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_run": None}

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        run = self._run
        if run is None or not run.trainer.training:
            return super().batch_to_device(batch, device, dataloader_idx)
        started_s = time.perf_counter()
        batch = super().batch_to_device(batch, device, dataloader_idx)
        run.open(batch, time.perf_counter() - started_s)
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return super().training_step(*args, **kwargs)
        with run.dummy_guard():
            output = super().training_step(*args, **kwargs)
        if not run.automatic:
            run.manual_step_done()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        run = self._run
        if run is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # As in the base class; only the tensor that is differentiated is weighted: users' hooks see their own loss.
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        weighted = run.weigh(closure_loss)
        self.precision_plugin.backward(weighted, self.lightning_module, optimizer, *args, **kwargs)
        run.backward_returned()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._run is not None:
            self._run.optimizer_stepped()
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of integers are exact; means of floats logged for a training batch count samples."""
        with self._waiting_for_peers():
            return self._reduce(tensor, group, reduce_op)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if not (isinstance(tensor, Tensor) and is_mean(reduce_op) and dist.is_initialized()):
            return super().reduce(tensor, group, reduce_op)
        world = dist.group.WORLD if group is None else group
        assert world is not None
        if not tensor.is_floating_point():
            return integer_mean_(tensor, world)
        run = self._run
        weighs = self.sample_weighted_metrics and group in (None, dist.group.WORLD)
        if weighs and run is not None and compat.batch_results_open(run.trainer):
            return weighted_mean_(tensor, run.weight.local, world)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._waiting_for_peers():
            return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._waiting_for_peers():
            return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._waiting_for_peers():
            super().barrier(*args, **kwargs)

    def _waiting_for_peers(self) -> AbstractContextManager[None]:
        """Collectives that a step asks for, e.g. by ``self.log(..., sync_dist=True)``, are not this rank's work."""
        return nullcontext() if self._run is None else self._run.waiting()

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int | None:
        """Samples of all ranks per batch of the train loader; ``None`` before the loaders are known."""
        return self._run.binder.global_batch_size if self._run is not None else self._settings.global_batch_size

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per optimizer step: the global batch times the user's ``accumulate_grad_batches``."""
        size = self.global_batch_size
        return None if size is None or self._run is None else size * self._run.binder.user_accumulation

    @property
    def rebalancer(self) -> BatchRebalancer | None:
        """The `BatchRebalancer` in charge, the Trainer's or else one of our own; ``None`` outside a fit."""
        return self._run.rebalancer if self._run is not None else None

    @property
    def policy_in_use(self) -> BalancePolicy:
        """The policy that decides: a `BatchRebalancer`'s own, else the strategy's."""
        return self._run.policy if self._run is not None else self.policy

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full batch, as now in force; empty before training."""
        controller = self._run.binder.controller if self._run is not None else None
        return controller.policy.shares if controller is not None else ()

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0 means a dummy of weight 0."""
        part = self._run.part if self._run is not None else None
        return None if part is None else part.samples

    def step_report(self) -> StepReport | None:
        """The latest step whose measurements all ranks have exchanged."""
        controller = self._run.binder.controller if self._run is not None else None
        return controller.report if controller is not None else None

    def summary(self) -> str | None:
        """One line on the shares in force and what equal ones would cost; ``None`` before anything was measured."""
        report = self.step_report()
        if report is None:
            return None
        slowest_s = max(self.policy_in_use.predict_s(self.shares))
        equal_s = max(self.policy_in_use.predict_s(scale_shares([1] * self.world_size, sum(self.shares))))
        if not slowest_s > 0:
            return None
        return (
            f"hetero_balanced: shares {'/'.join(map(str, self.shares))}, {slowest_s * 1e3:.1f} ms of work per batch;"
            f" equal shares would take {equal_s / slowest_s:.2f} times as long"
        )

    def step_events(self) -> list[Event]:
        """Returns and forgets the events of this rank since the last call, for `HeteroTrace`."""
        return self._run.take_events() if self._run is not None else []

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._run is not None:
            checkpoint[CHECKPOINT_KEY] = {"format": 1, "engine": "balanced", **self._run.binder.state_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._run is not None:
            self._run.resume(checkpoint.get(CHECKPOINT_KEY, {}))
        return checkpoint

    # ---- names ------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``hetero_balanced`` and its launchers: ``_spawn``, ``_fork``, ``_forkserver``, ``_notebook``."""
        register(cls, strategy_registry, "hetero_balanced", "Load-balanced DDP")
