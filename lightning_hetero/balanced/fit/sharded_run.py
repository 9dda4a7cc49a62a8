"""One fit of a sharded model (layer L)."""

from __future__ import annotations

from lightning_hetero.balanced.fit.run import BalancedRun


class ShardedRun(BalancedRun):
    """As `BalancedRun`, where each layer's parameters are gathered and its gradients scattered among the ranks."""

    engine = "sharded"

    def exchanges_gradients(self) -> bool:
        return True
