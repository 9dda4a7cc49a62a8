"""Of DDP, what differs for a model that no rank has whole: checkpoints, and what comes after a failure (layer L)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_hetero.glue.setup import CHECKPOINT_KEY
from lightning_hetero.pipeline.averages import refuse_parts
from lightning_hetero.pipeline.mapped import is_local, load_mapped, save_streamed

if TYPE_CHECKING:
    from lightning_hetero.pipeline.run import PipelineRun

__all__ = ["DividedDDPStrategy"]


class DividedDDPStrategy(DDPStrategy):
    """Collects and divides states of the whole model; files are those that stock DDP writes, plus one key."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run: PipelineRun | None = None
        self._finished: dict[str, Any] = {}  # what the last fit would write into a checkpoint: optimizers, our key

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_run": None, "_finished": {}}

    def teardown(self) -> None:
        run = self._run
        if run is not None:
            try:
                if run.fitting and not run.failed and run.planned is not None:
                    states = [run.whole.optimizer_state(optimizer) for optimizer in self.optimizers]
                    self._finished = {"optimizers": states, "engine": run.state_dict()}
                run.close()
            finally:
                self._run = None
        if run is None or not run.failed:
            super().teardown()
            return
        # As the base class does, but for moving a module of which parts are elsewhere.
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        run = self._run
        if run is None or run.planned is None:
            return super().lightning_module_state_dict()
        whole = run.rescue.whole()
        return {} if whole is None else whole.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        run = self._run
        own = getattr(optimizer, "_optimizer", optimizer)
        if run is not None and run.fitting and run.planned is not None:
            whole = run.rescue.whole()
            return {} if whole is None else whole.optimizer_state(own)
        index = next((i for i, known in enumerate(self.optimizers) if known is own), None)
        if index is None or not self._finished:
            return super().optimizer_state(optimizer)
        return self._finished["optimizers"][index]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        run, whole = self._run, None
        state = run.state_dict() if run is not None and run.fitting else self._finished.get("engine")
        if state:
            checkpoint[CHECKPOINT_KEY] = {"format": 1, "engine": "pipeline", **state}
        if run is not None and run.planned is not None:
            whole = run.rescue.whole()
            if whole is None:
                return
            run.averages.complete(checkpoint, whole)
            refuse_parts(checkpoint, whole.group)
        if type(self.checkpoint_io) is not TorchCheckpointIO or storage_options is not None or not is_local(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            save_streamed(checkpoint, filepath)
        if run is not None and run.failed and whole is not None:
            torch.distributed.barrier(group=whole.group)  # as long as another one lives, rank 0 can write

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """After a failure nobody waits for ranks that may not come."""
        if self._run is None or not self._run.failed:
            super().barrier(*args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint of any engine, or of plain Lightning; a local file is mapped, not read into memory."""
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        stock = type(self.checkpoint_io) is TorchCheckpointIO
        checkpoint = load_mapped(checkpoint_path, weights_only) if stock else None
        if checkpoint is None:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._run is not None and self._run.fitting:
            self._run.resume(checkpoint.get(CHECKPOINT_KEY, {}))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        run = self._run
        if run is None or run.planned is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            run.whole.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        run = self._run
        assert run is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            run.whole.load_optimizer_state(optimizer, state)
