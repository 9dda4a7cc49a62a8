"""What a federated fit takes from the strategy's arguments, and what it refuses (layer L)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.refusals import Refusals
from lightning_hetero.federated.decide.policy import RoundPolicy
from lightning_hetero.federated.decide.rounds import UNCOUNTED, Client
from lightning_hetero.federated.runtime.server import ServerStep

REFUSALS = Refusals(
    no_wrapper="there is no DistributedDataParallel: ranks train apart, and their parameters are averaged",
    comm_hooks="communication hooks change DDP's all-reduce, which is not used here: ranks exchange parameters once in"
    " local_steps steps; drop them, or use strategy='hetero_balanced'",
    lbfgs="LBFGS keeps a history of steps and directions, which has no average over ranks; use another optimizer, or"
    " one device",
    sync_batch_norm="SyncBatchNorm (the Trainer's sync_batchnorm=True, or a layer of the module) makes every rank wait"
    " for all others in every local step. Set sync_batchnorm=False (in Hydra: trainer.sync_batchnorm=false): running"
    " statistics of BatchNorm are then averaged with the parameters; or use GroupNorm, or strategy='hetero_balanced'",
    zero="ZeroRedundancyOptimizer divides the optimizer's state among the ranks, which step together; here each makes"
    " its own local steps. Use the optimizer that it wraps",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FederatedSettings:
    """The strategy's own arguments; see `FederatedStrategy`."""

    local_steps: int
    policy: RoundPolicy
    min_samples: int | Sequence[int] | None
    max_samples: int | Sequence[int] | None
    server: ServerStep | None
    proximal: float
    min_clients: int | None
    liveness_s: float
    stream: Literal["finite"] | None

    def agreed(self, shared: SharedSettings, ddp: Mapping[str, Any]) -> dict[str, str]:
        """Returns what must be the same on all ranks, in words."""
        told = {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name not in ("policy", "server")}
        return {
            **told,
            "server": "None" if self.server is None else self.server.settings(),
            "global_batch_size": str(shared.global_batch_size),
            "ddp": repr(sorted(ddp.items())),
            **self.policy.settings(),
        }

    def check(self, shared: SharedSettings) -> None:
        """Refuses what would be ignored on several devices.

        Raises:
            ValueError: with the reason.
        """
        own, usual = ("min_samples", "max_samples"), {"loss_reduction": "mean", "batch_sampler": "refuse"}
        sizes = {"global_batch_size": shared.global_batch_size, **{name: getattr(self, name) for name in own}}
        idle = [name for name, value in sizes.items() if value is not None and not self.policy.resizes]
        if idle := idle + [name for name, value in usual.items() if getattr(shared, name) != value]:
            raise ValueError(
                f"FederatedStrategy(policy={type(self.policy).__name__}) would ignore {', '.join(idle)}: each rank"
                f" trains on its own loader's batches with its own loss. Drop {'it' if len(idle) == 1 else 'them'};"
                " sizes are bounded where the policy re-sizes batches ('lb-bsp', 'scaled_lr')"
            )


def check_data(clients: Sequence[Client], *, joining: bool = False, again: bool) -> bool:
    """Refuses a rank without data, and what streams cannot do; returns whether these are streams.

    Args:
        clients: what the ranks train on.
        joining: whether this rank comes into a run of others.
        again: whether the user has said that data begin again.

    Raises:
        TypeError: ranks cannot train on these streams.
        ValueError: a rank has no batch.
    """
    if streams := [rank for rank, client in enumerate(clients) if client.batches == UNCOUNTED]:
        said = "an epoch of finite streams (stream='finite') is one pass over each"
        if len(streams) < len(clients):
            raise TypeError(f"{said}, and only rank(s) {streams} have one: give all an IterableDataset, or none")
        if again:
            raise TypeError(f"{said}, which FedAvg(again=True) contradicts: use policy='fedavg'")
        if joining:
            raise TypeError(f"{said}, of which a rank that comes again has lost a part: start all ranks again")
    if empty := [rank for rank, client in enumerate(clients) if not client.batches]:
        raise ValueError(
            f"rank(s) {', '.join(map(str, empty))} have no batch of training data (samples per rank:"
            f" {[client.samples for client in clients]}): start only ranks that have data; with drop_last=True a"
            " loader with fewer samples than its batch_size has no batch"
        )
    return bool(streams)
