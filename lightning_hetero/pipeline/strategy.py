"""`HeteroPipelineStrategy`: pipelines of unequal stages, unequal data across them, an unchanged module (layer L).

    set-up:   measure or read -> plan -> every rank keeps its layers     [planning, ownership, whole]
    a batch:  training_step on each group's leader, suspended at the backbone; layers on all ranks
              [run -> runtime -> schedule, stages, links], gradients across groups [gradients]
    anywhere: whole-model checkpoints with stock keys, streamed          [divided, whole]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.glue.checks import check_choice, check_counts, check_ddp_arguments, name_lost_peer
from lightning_hetero.glue.metrics import integer_mean_, is_mean
from lightning_hetero.glue.setup import add_monitor, register
from lightning_hetero.pipeline.backbone import Backbone
from lightning_hetero.pipeline.carriers import CarrierName
from lightning_hetero.pipeline.divided import DividedDDPStrategy
from lightning_hetero.pipeline.planning import Planned, PlanSettings, evaluation_plan, make_plan
from lightning_hetero.pipeline.plans import describe_plan
from lightning_hetero.pipeline.profiling import Rehearsal
from lightning_hetero.pipeline.refusals import refuse_module, refuse_optimizers
from lightning_hetero.pipeline.run import PipelineRun
from lightning_hetero.pipeline.training import StepReport, TrainBatches, loss_of
from lightning_hetero.types import Cluster, Event, ModelCost, PipelinePlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.strategy import _StrategyRegistry

__all__ = ["HeteroPipelineStrategy"]


class HeteroPipelineStrategy(DividedDDPStrategy):
    """Pipelines of unequal devices, data parallel among each other, planned from measured speeds (joint DP + MP).

    A drop-in for `DDPStrategy`: the global batch stays what stock DDP would train on and the gradient is the mean
    over its samples, so the trained weights are those of a single process; a device holds its layers only. Each
    group's first device runs ``training_step`` per micro-batch and all that is not in the backbone's layers.

    Args:
        backbone: attribute that holds the layers, e.g. ``"model"`` or ``"net.blocks"``: an ``nn.Sequential``, an
            ``nn.ModuleList`` walked in order, or a module whose forward is a chain of its children; or a list of such
            names, one after another. ``None``: the LightningModule's ``pipeline_layers()``, or else its only attribute
            of a usual name.
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` x devices, as in DDP.
        micro_batch_size: samples that go through a pipeline at a time; ``None``: the planner chooses for each group.
        cluster: devices and links: a description as in ``conf/cluster``, a `Cluster`, ``"probe"``, or the path of a
            trace that `HeteroTrace` wrote in an earlier run; ``None``: an emulation's devices where one is in force,
            else probed.
        profile: costs of the layers, instead of measuring them when training starts: a `ModelCost`, or as plain values.
        plan: who holds what, instead of planning: a `PipelinePlan`, or as plain values.
        max_groups: most pipelines side by side; ``None``: as many as devices.
        depth: how many micro-batches are in flight: ``"per_link"`` for speed, ``"low_memory"``; ``"auto"``: whichever
            makes the faster plan under the devices' memory.
        overlap: transfers run beside computation.
        checkpoint_layers: keep only each layer's input for the backward pass and compute the layer again there.
        emulate_links: let messages take the time they would on the links of ``cluster``.
        seed: of dropout and whatever else is drawn; ``None``: ``seed_everything``'s, or 0.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch; of sums the ranks'
            mean is taken, as by DDP.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
        name
            on the LightningModule serves too.
        stream: what an `IterableDataset` is: ``"shared"``, if all ranks read the same one.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        carrier: what suspends a training step: ``"greenlet"``, ``"thread"``, or ``"auto"``.
        monitor: add a `StragglerMonitor` if the Trainer has none.
        cache_folder: where measurements are kept between runs; ``None``: nowhere.
        process_group_backend, timeout, start_method, **kwargs: as in `DDPStrategy`. ``kwargs`` of
            `DistributedDataParallel` are accepted and have no effect: there is no wrapper.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument of `DDPStrategy` that cannot hold here, with the reason.
    """

    def __init__(
        self,
        *,
        backbone: str | Sequence[str] | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        cluster: Cluster | Mapping[str, Any] | str | None = None,
        profile: ModelCost | Mapping[str, Any] | None = None,
        plan: PipelinePlan | Mapping[str, Any] | None = None,
        max_groups: int | None = None,
        depth: Literal["auto", "per_link", "low_memory"] = "auto",
        overlap: bool = True,
        checkpoint_layers: bool = False,
        emulate_links: bool = False,
        seed: int | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_weight: Callable[[Any], float] | None = None,
        stream: Literal["shared"] | None = None,
        batch_sampler: Literal["refuse", "pool"] = "refuse",
        carrier: Literal["auto", "greenlet", "thread"] = "auto",
        monitor: bool = True,
        cache_folder: str | Path | None = None,
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
                "communication hooks change DDP's all-reduce, and there is none here: gradients of a layer go to the"
                " ranks that hold the same layer. Drop ddp_comm_hook, ddp_comm_wrapper and ddp_comm_state"
            )
        check_counts(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, max_groups=max_groups)
        check_choice("depth", depth, ("auto", "per_link", "low_memory"))
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        check_choice("stream", stream, (None, "shared"))
        check_choice("batch_sampler", batch_sampler, ("refuse", "pool"))
        check_choice("carrier", carrier, ("auto", "greenlet", "thread"))
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
        self.backbone = backbone
        self.timeout = timeout
        self.settings_global_batch_size = global_batch_size
        self.plan_settings = PlanSettings(
            cluster=cluster,
            profile=profile,
            plan=plan,
            micro_batch_size=micro_batch_size,
            max_groups=max_groups,
            depth=depth,
            overlap=overlap,
            checkpoint_layers=checkpoint_layers,
            cache_folder=None if cache_folder is None else str(cache_folder),
        )
        self.emulate_links = emulate_links
        self.loss_reduction = loss_reduction
        self.batch_weight = batch_weight
        self.stream: Literal["shared"] | None = stream
        self.batch_sampler: Literal["refuse", "pool"] = batch_sampler
        self.carrier: CarrierName = carrier
        self._monitor = monitor
        self._seed = seed
        self._planned: tuple[object, int | None, Planned] | None = None  # model and batch it holds for, and the plan
        self._accumulates = False

    def __repr__(self) -> str:  # what Fabric prints when it refuses a strategy of the Trainer
        return f"<{type(self).__name__} for lightning.pytorch.Trainer>"

    # ---- set-up and teardown ----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._run is None:
            if self._monitor and trainer.state.fn == TrainerFn.FITTING:
                add_monitor(trainer)
            self._run = PipelineRun(self, trainer)

    def setup(self, trainer: Trainer) -> None:
        """Plans, and leaves on each rank what the plan gives it.

        The module stays on the CPU, whole, until then: optimizers are made over all its parameters, as under DDP.
        """
        run = self._run
        assert self.accelerator is not None and run is not None
        module = trainer.lightning_module
        self.accelerator.setup(trainer)
        if run.fitting:
            refuse_module(module, syncs_batch_norm=self._layer_sync is not None)
        self.model = self.precision_plugin.convert_module(module)
        backbone = run.find()
        if run.fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        planned = self._plan(run, backbone)
        run.install(planned)
        if any(len(group.ranks) > 1 for group in planned.plan.groups) or len(planned.plan.groups) < self.world_size:
            rank_zero_info(f"hetero_pipeline:\n{describe_plan(planned.plan, planned.cluster, backbone.names)}")
        self.setup_precision_plugin()

    def _plan(self, run: PipelineRun, backbone: Backbone) -> Planned:
        """Returns the plan of an earlier run if it holds, else a new one."""
        loader: Any = compat.train_source(run.trainer) if run.fitting else None
        total = run.binder.global_batch_of(loader) if run.fitting else None
        model = (id(run.module), len(backbone.layers), self.world_size)
        if self._planned is not None:
            known_model, known_total, planned = self._planned
            if known_model == model and (total is None or total == known_total):
                return planned
        if total is None:
            planned = evaluation_plan(run.module, backbone, self.plan_settings, run.channel, self.root_device)
        else:
            step = Rehearsal(
                module=run.module,
                backbone=backbone,
                device=self.root_device,
                loader=loader,
                loss_of=loss_of,
                optimizers=self.optimizers,
                to_device=super().batch_to_device,
                context=self.precision_plugin.train_step_context,
                carrier=self.carrier,
            )
            planned = make_plan(
                step, self.plan_settings, channel=run.channel, global_batch=total, scenario=run.scenario
            )
        self._planned = (model, total, planned)
        return planned

    def model_to_device(self) -> None:
        """Nothing: what a rank holds is moved when the plan is known."""

    def process_dataloader(self, dataloader: object) -> object:
        run = self._run
        if run is None or not run.trainer.training:
            return dataloader
        return run.binder.process(dataloader)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Validation, test and prediction data are divided among the groups: members see their leader's."""
        run = self._run
        if run is None or run.planned is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": len(run.planned.plan.groups), "rank": run.group_index or 0}

    def emulate(self, scenario: Scenario) -> bool:
        """Called by a `ThrottleCallback` when set-up begins: stages sleep for their own part of the emulated work."""
        if self._run is None:
            return False
        self._run.scenario = scenario
        return True

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._run is not None:
            self._run.fail(exception)
        name_lost_peer(exception, self.global_rank)

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        run = self._run
        if run is not None and run.trainer.training:
            self._batches.open()
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._batches.train(args[0], args[1:], accumulates=self._accumulates)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning wraps a batch that only accumulates in this: its gradients stay where they are."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The gradients are there already, see `TrainBatches`; users' hooks around the backward pass run as ever."""
        module = self.lightning_module
        assert module is not None
        self.precision_plugin.pre_backward(closure_loss, module)
        self._batches.place_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        batches = self._batches
        with batches.clipping(), batches.scaling(optimizer, closure) as closure:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    @property
    def _batches(self) -> TrainBatches:
        assert self._run is not None and self._run.batches is not None
        return self._run.batches

    def _evaluate(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        assert self._run is not None
        return self._run.evaluate(name, args, kwargs)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._run is not None:
            self._run.share_buffers()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of integers are exact. (What steps log is the same on all ranks already.)"""
        if isinstance(tensor, Tensor) and is_mean(reduce_op) and not tensor.is_floating_point():
            world = torch.distributed.group.WORLD if group is None else group
            assert world is not None
            return integer_mean_(tensor, world)
        return super().reduce(tensor, group, reduce_op)

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int | None:
        """Samples of all ranks per batch of the train loader; ``None`` before the loader is known."""
        known = self._run.binder.global_batch_size if self._run is not None else None
        return known if known is not None else self.settings_global_batch_size

    @property
    def planned(self) -> Planned | None:
        """The plan in force or the last one, with what it was made from; ``None`` before the first set-up."""
        return self._planned[2] if self._planned is not None else None

    @property
    def seed(self) -> int:
        """Of what stages and steps draw."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed

    @property
    def keeps_gradients(self) -> bool:
        """Whether the module zeroes gradients in a way of its own."""
        return is_overridden("optimizer_zero_grad", self.lightning_module)

    def fingerprint(self) -> dict[str, str]:
        """Returns what must be the same on all ranks, as words."""
        settings = {name: repr(getattr(self.plan_settings, name)) for name in PlanSettings.__slots__}
        return {
            "lightning_hetero": __version__,
            "torch": torch.__version__,
            **settings,
            "backbone": repr(self.backbone),
            "global_batch_size": str(self.settings_global_batch_size),
            "loss_reduction": self.loss_reduction,
            "seed": str(self.seed),
        }

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0 means a dummy: a member's, or a rank at rest."""
        batches = self._run.batches if self._run is not None else None
        return None if batches is None or batches.part is None else batches.part.samples

    def step_report(self) -> StepReport | None:
        """Per rank samples, own work and the rest of the last step; ``None`` before the first one."""
        batches = self._run.batches if self._run is not None else None
        return None if batches is None else batches.report

    def summary(self) -> str | None:
        """One line on what the last step took, against the plan; ``None`` before the first one."""
        report, planned = self.step_report(), self.planned
        if report is None or planned is None:
            return None
        step_s = max(record.compute_s + record.wait_s for record in report.records)
        busiest = max(report.records, key=lambda record: record.compute_s)
        modelled = f" (modelled: {planned.plan.total_s * 1e3:.1f} ms)" if planned.plan.total_s > 0 else ""
        share = 100.0 * busiest.compute_s / max(step_s, 1e-9)
        return (
            f"hetero_pipeline: {len(planned.plan.groups)} groups, {step_s * 1e3:.1f} ms per batch{modelled}; the"
            f" busiest rank, {busiest.rank}, works {share:.0f} % of it"
        )

    def step_events(self) -> list[Event]:
        """Returns and forgets the events of this rank since the last call, for `HeteroTrace`."""
        return self._run.take_events() if self._run is not None else []

    # ---- names ------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``hetero_pipeline`` and its launchers: ``_spawn``, ``_fork``, ``_forkserver``, ``_notebook``."""
        register(cls, strategy_registry, "hetero_pipeline", "Pipelines of unequal devices")
