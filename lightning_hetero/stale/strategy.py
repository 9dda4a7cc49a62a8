"""`BoundedStalenessStrategy`: DDP's recipe on a parameter server that waits for nobody (layer L).

    rank r:   claim -> pull -> training_step, backward -> push           [loop, worker, transport]
                                   '-> gradients into the slot while backward runs
    server:   who is late, who gets what, when is a batch complete       [coordinator, policy, ledger]
              pool the gradients, step the user's own optimizers         [server]
    all:      meet before anything is reduced over ranks                 [elastic, meetings]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hetero.glue.checks import check_choice, check_counts, check_ddp_arguments, name_lost_peer
from lightning_hetero.glue.setup import CHECKPOINT_KEY, add_monitor, register
from lightning_hetero.predictors import Predictor
from lightning_hetero.predictors import by_name as predictor_by_name
from lightning_hetero.stale import report
from lightning_hetero.stale.compress import Codec
from lightning_hetero.stale.compress import by_name as codec_by_name
from lightning_hetero.stale.elastic import ElasticDDPStrategy
from lightning_hetero.stale.loop import TickLoop
from lightning_hetero.stale.policy import Policy
from lightning_hetero.stale.policy import by_name as policy_by_name
from lightning_hetero.stale.refusals import refuse_lbfgs, refuse_what_waits
from lightning_hetero.stale.report import StepReport
from lightning_hetero.stale.run import StaleRun
from lightning_hetero.stale.start import ServerSettings
from lightning_hetero.types import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.strategy import _StrategyRegistry

__all__ = ["BoundedStalenessStrategy"]


class BoundedStalenessStrategy(ElasticDDPStrategy):
    """Data parallelism over a parameter server that bounds staleness and waits for no straggler (after SaPS).

    A drop-in for `DDPStrategy`: number, size and learning rate of updates are DDP's; the samples of one global batch
    come from whatever mix of ranks is fast enough, each computed on parameters at most ``bound`` versions old. Ranks
    may stall or die; the others go on.

    Args:
        policy: ``"flexible"`` (the default; see `lightning_hetero.stale.policy` for ``"saps"``, ``"asp"``, ``"bsp"``,
            ``"ssp"``, ``"drop"``, ``"buffered"``, ``"backup"``), or a `Policy`.
        bound: most versions a contribution may be old; ``None``: the policy's default.
        grace: longest hold, in parts of a step, of a rank that finds the batch fully claimed; 0 holds nobody; ``None``:
            the policy's default.
        overlap: let ranks work ahead on the next batch instead of holding them; costs staleness.
        global_batch_size: samples per update; ``None``: the loader's ``batch_size`` x devices, as in DDP.
        predictor: models a rank's time: ``"kalman"``, ``"ewma"``, ``"last"``, or a `Predictor`; ``None``: the
            coordinator's own.
        compression: of the gradients pushed: ``None``, ``"bf16"``, ``"fp16"``, or a `Codec`, e.g. ``TopK(ratio=0.01)``.
        nonfinite: what a NaN or infinite gradient does: ``"stop"`` the run with the rank's name, or ``"skip"`` it.
        liveness_s: a rank without a sign of life for so long, and for ten times its predicted time, has its samples
            given to others.
        shards: threads that share the server's work; default by model size.
        transport: ``"auto"``: shared memory on the server's node, pair groups to other nodes; ``"pairs"``: these only.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule serves too.
        monitor: add a `StragglerMonitor` if the Trainer has none.
        process_group_backend, timeout, start_method, **kwargs: as in `DDPStrategy`. ``kwargs`` of
            `DistributedDataParallel` are accepted and have no effect: there is no wrapper.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument of `DDPStrategy` that cannot hold here, with the reason.
    """

    def __init__(
        self,
        *,
        policy: str | Policy = "flexible",
        bound: int | None = None,
        grace: float | None = None,
        overlap: bool | None = None,
        global_batch_size: int | None = None,
        predictor: str | Predictor | None = None,
        compression: str | Codec | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        liveness_s: float = 5.0,
        shards: int | None = None,
        transport: Literal["auto", "pairs"] = "auto",
        batch_sampler: Literal["refuse", "pool"] = "refuse",
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_weight: Callable[[Any], float] | None = None,
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
        if ddp_comm_hook is not None or ddp_comm_wrapper is not None or ddp_comm_state is not None:
            raise TypeError(
                "communication hooks change DDP's all-reduce, and there is none here: gradients go to a parameter"
                " server. For smaller messages pass compression='bf16', 'fp16' or TopK(ratio=...)"
            )
        check_counts(global_batch_size=global_batch_size, shards=shards)
        check_choice("nonfinite", nonfinite, ("stop", "skip"))
        check_choice("transport", transport, ("auto", "pairs"))
        check_choice("batch_sampler", batch_sampler, ("refuse", "pool"))
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if not liveness_s > 0:
            raise ValueError(f"liveness_s={liveness_s!r} must be > 0 (seconds)")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )
        options = {"bound": bound, "grace": grace, "overlap": overlap}
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(policy, Policy):
            if given:
                raise ValueError(f"give either a whole policy, or {', '.join(given)}, not both")
            self.policy = policy
        else:
            self.policy = policy_by_name(policy, **given)
        self.transport = transport
        self.batch_sampler: Literal["refuse", "pool"] = batch_sampler
        self.batch_weight = batch_weight
        self.settings_global_batch_size = global_batch_size
        self._loss_reduction = loss_reduction
        self._monitor = monitor
        self._predictor = predictor_by_name(predictor) if isinstance(predictor, str) else predictor
        self._codec = codec_by_name(compression) if isinstance(compression, str) else compression
        self._nonfinite: Literal["stop", "skip"] = nonfinite
        self._liveness_s = liveness_s
        self._shards = shards
        self._finished: dict[str, Any] = {}  # what the last fit would write into a checkpoint

    def __repr__(self) -> str:  # what Fabric prints when it refuses a strategy of the Trainer
        return f"<{type(self).__name__} for lightning.pytorch.Trainer>"

    @property
    def server_settings(self) -> ServerSettings:
        """What the server's process is started with."""
        return ServerSettings(
            policy=self.policy,
            predictor=self._predictor,
            codec=self._codec,
            nonfinite=self._nonfinite,
            shards=self._shards,
            divide_by=float(self.world_size) if self._loss_reduction == "sum" else None,
            liveness_s=self._liveness_s,
        )

    def settings(self) -> dict[str, str]:
        """Returns what must be the same on all ranks, as words."""
        return {
            "policy": repr(self.policy.settings()),
            "global_batch_size": str(self.settings_global_batch_size),
            "compression": repr(self._codec),
            "loss_reduction": self._loss_reduction,
            "transport": self.transport,
            "nonfinite": self._nonfinite,
        }

    # ---- set-up and teardown ----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING and self._run is None:
            if self._monitor:
                add_monitor(trainer)
            self._run = StaleRun(self, trainer)

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_what_waits(
                trainer.lightning_module,
                syncs_batch_norm=self._layer_sync is not None,
                scales_loss=getattr(self.precision_plugin, "scaler", None) is not None,
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """No wrapper: gradients go to the server. Ranks start from rank 0's parameters and buffers, as under DDP."""
        assert self.model is not None
        if self.newcomer is not None:
            return
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            dist.broadcast(tensor.data, 0)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        refuse_lbfgs(self.optimizers)

    def process_dataloader(self, dataloader: object) -> object:
        run = self._run
        if run is None or not run.trainer.training:
            return dataloader
        return run.binder.process(dataloader)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._run is not None:
            self._run.start()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._run is not None:
            self._run.finish()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._run is not None:
            self._run.abort(f"rank {self.global_rank} failed: {type(exception).__name__}: {exception}")
        name_lost_peer(exception, self.global_rank)

    def teardown(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._finished = {} if run.failed else run.checkpoint()
            run.close()
        super().teardown()

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if batch is None:
            return None
        batch = super().batch_to_device(batch, device, dataloader_idx)
        loop = self._loop
        if loop is not None and loop.in_step:
            loop.opened(batch)
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loop = self._loop
        if loop is None:
            return super().training_step(*args, **kwargs)
        with loop.guard():
            output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            base = super().training_step

            def again(batch: Any) -> None:
                with loop.guard():
                    base(batch, *args[1:], **kwargs)

            loop.training_step_done(again)
        return output

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        loop = self._loop
        if loop is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        run = partial(super().optimizer_step, model=model, **kwargs)
        return loop.step(self._index(optimizer), optimizer, closure, run)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning wraps a batch that only accumulates in this: its gradients are pushed at the end."""
        yield
        loop = self._loop
        assert self.lightning_module is not None
        if loop is not None and loop.in_step and self.lightning_module.automatic_optimization:
            loop.accumulated(0, self.optimizers[0], super().optimizer_step)

    def _index(self, optimizer: Any) -> int:
        return next(i for i, own in enumerate(self.optimizers) if own is optimizer)

    @property
    def _loop(self) -> TickLoop | None:
        run = self._connected
        return run.loop if run is not None and run.trainer.training else None

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int | None:
        """Samples per update; ``None`` before the loader is known."""
        known = self._run.binder.global_batch_size if self._run is not None else None
        return known if known is not None else self.settings_global_batch_size

    def step_report(self) -> StepReport | None:
        """Per rank samples, own work and waiting per update, since this rank's last call; asks the server.

        ``None`` outside of training, and if nothing was updated since.
        """
        measures = self._measures()
        if measures is None:
            return None
        assert self._run is not None
        return self._run.since.report(measures, self.world_size)

    def engine_metrics(self) -> dict[str, float]:
        """Staleness, work in vain and the server's times so far, see `stale.report.engine_metrics`; asks the server."""
        measures = self._measures()
        return {} if measures is None else report.engine_metrics(measures, self.world_size)

    def summary(self) -> str | None:
        """One line on who did how much and how stale it was; ``None`` outside of training or before an update."""
        measures = self._measures()
        return None if measures is None else report.summary(measures, self.world_size)

    def _measures(self) -> dict[str, Any] | None:
        run = self._run
        return None if run is None or run.worker is None else run.worker.metrics()

    def server_metrics(self) -> dict[str, Any]:
        """What the server counted until the ranks last met, see `stale.meters.Meters`; empty before."""
        return dict(self._run.meetings.metrics) if self._run is not None else {}

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0 means a dummy that counts nothing."""
        loop = self._loop
        return loop.samples if loop is not None else None

    def step_events(self) -> list[Event]:
        """Returns and forgets the events of this rank since the last call, for `HeteroTrace`."""
        run = self._run
        return run.loop.claims.take_events() if run is not None and run.loop is not None else []

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        run = self._connected
        if run is not None and self.is_global_zero:
            run.fetch_state()  # and the parameters of that very version
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        run = self._connected
        if run is not None and self.is_global_zero:
            state = run.state["optimizers"][self._index(getattr(optimizer, "_optimizer", optimizer))]
            mine = super().optimizer_state(optimizer)
            return {"state": state["state"], "param_groups": mine["param_groups"]}
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = self._run.checkpoint() if self._run is not None else self._finished
        if state:
            checkpoint[CHECKPOINT_KEY] = {"format": 1, "engine": "stale", **state}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._run is not None:
            self._run.resume(checkpoint.get(CHECKPOINT_KEY, {}))
        return checkpoint

    # ---- names ------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``hetero_stale`` and its launchers: ``_spawn``, ``_fork``, ``_forkserver``, ``_notebook``."""
        register(cls, strategy_registry, "hetero_stale", "Bounded-staleness parameter server")
