"""What a fit takes from its strategy, fixed when it begins (layer L)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from lightning.fabric.plugins import ClusterEnvironment

from lightning_hetero.base.loaders import SharedSettings
from lightning_hetero.stale.runtime.memory.layout import CompressionName
from lightning_hetero.stale.runtime.processes.start import ServerSettings

__all__ = ["StaleSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleSettings:
    """Arguments of `BoundedStalenessStrategy`, and where this rank runs.

    Attributes:
        shared: arguments on batches.
        server: what the server's process is started with.
        compression: how gradients are sent; None: as they are.
        agreed: what must be the same on all ranks, as words.
        shares_memory: whether ranks on the server's node reach it through shared memory; else all use pairs.
        host: name under which other nodes reach this one.
        environment: tells where the ranks met at first.
        backend, timeout: of the default process group.
    """

    shared: SharedSettings
    server: ServerSettings
    compression: CompressionName | None
    agreed: Mapping[str, str]
    shares_memory: bool
    host: str
    environment: ClusterEnvironment
    backend: str
    timeout: timedelta | None

    @property
    def patience(self) -> timedelta:
        """How long to wait for others: the timeout, or torch's usual one."""
        return self.timeout or timedelta(minutes=30)
