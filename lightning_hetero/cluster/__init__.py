"""What the devices do: measured, written down, read again.

``record``  P  `EventWriter`, `read_events`, `replay`: traces as JSON lines
``clock``   T  stopwatches for a rank's own work per step; import them from ``lightning_hetero.cluster.clock``
"""

from lightning_hetero.cluster.record import (
    SCHEMA_VERSION,
    EventWriter,
    TornTraceWarning,
    read_events,
    replay,
    trace_path,
)

__all__ = ["SCHEMA_VERSION", "EventWriter", "TornTraceWarning", "read_events", "replay", "trace_path"]
