"""What others leave free on this host: processors' time and memory (layer T)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

_LEAST_S = 0.05  # systems count processors' time in steps of 10 ms
_IDLE = ("idle", "iowait")
_IN_OTHERS = ("guest", "guest_nice")  # counted in user and nice as well


class Reading(NamedTuple):
    """Counters at one moment.

    Attributes:
        at_s: when, by a steady clock [s].
        cpus: the processors that this process may use.
        idle_s, total_s: of these processors together, since the host was started [s].
        own_s: of this process's threads on processors, since it was started [s].
        free_mem: part of the host's memory that is available, in [0, 1].
    """

    at_s: float
    cpus: frozenset[int]
    idle_s: float
    total_s: float
    own_s: float
    free_mem: float


def read_host() -> Reading:
    """Reads the counters of this host and this process."""
    each: list[Any] = psutil.cpu_times(percpu=True)
    cpus = _usable() or frozenset(range(len(each)))
    times = [each[cpu] for cpu in cpus if cpu < len(each)]
    idle_s = math.fsum(getattr(t, name, 0.0) for t in times for name in _IDLE)
    total_s = math.fsum(v for t in times for name, v in zip(t._fields, t, strict=True) if name not in _IN_OTHERS)
    memory = psutil.virtual_memory()
    return Reading(
        at_s=time.perf_counter(), cpus=cpus, idle_s=idle_s, total_s=total_s, own_s=time.process_time(),
        free_mem=memory.available / memory.total,
    )  # fmt: skip


class HostLoad:
    """The load since it was asked last, for a predictor that wants it.

    The processors are those that this process may use, by its affinity. Idle is free, waiting for storage too, and
    what this process used itself. Others that compute there leave less: other ranks, and this rank's data-loading
    processes. Limits on a container's processor time are not seen.

    Args:
        read: the counters; injectable for tests.
    """

    def __init__(self, read: Callable[[], Reading] = read_host) -> None:
        self._read = read
        self._last = read()
        self._free = (math.nan, self._last.free_mem)

    def free(self) -> tuple[float, float]:
        """Returns the free part of the processors' time and of the memory, each in [0, 1]; NaN: not known yet.

        Asked again within 50 ms, it answers the same: systems count in steps of 10 ms.
        """
        last = self._last
        if time.perf_counter() - last.at_s < _LEAST_S:
            return self._free
        self._last = now = self._read()
        total_s = now.total_s - last.total_s
        free_cpu = math.nan
        if now.cpus == last.cpus and total_s > 0.0:
            free_s = now.idle_s - last.idle_s + now.own_s - last.own_s
            free_cpu = min(max(free_s / total_s, 0.0), 1.0)
        self._free = free_cpu, min(max(now.free_mem, 0.0), 1.0)
        return self._free


def _usable() -> frozenset[int]:
    """Returns the processors this process may run on; empty where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(os.getpid())) if affinity is not None else frozenset()
