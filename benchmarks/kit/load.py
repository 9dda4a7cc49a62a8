"""What else the machine does: programs that want a processor besides this one."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

MOST = 1.5
"""Others at work, on average, with which a committed result is not replaced."""
PATIENCE_S = 300.0
_LOOKS, _PAUSE_S = 20, 0.1


def others(looks: int = _LOOKS, sleep: Callable[[float], None] = time.sleep) -> float:
    """Returns how many tasks besides this one ran or wanted to run, on average over two seconds.

    The load average forgets slowly: behind a benchmark it would still count that benchmark's own ranks. Where the
    system does not tell what runs now, it is the load average all the same.
    """
    counts: list[int] = []
    for _ in range(looks):
        try:
            running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
        except (OSError, IndexError):
            return os.getloadavg()[0]
        counts.append(max(0, int(running) - 1))
        sleep(_PAUSE_S)
    return statistics.fmean(counts)


def quiet(look: Callable[[], float] = others, patience_s: float = PATIENCE_S) -> float:
    """Waits, for a while, until the machine is quiet enough; returns the last `others`."""
    until_s, load = time.monotonic() + patience_s, look()
    while load > MOST and time.monotonic() < until_s:
        print(f"waiting: {load:.1f} other tasks at work, at most {MOST:g} are allowed", flush=True)
        time.sleep(10.0)
        load = look()
    return load
