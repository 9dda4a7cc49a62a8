"""What the devices are and what they do: described, measured, written down, read again.

``spec``     P  `cluster_from_plain`, `cluster_to_plain`, `describe_cluster`: a cluster as plain values and as text
``units``    P  "24 GiB", "25 Gbit/s", "50 us"
``pairing``  P  which ranks measure their link when, and what the other links are
``record``   P  `EventWriter`, `read_events`, `replay`: traces as JSON lines
``score``    P  how far ranks fall behind
``probe``    T  `probe_cluster`: speeds, memory and links at start-up; import it from ``lightning_hetero.cluster.probe``
``timer``    T  time stamps on a device that is measured
``cache``    T  measurements kept between runs
``clock``    T  stopwatches for a rank's own work per step; import them from ``lightning_hetero.cluster.clock``
"""

from lightning_hetero.cluster.record import (
    SCHEMA_VERSION,
    EventWriter,
    TornTraceWarning,
    read_events,
    replay,
    trace_path,
)
from lightning_hetero.cluster.spec import (
    cluster_from_plain,
    cluster_to_plain,
    describe_cluster,
    equal_cluster,
    override_cluster,
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
