"""One fit of a sharded model (layer L)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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

    def exchanges_gradients(self) -> bool:
        return True
