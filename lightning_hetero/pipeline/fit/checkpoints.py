"""Checkpoints of a model that no rank has whole (layer L)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from lightning_hetero.base.checks import naming_full_disk
from lightning_hetero.base.ddp import HeteroDDPStrategy
from lightning_hetero.base.refusals import refuse_saving_in_step
from lightning_hetero.pipeline.fit.place import RankInPlan
from lightning_hetero.pipeline.fit.run import PipelineRun
from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState, is_local, load_mapped, save_streamed
from lightning_hetero.pipeline.runtime.ownership.owner_groups import together


class WholeCheckpointsDDP(HeteroDDPStrategy[PipelineRun]):
    """Collects and divides states of the whole model; files are those that stock DDP writes, plus one key."""

    def __init__(self, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._optimizers_then: list[dict[str, Any]] = []  # the optimizers' states at the end of the last fit

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_optimizers_then": [], "_finished": {}}

    @property
    def _place(self) -> RankInPlan | None:
        """This rank's place in the plan; None as long as the module is whole."""
        return self._run.place if self._run is not None else None

    def teardown(self) -> None:
        run = self._run
        self.keep()
        if run is not None:
            failed = run.failed
            try:
                if run.fitting and not failed and run.place is not None:
                    self._keep_states(run, run.place.held.whole)
                (run.end if failed else run.close)()
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

    def _keep_states(self, run: PipelineRun, whole: WholeState) -> None:
        """Keeps what a checkpoint behind the fit takes; if that fails, the model is brought together all the same."""
        try:
            self._optimizers_then = [whole.optimizer_state(optimizer) for optimizer in self.optimizers]
            self._finished = run.state_dict()
        except Exception as error:
            rank_zero_warn(f"the optimizers' states are lost, the model is not: {type(error).__name__}: {error}")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        run = self._run
        if run is None or run.place is None:
            return super().lightning_module_state_dict()
        if run.batches is not None and run.batches.in_step:
            refuse_saving_in_step()
        whole = run.whole(look=True)
        return {} if whole is None else whole.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        own = getattr(optimizer, "_optimizer", optimizer)
        if self._run is not None and self._run.place is not None and self._run.fitting:
            whole = self._run.whole()
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
        if run is not None and run.place is not None:
            whole = run.whole()
            if whole is None:
                return
            _complete(checkpoint, whole)
        if type(self.checkpoint_io) is not TorchCheckpointIO or storage_options is not None or not is_local(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            with naming_full_disk(filepath):
                save_streamed(checkpoint, filepath)
        if run is not None and run.failed and whole is not None:
            torch.distributed.barrier(group=whole.group)  # as long as another one lives, rank 0 can write

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """After a failure no rank waits for those that may not come."""
        if self._run is None or not self._run.failed:
            super().barrier(*args, **kwargs)
            if "run-stage" in args:  # what on_fit_start has changed, before anything is run
                self._look()

    def _look(self) -> None:
        if self._run is not None and self._run.batches is not None:
            self._run.batches.look()

    def read_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Maps a local file, and does not read it into memory."""
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        stock = type(self.checkpoint_io) is TorchCheckpointIO and self.world_size > 1
        mapped = load_mapped(checkpoint_path, weights_only) if stock else None
        return super().read_checkpoint(checkpoint_path, *args, **kwargs) if mapped is None else mapped

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._place is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._place.held.whole.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._place is None:
            return super().load_optimizer_state_dict(checkpoint)
        self._look()  # on_fit_start may have made other parameter groups
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self._place.held.whole.load_optimizer_state(optimizer, state)


def _complete(checkpoint: dict[str, Any], whole: WholeState) -> None:
    """Puts tensors in a checkpoint on rank 0 where callbacks and hooks have left stand-ins; collective.

    They come from the rank that has values in the same place of its checkpoint.

    Raises:
        RuntimeError: no rank has; or the place cannot be written to.
    """
    slots = {path: slot for path, *slot in _slots(checkpoint, "")}
    found = whole.collect_apart({path: box[key] for path, (box, key) in slots.items()})
    fixed = [path for path in found if isinstance(slots[path][0], tuple)]
    with together(whole.group):
        if fixed:
            raise ValueError(f"the checkpoint's {fixed[0]} is in a tuple: use a list")
    for path, tensor in found.items():
        box, key = slots[path]
        box[key] = tensor


def _slots(box: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields where tensors are: a path, the container, and the key in it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(box, dict):
        items = box.items()
    elif isinstance(box, list | tuple):
        items = enumerate(box)
    for key, item in items:
        if isinstance(item, Tensor):
            yield f"{path}[{key!r}]", box, key
        else:
            yield from _slots(item, f"{path}[{key!r}]")
