"""Emulated links of a described cluster: what the ranks' own messages do not take, they sleep (layer L)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightning_hetero.pipeline.decide.wire_times import parcels_s, sums_s

if TYPE_CHECKING:
    from lightning_hetero.pipeline.fit.place import Place
    from lightning_hetero.pipeline.runtime.ownership.migration import Migration

__all__ = ["slow_down"]


def slow_down(place: Place) -> None:
    """Lets sums of gradients and layers that move take the time they would on the links of the plan's cluster.

    Args:
        place: of this rank, from now on.
    """
    finish_sums, stage = place.finish_sums, place.stage

    def finished() -> None:
        finish_sums()
        time.sleep(sums_s(place.planned.cluster, place.held.sync.sizes_bytes(), place.fixed.channel.rank))

    def staged(migration: Migration, ticket: object) -> None:
        began_s = time.monotonic()
        stage(migration, ticket)
        needed_s = parcels_s(place.planned.cluster, migration.sent_bytes)
        time.sleep(max(0.0, began_s + needed_s - time.monotonic()))

    place.finish_sums, place.stage = finished, staged
