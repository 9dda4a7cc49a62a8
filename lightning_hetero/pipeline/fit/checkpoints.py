"""Checkpoints of a model that no rank has whole, and what comes after a failure (layer L).

After an exception all ranks are needed for a checkpoint, and they come when they hear of the failure.
`OnExceptionCheckpoint` and ``ModelCheckpoint(save_on_exception=True)`` save on each rank that has an exception, before
the strategy learns of it. The first one reports it here; the others get an exception by that and come to save, too.
What was under way between them stays as it is: they meet in a new process group.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_hetero.base.checks import naming_damage
from lightning_hetero.base.refusals import refuse_saving_in_step
from lightning_hetero.base.run import gloo_group
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.pipeline.fit.averaged_weights import complete
from lightning_hetero.pipeline.fit.place import RankInPlan
from lightning_hetero.pipeline.fit.plan.planning import PlanResult
from lightning_hetero.pipeline.fit.run import PipelineRun
from lightning_hetero.pipeline.runtime.ownership.full_state import (
    WholeState,
    is_local,
    load_mapped,
    save_streamed,
)
from lightning_hetero.pipeline.runtime.step.backbone import Backbone

PATIENCE_S = 60.0  # how long the others may compute before they look for messages


class SaveAfterFailure:
    """Decides how a run's checkpoints are collected, during training and after an exception.

    Args:
        trainer: the running trainer.
        place: of this rank in the plan.
    """

    def __init__(self, trainer: Trainer, place: RankInPlan) -> None:
        self._trainer, self._place = trainer, place
        self._asked = False
        self._whole: WholeState | None = None

    def whole(self) -> WholeState | None:
        """Returns what collects the model; None if ranks are missing after an exception. Collective, if all come."""
        if self._trainer.state.status != TrainerStatus.INTERRUPTED or self._place.fixed.channel.world_size == 1:
            return self._place.held.whole
        if not self._asked:
            self._asked = True
            self._whole = self._meet()
        return self._whole

    def _meet(self) -> WholeState | None:
        trainer, place, timeout = self._trainer, self._place, self._place.fixed.settings.timeout
        place.fixed.failures.report(sys.exc_info()[1] or RuntimeError("interrupted"))
        here = f"epoch {trainer.current_epoch}, {trainer.global_step} optimizer steps"
        patience_s = PATIENCE_S if timeout is None else min(PATIENCE_S, timeout.total_seconds())
        notes = place.fixed.failures.meet(here, place.fixed.channel.world_size, patience_s)
        missing = [rank for rank, note in enumerate(notes) if not note]
        if missing or len(set(notes)) > 1:
            why = f"rank(s) {missing} did not come to save" if missing else f"the ranks stand at {notes}"
            rank_zero_warn(f"no checkpoint is written after the exception: {why}, and each holds a part of the model")
            return None
        group = gloo_group(timeout)
        return WholeState(trainer.lightning_module, place.held.ownership, group=group)


class WholeCheckpointsDDP(HeteroStrategy[PipelineRun]):
    """Collects and divides states of the whole model; files are those that stock DDP writes, plus one key."""

    def __init__(self, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._saves: SaveAfterFailure | None = None  # as long as the model is divided
        self._optimizers_then: list[dict[str, Any]] = []  # the optimizers' states at the end of the last fit

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_saves": None, "_optimizers_then": [], "_finished": {}}

    @property
    def _place(self) -> RankInPlan | None:
        """This rank's place in the plan; None as long as the module is whole."""
        return self._run.place if self._run is not None else None

    def _install(self, run: PipelineRun, planned: PlanResult, backbone: Backbone, **options: Any) -> None:
        """Divides the model; see `PipelineRun.install`."""
        self._saves = SaveAfterFailure(run.trainer, run.install(planned, backbone, self.optimizers, **options))

    def teardown(self) -> None:
        run = self._run
        self.keep()
        if run is not None:
            try:
                if run.fitting and not run.failed and run.place is not None:
                    self._optimizers_then = [run.place.held.whole.optimizer_state(o) for o in self.optimizers]
                    self._finished = run.state_dict()
                run.close()
            finally:
                self._run = self._saves = None
        if run is None or not run.failed:
            super().teardown()
            return
        # As the base class does, but for moving a module of which parts are elsewhere.
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._saves is None:
            return super().lightning_module_state_dict()
        if self._run is not None and self._run.batches is not None and self._run.batches.in_step:
            refuse_saving_in_step()
        whole = self._saves.whole()
        return {} if whole is None else whole.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        own = getattr(optimizer, "_optimizer", optimizer)
        if self._saves is not None and self._run is not None and self._run.fitting:
            whole = self._saves.whole()
            return {} if whole is None else whole.optimizer_state(own)
        index = next((i for i, known in enumerate(self.optimizers) if known is own), None)
        if index is None or not self._optimizers_then:
            return super().optimizer_state(optimizer)
        return self._optimizers_then[index]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.world_size == 1:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        run, whole = self._run, None
        checkpoint = self.with_state(checkpoint)
        if self._saves is not None and self._place is not None:
            whole = self._saves.whole()
            if whole is None:
                return
            complete(checkpoint, whole)
        if type(self.checkpoint_io) is not TorchCheckpointIO or storage_options is not None or not is_local(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            save_streamed(checkpoint, filepath)
        if run is not None and run.failed and whole is not None:
            torch.distributed.barrier(group=whole.group)  # as long as another one lives, rank 0 can write

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """After a failure no rank waits for those that may not come."""
        if self._run is None or not self._run.failed:
            super().barrier(*args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint of any engine, or of plain Lightning; a local file is mapped, not read into memory."""
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        stock = type(self.checkpoint_io) is TorchCheckpointIO and self.world_size > 1
        checkpoint = None
        if stock:
            with naming_damage(checkpoint_path):
                checkpoint = load_mapped(checkpoint_path, weights_only)
        if checkpoint is None:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self.take_state(checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._place is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._place.held.whole.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._place is None:
            return super().load_optimizer_state_dict(checkpoint)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self._place.held.whole.load_optimizer_state(optimizer, state)
