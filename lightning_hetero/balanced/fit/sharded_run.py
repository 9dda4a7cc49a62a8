"""One fit of a sharded model (layer L)."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from torch import nn

from lightning_hetero.balanced.fit.recovery import Recovery
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.balanced.fit.sharded_recovery import ShardedRecovery
from lightning_hetero.balanced.runtime.fsdp_passes import FSDPPasses


class ShardedRun(BalancedRun):
    """As `BalancedRun`, where each layer's parameters are gathered and its gradients scattered among the ranks."""

    engine = "sharded"

    def attach(self, model: nn.Module | None) -> None:
        self._passes = FSDPPasses(self.module)
        self.undo.callback(self._passes.close)
        super().attach(model)

    def make_recovery(self, *args: Any, **kwargs: Any) -> Recovery:
        made = {"passes": self._passes, "channel": self.channel, "paused": self.probe.paused}
        return ShardedRecovery(*args, **kwargs, **made)

    def void(self) -> list[Callable[[], object]]:
        self._passes.void = math.inf
        return [partial(setattr, self._passes, "void", 0.0)]

    @cached_property
    def _met(self) -> bool:
        """Whether the ranks that have an exception save; not from within a step, where parameters are gathered."""
        error = sys.exc_info()[1]
        frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error and error.__traceback__)}
        inside = not frames.isdisjoint(("training_step", "validation_step", "backward", "optimizer_step"))
        return self.meet_interrupted(10.0, f", in a step of rank {self.channel.rank}" if inside else "")

    def saves(self) -> bool:
        """Whether all ranks come to save; a collective after an exception."""
        return not self.interrupted or self._met

    def exchanges_gradients(self) -> bool:
        return True
