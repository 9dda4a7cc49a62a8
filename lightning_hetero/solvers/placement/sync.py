"""Time of the gradients' synchronisation between pipelines.

A layer is owned by one device per pipeline. As borders differ from pipeline to pipeline, so do the *tuples of owners*:
a tuple changes wherever any pipeline has a border, and one all-reduce is due per tuple, of all its layers. What lies
outside of the backbone is owned by the leaders. A ring of k devices sends 2 (k - 1) / k of the bytes over its slowest
link, in 2 (k - 1) rounds; the ring goes by rank, as process groups do. A device waits for all of its tuples, one after
the other; the synchronisation ends with the device that has most to do. The ring is textbook (Patarasuk and Yuan,
*JPDC* 69(2), 2009); tuples of owners are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_hetero.solvers.chain.chain import Floats
from lightning_hetero.solvers.placement.pipes import Pipe, Problem


def sync_s(problem: Problem, pipes: Sequence[Pipe]) -> float:
    """Returns how long the synchronisation takes [s]; 0 for a single pipeline."""
    return float(sync_loads_s(problem, pipes).max()) if len(pipes) > 1 else 0.0


def sync_loads_s(problem: Problem, pipes: Sequence[Pipe]) -> Floats:
    """Returns how long each device of the cluster takes part in all-reduces [D] [s]."""
    k = len(pipes)
    starts = np.array(sorted({cut for pipe in pipes for cut in pipe.cuts[:-1]}))
    ends = np.append(starts[1:], problem.n_layers)
    size = problem.param_bytes[ends] - problem.param_bytes[starts]
    size[0] += problem.outside.param_bytes  # the first layer's owners are the leaders
    owners = np.empty((k, len(starts)), dtype=np.int64)
    for row, pipe in zip(owners, pipes, strict=True):
        row[:] = np.array(pipe.ranks)[np.searchsorted(pipe.cuts, starts, side="right") - 1]
    ring = np.sort(owners, axis=0)
    after = np.concatenate([ring[1:], ring[:1]])
    slowest_s = problem.per_byte_s[ring, after].max(axis=0)
    latency_s = problem.latency_s[ring, after].max(axis=0)
    each_s = np.where(size > 0.0, 2.0 * (k - 1) * (size / k * slowest_s + latency_s), 0.0)
    weights = np.broadcast_to(each_s, owners.shape).ravel()
    return np.bincount(owners.ravel(), weights=weights, minlength=problem.n_devices).astype(np.float64)
