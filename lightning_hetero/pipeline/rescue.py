"""A checkpoint after an exception: all ranks are needed for it, and they come when they hear of the failure (layer L).

`OnExceptionCheckpoint` and ``ModelCheckpoint(save_on_exception=True)`` save on each rank that has an exception, before
the strategy learns of it. The first one reports it here; the others get an exception by that and come to save, too.
What was under way between them stays as it is: they meet in a new process group.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_hetero.pipeline.whole import WholeState

if TYPE_CHECKING:
    from lightning_hetero.pipeline.run import PipelineRun

__all__ = ["Rescue"]

PATIENCE_S = 60.0  # how long the others may compute before they look for messages


class Rescue:
    """Decides how a run's checkpoints are collected, during training and after an exception.

    Args:
        run: with its layers divided.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._asked = False
        self._whole: WholeState | None = None

    def whole(self) -> WholeState | None:
        """Returns what collects the model; None if ranks are missing after an exception. Collective, if all come."""
        run = self._run
        if run.trainer.state.status != TrainerStatus.INTERRUPTED or run.channel.world_size == 1:
            return run.whole
        if not self._asked:
            self._asked = True
            self._whole = self._meet()
        return self._whole

    def _meet(self) -> WholeState | None:
        run, timeout = self._run, self._run.strategy.timeout
        run.fail(sys.exc_info()[1] or RuntimeError("interrupted"))
        here = f"epoch {run.trainer.current_epoch}, {run.trainer.global_step} optimizer steps"
        patience_s = PATIENCE_S if timeout is None else min(PATIENCE_S, timeout.total_seconds())
        places = run.failures.meet(here, run.channel.world_size, patience_s)
        missing = [rank for rank, place in enumerate(places) if not place]
        if missing or len(set(places)) > 1:
            why = f"rank(s) {missing} did not come to save" if missing else f"the ranks stand at {places}"
            rank_zero_warn(f"no checkpoint is written after the exception: {why}, and each holds a part of the model")
            return None
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return WholeState(run.module, run.ownership, group=group, folder=run.whole.folder)
