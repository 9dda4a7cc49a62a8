"""`BatchRebalancer`: the handle on the balanced engine's policy (layer L)."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_hetero.shares.policy import BalancePolicy


class BatchRebalancer(Callback):
    """Holds the policy that re-sizes batches; without one among the Trainer's callbacks the strategy makes its own.

    Give your own to replace the policy, or switch off the one in charge (``trainer.strategy.rebalancer``) at any time,
    on all ranks, with ``enabled = False``: shares then stay unchanged.

    Args:
        policy: what decides the shares; ``None``: the strategy's.
        enabled: whether to re-size at all.
    """

    def __init__(self, policy: BalancePolicy | None = None, *, enabled: bool = True) -> None:
        self.policy = policy
        self.enabled = enabled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if stage == "fit" and getattr(strategy, "engine", None) not in ("balanced", "sharded"):
            raise TypeError(
                f"BatchRebalancer needs strategy='hetero_balanced' or 'hetero_sharded', but the Trainer has"
                f" {type(strategy).__name__}; change the strategy or remove the callback"
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full batch, as now decided; empty before training."""
        return self.policy.shares if self.policy is not None else ()
