"""What a federated fit takes from the strategy's arguments (layer L)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hetero.base.loaders import SharedSettings
from lightning_hetero.federated.decide.policy import RoundPolicy
from lightning_hetero.federated.runtime.server import ServerOptimizer

__all__ = ["FederatedSettings", "OptimizerStates", "WeightBy"]

OptimizerStates = Literal["average", "keep", "reset"]
WeightBy = Literal["used", "owned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FederatedSettings:
    """The strategy's own arguments; see `FederatedStrategy`."""

    local_steps: int
    policy: RoundPolicy
    min_samples: int | Sequence[int] | None
    max_samples: int | Sequence[int] | None
    weight_by: WeightBy
    optimizer_state: OptimizerStates
    server: ServerOptimizer | None
    proximal: float
    participation: float
    min_clients: int | None
    liveness_s: float

    def agreed(self, shared: SharedSettings, ddp_arguments: Mapping[str, Any]) -> dict[str, str]:
        """Returns what must be the same on all ranks, in words."""
        return {
            "local_steps": str(self.local_steps),
            "min_samples": repr(self.min_samples),
            "max_samples": repr(self.max_samples),
            "weight_by": self.weight_by,
            "optimizer_state": self.optimizer_state,
            "server": "None" if self.server is None else self.server.settings(),
            "proximal": repr(self.proximal),
            "participation": repr(self.participation),
            "min_clients": repr(self.min_clients),
            "liveness_s": repr(self.liveness_s),
            "global_batch_size": str(shared.global_batch_size),
            "ddp": repr(sorted(ddp_arguments.items())),
            **self.policy.settings(),
        }

    def check(self, shared: SharedSettings) -> None:
        """Refuses what would be ignored on several devices.

        Raises:
            ValueError: with the reason.
        """
        idle: list[str] = []
        if not self.policy.resizes:
            given = {
                "global_batch_size": shared.global_batch_size,
                "min_samples": self.min_samples,
                "max_samples": self.max_samples,
            }
            idle = [name for name, value in given.items() if value is not None]
        if self.weight_by == "owned" and shared.batch_weight is not None:
            idle.append("batch_weight")
        if shared.loss_reduction != "mean":
            idle.append("loss_reduction")
        if shared.batch_sampler != "refuse":
            idle.append("batch_sampler")
        if idle:
            raise ValueError(
                f"FederatedStrategy(policy={type(self.policy).__name__}) would ignore {', '.join(idle)}: each rank"
                f" trains on its own loader's batches with its own loss. Drop {'it' if len(idle) == 1 else 'them'};"
                " sizes are bounded where the policy re-sizes batches ('lb-bsp', 'scaled_lr')"
            )
