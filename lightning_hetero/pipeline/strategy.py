"""`HeteroPipelineStrategy`: pipelines of unequal stages, unequal data across them, an unchanged module (layer L).

    set-up:   measure or read -> plan -> every rank keeps its layers     [fit/planning, fit/place]
    a batch:  training_step on each group's leader, suspended at the backbone; layers on all ranks
              [fit/training -> runtime/execute], gradients across groups [runtime/ownership]
    anywhere: whole-model checkpoints with stock keys, streamed          [fit/checkpoints]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from typing_extensions import Unpack

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, DDPArguments
from lightning_hetero.base.checks import check_choice, check_controller, check_counts, check_flags
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.controller.replans import Replan
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.emulate.throttle import scenario_steps
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.pipeline.decide.plans import describe_plan
from lightning_hetero.pipeline.fit.checkpoints import WholeCheckpointsDDP
from lightning_hetero.pipeline.fit.leader_step import acting_rank
from lightning_hetero.pipeline.fit.planning import CannotDivideError, Planner, PlanResult, probed, read_cluster
from lightning_hetero.pipeline.fit.refusals import (
    REFUSALS,
    layers_alike,
    refuse_module,
    refuse_no_optimizer,
    refuse_optimizers,
    warn_undivided,
)
from lightning_hetero.pipeline.fit.rehearsal import Rehearsal
from lightning_hetero.pipeline.fit.run import PipelineRun
from lightning_hetero.pipeline.fit.training import TrainBatches
from lightning_hetero.pipeline.fit.wires import PipelineSettings, PlanSettings
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided, find_layers, undivided
from lightning_hetero.solvers.plans import plan_from_plain
from lightning_hetero.types import Cluster, LossReduction, ModelCost, PipelinePlan


class HeteroPipelineStrategy(WholeCheckpointsDDP):
    """Pipelines of unequal devices, data parallel among each other, planned from measured speeds (joint DP + MP).

    A drop-in for `DDPStrategy`: the global batch stays what stock DDP would train on and the gradient is the mean
    over its samples, so the trained weights are those of a single process; a device holds its layers only. Each
    group's first device runs ``training_step`` per micro-batch and all that is not in the backbone's layers.

    Args:
        backbone: attribute that holds the layers, e.g. ``"model"`` or ``"net.blocks"``: an ``nn.Sequential``, an
            ``nn.ModuleList`` walked in order, or a module whose forward is a chain of its children; or a list of such
            names, one after another. ``None``: the LightningModule's ``pipeline_layers()``, or else its only attribute
            of a usual name. Where nothing can be divided, each device trains the whole model on its part of the batch.
        micro_batch_size: samples that go through a pipeline at a time; ``None``: the planner chooses for each group.
        cluster: devices and links: a description as in ``conf/hetero/cluster``, the path of a YAML file with one or of
            a trace that `HeteroTrace` wrote in an earlier run, a `Cluster`, or ``"probe"``; ``None``: an emulation's
            devices where one is in force, else probed.
        profile: costs of the layers, instead of measuring them when training starts: a `ModelCost`, or as plain values.
        plan: which rank holds what, instead of planning: a `PipelinePlan`, or as plain values.
        controller: what watches the run and decides on other plans while it trains. ``"lyapunov"``: a
            `LyapunovController`, which minimises time as long as it has no ``budget``; a ``plan`` that was given stays,
            unless a controller is passed as an object. ``None``: the first plan stays.
        max_groups: most pipelines side by side; ``None``: as many as devices.
        depth: how many micro-batches are in flight: ``"per_link"`` for speed, ``"low_memory"``; ``"auto"``: whichever
            makes the faster plan under the devices' memory.
        checkpoint_layers: keep only each layer's input for the backward pass and compute the layer again there.
        emulate_links: let activations, sums of gradients and layers that move take the time they would on the links of
            ``cluster``.
        stream: what an `IterableDataset` is: ``"shared"``, if all ranks read the same one.
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` times the number of
            devices, as under DDP.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule works too.
        own_data: whether each rank's train dataset has different samples under the same index; ``None``: three samples
            are read and compared.
        monitor: print one line about the ranks at the end of a fit.
        accelerator: as in `DDPStrategy`; the Trainer sets it.
        **ddp: the other arguments of `DDPStrategy` and `DistributedDataParallel`, see `DDPArguments`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an unknown argument; those that cannot hold on several devices are refused with the reason when the
            Trainer is made.
    """

    engine = "pipeline"
    refusals = REFUSALS
    evaluates = True

    def __init__(
        self,
        *,
        backbone: str | Sequence[str] | None = None,
        micro_batch_size: int | None = None,
        cluster: Cluster | Mapping[str, Any] | str | None = None,
        profile: ModelCost | Mapping[str, Any] | None = None,
        plan: PipelinePlan | Mapping[str, Any] | None = None,
        controller: LyapunovController | Literal["lyapunov"] | None = "lyapunov",
        max_groups: int | None = None,
        depth: Literal["auto", "per_link", "low_memory"] = "auto",
        checkpoint_layers: bool = False,
        emulate_links: bool = False,
        stream: Literal["shared"] | None = None,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **ddp: Unpack[DDPArguments],
    ) -> None:  # fmt: skip
        super().__init__(
            global_batch_size=global_batch_size, batch_sampler=batch_sampler, loss_reduction=loss_reduction,
            batch_weight=batch_weight, own_data=own_data, monitor=monitor, accelerator=accelerator, **ddp,
        )  # fmt: skip
        check_counts(micro_batch_size=micro_batch_size, max_groups=max_groups)
        check_choice("depth", depth, ("auto", "per_link", "low_memory"))
        why = ": one loader feeds all ranks of a group, so ranks do not have streams as under hetero_balanced"
        check_choice("stream", stream, (None, "shared"), why=why)
        check_flags(checkpoint_layers=checkpoint_layers, emulate_links=emulate_links)
        names = [backbone] if isinstance(backbone, str | None) else backbone
        if not (isinstance(names, Sequence) and all(isinstance(name, str | None) for name in names)):
            raise TypeError(f"backbone={backbone!r} must be the name of an attribute, a list of names, or None")
        self.backbone = backbone
        self.controller = check_controller(controller)
        self.plan_settings = PlanSettings(
            cluster=read_cluster(cluster), profile=None if profile is None else model_from_plain(profile),
            plan=None if plan is None else plan_from_plain(plan), micro_batch_size=micro_batch_size,
            max_groups=max_groups, depth=depth, checkpoint_layers=checkpoint_layers,
            watched=isinstance(controller, LyapunovController),
        )  # fmt: skip
        self.emulate_links = emulate_links
        self.stream: Literal["shared"] | None = stream
        self._planned: PlanResult | None = None  # made when a run began, or in force when it ended
        self._planned_for: tuple[object, int | None] = None, None  # model and global batch
        self._replans: list[Replan] = []

    # ---- set-up and teardown ----------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self.world_size > 1:
            self.plan_settings.check_ranks(self.world_size)

    def begin(self, trainer: Trainer) -> PipelineRun:
        assert self.cluster_environment is not None
        controller = self.controller
        if controller == "lyapunov":  # not asked for: a plan that was given stays
            controller = None if self.plan_settings.plan is not None else LyapunovController()
        settings = PipelineSettings(
            shared=self.shared, planning=self.plan_settings, backbone=self.backbone,
            emulate_links=self.emulate_links, seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            stream=self.stream, device=self.root_device, process_group_backend=self.process_group_backend,
            timeout=self.timeout, controller=controller,
        )  # fmt: skip
        run = PipelineRun(trainer, settings)
        run.undo.enter_context(  # the gradients are there, `TrainBatches`
            patched(self.precision_plugin, "backward", lambda *_, **__: self._batches.backward_done())
        )
        return run

    def setup(self, trainer: Trainer) -> None:
        """Plans, and leaves on each rank what the plan gives it.

        The module stays on the CPU, whole, until then: optimizers are made over all its parameters, as under DDP.
        """
        run = self._run
        if run is None:
            return super().setup(trainer)
        assert self.accelerator is not None
        module = trainer.lightning_module
        self.accelerator.setup(trainer)
        if run.fitting:
            refuse_module(module)
            self.check_module(module)
        self.model = self.precision_plugin.convert_module(module)
        given = self.plan_settings.plan is not None or self.plan_settings.profile is not None
        backbone = find_layers(module, self.backbone, needed=given)
        if run.fitting:
            self.setup_optimizers(trainer)
            refuse_no_optimizer(self.optimizers)
        try:
            planned = self._plan(run, backbone)
        except CannotDivideError as error:
            backbone = undivided(module, f"the layers that were found cannot be divided: {error}")
            planned = self._plan(run, backbone)
        if run.fitting and isinstance(backbone, Undivided):
            warn_undivided(backbone)
        self._replans = run.replans
        divided = any(len(group.ranks) > 1 for group in planned.plan.groups)
        if checked := run.fitting and (divided or run.settings.controller is not None):
            refuse_optimizers(self.optimizers, backbone)
        place = run.install(planned, backbone, to_device=self._moved)
        if checked:
            run.watch_layers = run.undo.enter_context(layers_alike(backbone, lambda: place.elsewhere))
        if divided or len(planned.plan.groups) < self.world_size:
            rank_zero_info(f"hetero_pipeline:\n{describe_plan(planned.plan, planned.cluster, backbone.names)}")
        self.setup_precision_plugin()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0; in a step, whether it runs for rank 0."""
        return super().is_global_zero if (rank := acting_rank()) is None else rank == 0

    def configure_ddp(self) -> None:
        """No wrapper, also on one device: parameters that a loss does not use need no flag there either."""

    def _moved(self, batch: Any) -> Any:
        """Returns a batch on this rank's device, with all hooks of the user."""
        assert self._run is not None
        return compat.batch_to_device(self._run.trainer, batch, super().batch_to_device)

    def _plan(self, run: PipelineRun, backbone: Backbone) -> PlanResult:
        """Returns the plan of an earlier run if it holds, else a new one."""
        loader: Any = compat.train_source(run.trainer) if run.fitting else None
        total = run.binder.global_batch_of(loader) if run.fitting else None
        model = (id(run.module), len(backbone.layers), self.world_size)
        known_model, known_total = self._planned_for
        if self._planned is not None and known_model == model and total in (None, known_total):
            return self._planned
        step = Rehearsal(
            module=run.module, backbone=backbone, found=self.backbone is None, device=self.root_device,
            loader=loader, optimizers=self.optimizers, to_device=self._moved,
            context=self.precision_plugin.train_step_context,
        )  # fmt: skip
        scenario = run.scenario if run.fitting else None
        probe = partial(probed, self, run.channel.group)
        planner = Planner(step, self.plan_settings, channel=run.channel, scenario=scenario, probe=probe)
        planned = planner.plan_evaluation() if total is None else planner.plan(total)
        self._planned, self._planned_for = planned, (model, total)
        return planned

    def teardown(self) -> None:
        self._planned = self.planned  # in force: a later fit of the same model begins with it
        super().teardown()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """What `configure_model` builds is built on the CPU: the whole model need not fit this rank's device."""
        with super().tensor_init_context(empty_init), torch.device("cpu") if self.world_size > 1 else nullcontext():
            yield

    def model_to_device(self) -> None:
        """What a rank holds is moved when the plan is known."""
        if self._run is None:
            super().model_to_device()

    def idle_on_one_device(self) -> dict[str, Any]:
        names = ("micro_batch_size", "checkpoint_layers")
        return {name: value for name in names if (value := getattr(self.plan_settings, name))}

    def emulate(self, scenario: Scenario) -> bool:
        """Called by a `ThrottleCallback` when set-up begins: stages sleep for their own part of the emulated work."""
        if self._run is None:
            return False
        throttles = (c for c in compat.trainer_callbacks(self._run.trainer) if isinstance(c, ThrottleCallback))
        every_s = next((throttle.step_every_s for throttle in throttles if throttle.scenario is scenario), None)
        self._run.scenario, self._run.scenario_step = scenario, scenario_steps(every_s)
        return True

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._run is not None:
            self._run.finish()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        run = self._run
        if run is not None and run.trainer.training:
            self._batches.open()
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            return super().training_step(*args, **kwargs)
        batch, *rest = args
        with self.precision_plugin.train_step_context():
            return self._batches.train(batch, rest, kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._run is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        gradients = self._batches.gradients
        with gradients.clipping(), gradients.scaling(optimizer, closure) as closure:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    @property
    def _batches(self) -> TrainBatches:
        assert self._run is not None and self._run.batches is not None
        return self._run.batches

    def _evaluate(self, name: str, stock: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._run is None:
            return stock(*args, **kwargs)
        assert self._place is not None
        last = name == "predict_step" and compat.is_last_prediction(self._run.trainer)
        context = getattr(self.precision_plugin, f"{name.replace('validation', 'val')}_context")
        with context():
            return self._place.evaluation.run(name, args, kwargs, last=last)

    def on_test_start(self) -> None:
        if self._place is not None:
            self._place.refuse_changed()

    on_predict_start = on_test_start

    def on_validation_start(self) -> None:
        if self._place is not None:
            self._place.refuse_changed()
            self._place.share_buffers()

    def on_validation_end(self) -> None:
        if self._place is not None:
            self._place.evaluation.finish()

    on_test_end = on_predict_end = on_validation_end

    @property
    def plan(self) -> PipelinePlan | None:
        """Who computes what at present, or did last; ``None`` before the first set-up."""
        return None if self.planned is None else self.planned.plan

    @property
    def replans(self) -> list[Replan]:
        """Changes of plan in this fit, or the last one; the same on all ranks, except what each has waited."""
        return list(self._replans)

    @property
    def planned(self) -> PlanResult | None:
        """The plan in force or the last one, with what it was made from; ``None`` before the first set-up."""
        return self._planned if self._place is None else self._place.planned
