"""One fit of a sharded model (layer L)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning_hetero.balanced.fit.run import BalancedRun


class ShardedRun(BalancedRun):
    """As `BalancedRun`, where each layer's parameters are gathered and its gradients scattered among the ranks."""

    engine = "sharded"

    def exchanges_gradients(self) -> bool:
        return True

    def dummy_guard(self) -> AbstractContextManager[Any]:
        self.probe.start()  # nobody else says so: a step of Lightning's does not call the module itself
        return super().dummy_guard()
