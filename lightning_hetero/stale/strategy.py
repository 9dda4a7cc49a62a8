"""`BoundedStalenessStrategy`: DDP's recipe on a parameter server that waits for nobody (layer L).

    rank r:   claim -> pull -> training_step, backward -> push           [loop, worker, transport]
                                   '-> gradients into the slot while backward runs
    server:   who is late, who gets what, when is a batch complete       [coordinator, policy, ledger]
              pool the gradients, step the user's own optimizers         [server]
    all:      meet before anything is reduced over ranks                 [run.MeetingPoints]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.glue.checks import check_ddp_arguments, name_lost_peer
from lightning_hetero.glue.metrics import integer_mean_, is_mean
from lightning_hetero.glue.setup import CHECKPOINT_KEY, add_monitor, register
from lightning_hetero.predictors import Predictor
from lightning_hetero.predictors import by_name as predictor_by_name
from lightning_hetero.stale import report
from lightning_hetero.stale.compress import Codec
from lightning_hetero.stale.compress import by_name as codec_by_name
from lightning_hetero.stale.join import Newcomer
from lightning_hetero.stale.norms import has_batch_norm
from lightning_hetero.stale.policy import Policy
from lightning_hetero.stale.policy import by_name as policy_by_name
from lightning_hetero.stale.regroup import group_members, rebuild_default_group
from lightning_hetero.stale.report import StepReport
from lightning_hetero.stale.run import StaleRun
from lightning_hetero.stale.start import ServerSettings
from lightning_hetero.types import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.strategy import _StrategyRegistry

__all__ = ["BoundedStalenessStrategy"]


class BoundedStalenessStrategy(DDPStrategy):
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
        for name, value in (("global_batch_size", global_batch_size), ("shards", shards)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number >= 1")
        for name, value, allowed in (
            ("nonfinite", nonfinite, ("stop", "skip")),
            ("transport", transport, ("auto", "pairs")),
            ("batch_sampler", batch_sampler, ("refuse", "pool")),
            ("loss_reduction", loss_reduction, ("mean", "sum")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {allowed}")
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
        self.timeout = timeout
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
        self.newcomer: Newcomer | None = None  # while this rank is on its way into a run of others
        self._run: StaleRun | None = None
        self._finished: dict[str, Any] = {}  # what the last fit would write into a checkpoint
        self._warned: set[str] = set()
        self._members: tuple[int, ...] | None = None

    def __repr__(self) -> str:  # what Fabric prints when it refuses a strategy of the Trainer
        return f"<{type(self).__name__} for lightning.pytorch.Trainer>"

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the lowest of the ranks that are left: it writes checkpoints, also when rank 0 is dead."""
        return self.global_rank == (self._members[0] if self._members else 0)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part: all, but for those that died and have not come again. Also after the fit."""
        return tuple(range(self.world_size)) if self._members is None else self._members

    @members.setter
    def members(self, members: tuple[int, ...]) -> None:
        self._members = members

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Evaluation is divided among the ranks that take part."""
        members = self.members
        return {"num_replicas": len(members), "rank": members.index(self.global_rank)}

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

    def _configure_launcher(self) -> None:
        from lightning_hetero.stale.launcher import TolerantProcessLauncher, TolerantScriptLauncher

        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = TolerantScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, tolerates=self.goes_on_without_a_rank
            )
        else:
            self._launcher = TolerantProcessLauncher(
                self, start_method=self._start_method, tolerates=self.goes_on_without_a_rank
            )

    def goes_on_without_a_rank(self) -> bool:
        """Whether the death of a rank (not rank 0) would be survived now."""
        return self._run is not None and self._run.worker is not None

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
            self._refuse_what_waits()
        super().setup(trainer)

    def _refuse_what_waits(self) -> None:
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
            raise TypeError(
                "SyncBatchNorm makes every rank wait for all others in every batch, which is what this strategy avoids;"
                " use BatchNorm (its running statistics are averaged over the samples), GroupNorm, or"
                " strategy='hetero_balanced'"
            )
        swa = [c for c in compat.trainer_callbacks(module.trainer) if isinstance(c, StochasticWeightAveraging)]
        if swa and has_batch_norm(module):
            raise TypeError(
                "StochasticWeightAveraging with BatchNorm runs an epoch over the averaged weights to renew the running"
                " statistics, and the parameter server does not have these weights; use WeightAveraging, which averages"
                " the statistics, too, or GroupNorm, or strategy='hetero_balanced'"
            )
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and not module.automatic_optimization:
            raise TypeError(
                "precision='16-mixed' with manual optimization: the loss scale would have to be agreed between the"
                " optimizer steps of one batch; use precision='bf16-mixed'"
            )

    def setup_distributed(self) -> None:
        """As in the base class, unless others are training already: then this rank joins them when an epoch ends."""
        assert self.lightning_module is not None and self.cluster_environment is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and not dist.is_initialized():
            self.set_world_ranks()
            self.newcomer = Newcomer.find(self.cluster_environment, self.global_rank)
        if self.newcomer is None:
            super().setup_distributed()
            self._members = group_members()  # fewer than all, if a rank died in an earlier fit
            return
        invitation = self.newcomer.wait()
        reset_seed()
        self.members = invitation.members
        self._process_group_backend = self._get_process_group_backend()
        rebuild_default_group(
            store=dist.TCPStore(invitation.address.host, invitation.address.port, is_master=False),
            generation=invitation.generation,
            members=invitation.members,
            rank=self.global_rank,
            backend=self._process_group_backend,
            timeout=self.timeout,
        )
        compat.resume_from(self.lightning_module.trainer, invitation.checkpoint)

    def configure_ddp(self) -> None:
        """No wrapper: gradients go to the server. Ranks start from rank 0's parameters and buffers, as under DDP."""
        assert self.model is not None
        if self.newcomer is not None:
            return
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            dist.broadcast(tensor.data, 0)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers):
            raise TypeError(
                "LBFGS evaluates the loss several times per step, and here the step is made in the parameter server;"
                " use another optimizer, or one device"
            )

    def process_dataloader(self, dataloader: object) -> object:
        run = self._run
        if run is None or not run.trainer.training:
            return dataloader
        return run.process(dataloader)

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

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_run": None, "newcomer": None}

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

        def run(optimizer: Any, closure: Callable[[], Any]) -> Any:
            return super(BoundedStalenessStrategy, self).optimizer_step(optimizer, closure, model, **kwargs)

        return loop.step(self._index(optimizer), optimizer, closure, run)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning wraps a batch that only accumulates in this: its gradients are pushed at the end."""
        yield
        loop = self._loop
        assert self.lightning_module is not None
        if loop is not None and loop.in_step and self.lightning_module.automatic_optimization:

            def run(optimizer: Any, closure: Callable[[], Any]) -> Any:
                return super(BoundedStalenessStrategy, self).optimizer_step(optimizer, closure)

            loop.accumulated(0, self.optimizers[0], run)

    def _index(self, optimizer: Any) -> int:
        return next(i for i, own in enumerate(self.optimizers) if own is optimizer)

    @property
    def _loop(self) -> Any:
        run = self._run
        return run.loop if run is not None and run.worker is not None and run.trainer.training else None

    # ---- collectives ------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Within a training batch a rank's own value; at the end of an epoch the exact mean over ranks."""
        run = self._run
        if run is not None and run.worker is not None and compat.batch_results_open(run.trainer):
            return tensor
        if not isinstance(tensor, Tensor) or self._alone:
            return tensor
        logged = run.logged() if run is not None and run.worker is not None else ""
        self._meet(f"reduce {reduce_op} {tuple(tensor.shape)}{logged}")
        if is_mean(reduce_op) and not tensor.is_floating_point() and dist.is_initialized():
            world = dist.group.WORLD if group is None else group
            assert world is not None
            return integer_mean_(tensor, world)
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Callbacks decide together, also within a batch: all ranks ask at the same one."""
        if self._alone:
            return decision
        self._meet("decision")
        value = torch.tensor(int(decision), device=self.root_device)
        value = super().reduce(value, reduce_op="sum")
        return bool(value == dist.get_world_size()) if all else bool(value)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._alone:
            return tensor.unsqueeze(0)
        self._meet(f"all_gather {tuple(tensor.shape)}")
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone:
            return obj
        self._meet(f"broadcast {src}")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._alone:
            return
        self._meet("barrier")
        super().barrier(*args, **kwargs)

    @property
    def _alone(self) -> bool:
        """Whether no other rank is to be waited for: this one has failed, or is on its way into a run of others."""
        run = self._run
        return self.newcomer is not None or (run is not None and run.worker is not None and run.trainer.interrupted)

    def _meet(self, what: str) -> None:
        run = self._run
        if run is None or run.worker is None:
            return
        if run.loop is not None and run.loop.in_step:
            raise RuntimeError(
                f"a collective ({what}) inside training_step: ranks train different numbers of batches here, so they"
                " do not meet within one. Move it to on_train_epoch_end or validation, or use"
                " strategy='hetero_balanced'"
            )
        run.meet(what)

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int | None:
        """Samples per update; ``None`` before the loader is known."""
        known = self._run.global_batch_size if self._run is not None else None
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
        return run.worker.metrics() if run is not None and run.worker is not None else None

    def server_metrics(self) -> dict[str, Any]:
        """What the server counted until the ranks last met, see `stale.meters.Meters`; empty before."""
        return dict(self._run.metrics) if self._run is not None else {}

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0 means a dummy that counts nothing."""
        loop = self._loop
        return loop.samples if loop is not None else None

    def step_events(self) -> list[Event]:
        """Returns and forgets the events of this rank since the last call, for `HeteroTrace`."""
        run = self._run
        return run.loop.take_events() if run is not None and run.loop is not None else []

    def warn_once(self, text: str) -> None:
        """Shows a message to people, on one rank, once."""
        if text not in self._warned:
            self._warned.add(text)
            if self.is_global_zero:  # `rank_zero_warn` would say nothing after the death of rank 0
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        run = self._run
        if run is not None and run.worker is not None and self.is_global_zero:
            run.fetch_state()  # and the parameters of that very version
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        run = self._run
        if run is not None and run.worker is not None and self.is_global_zero:
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
            self._run.resume = self._run.orders.resume = checkpoint.get(CHECKPOINT_KEY, {})
            self._run.state = {}
        return checkpoint

    # ---- names ------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``hetero_stale`` and its launchers: ``_spawn``, ``_fork``, ``_forkserver``, ``_notebook``."""
        register(cls, strategy_registry, "hetero_stale", "Bounded-staleness parameter server")
