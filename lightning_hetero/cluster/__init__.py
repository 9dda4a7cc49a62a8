"""What the devices are and how they are connected, as plain values and as text (layer P).

``spec``      `cluster_from_plain`, `cluster_to_plain`: a cluster as people write it down, and as plain values
``describe``  `describe_cluster`: as text
``units``     "24 GiB", "25 Gbit/s", "50 us"
``pairing``   which ranks measure their link when, and what the other links are
``nodes``     how many processes a scheduler puts on each node
``score``     how far ranks fall behind
``what_if``   what other ways to train would give

What measures a cluster is in `lightning_hetero.measure`. Traces (`lightning_hetero.record`) can be read from here, too.
"""

from lightning_hetero.cluster.describe import describe_cluster
from lightning_hetero.cluster.spec import (
    cluster_from_plain,
    cluster_to_plain,
    equal_cluster,
    override_cluster,
)
from lightning_hetero.record import (
    SCHEMA_VERSION,
    EventWriter,
    TornTraceWarning,
    read_events,
    replay,
    trace_path,
)

__all__ = [
    "SCHEMA_VERSION",
    "EventWriter",
    "TornTraceWarning",
    "cluster_from_plain",
    "cluster_to_plain",
    "describe_cluster",
    "equal_cluster",
    "override_cluster",
    "read_events",
    "replay",
    "trace_path",
]
