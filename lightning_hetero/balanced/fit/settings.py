"""The arguments that only the strategies with balanced batches have (layer L)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_hetero.callbacks.reporting import BatchCost
from lightning_hetero.data.stream import StreamMode
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    """The strategy's own arguments; see `LoadBalancedStrategy`."""

    policy: BalancePolicy
    rebalance: bool = True
    batch_cost: BatchCost | None = None
    bounds: ShareBounds = field(default_factory=ShareBounds)
    learns: bool = False  # most samples, from the first step on
    quantum: int | Literal["auto"] = "auto"
    stream: StreamMode | None = None
    exchange_every: int | None = None
    min_ranks: int | None = None

    def without_effect(self) -> str:
        """Says which arguments were given and have no effect on equal parts; empty: none."""
        options = {"min_samples": self.bounds.lower, "max_samples": self.bounds.upper}
        options |= {"quantum": None if self.quantum in (1, "auto") else 0}
        idle = [name for name, value in options.items() if value is not None]
        return f". Without effect: {', '.join(idle)}" if idle else ""
