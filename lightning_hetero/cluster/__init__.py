"""What the devices are and how they are connected, as plain values and as text (layer P).

``spec``        `cluster_from_plain`, `cluster_to_plain`: a cluster as people write it down, and as plain values
``units``       "24 GiB", "25 Gbit/s", "50 us"; and `describe_cluster`: a cluster as text
``pairing``     what a probe measures, and what it makes of it
``score``       how far ranks fall behind, which one has become slow, what stock DDP's monitor says at a fit's end
``engine_times``  what engines take when each rank's times are given

What measures a cluster is in `lightning_hetero.measure`. Traces (`lightning_hetero.record`) can be read from here, too.
"""

from lightning_hetero.cluster.spec import cluster_from_plain, cluster_to_plain, equal_cluster, override_cluster
from lightning_hetero.cluster.units import describe_cluster
from lightning_hetero.record import SCHEMA_VERSION, EventWriter, TornTraceWarning, read_events, replay, trace_path

__all__ = [
    "SCHEMA_VERSION", "EventWriter", "TornTraceWarning", "cluster_from_plain", "cluster_to_plain", "describe_cluster",
    "equal_cluster", "override_cluster", "read_events", "replay", "trace_path",
]  # fmt: skip
