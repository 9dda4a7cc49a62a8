"""Pipelines that do not wait for one another, after HetPipe (Park et al., ATC 2020); no torch.

*Virtual workers* of equal composition, each a pipeline with uneven cuts, exchange weights once per *wave* and may be
some waves apart. A device never waits at the end of a batch, so a global batch takes its samples over the sum of all
workers' rates. That is more than HetPipe can do: nobody is ever held back because another one is too many waves behind,
weights travel for nothing, and several versions of them need no memory. And it is other mathematics: gradients of
weights that are waves old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.joint.scenarios import SAMPLES
from benchmarks.joint.simulated.machine import Machine
from benchmarks.joint.simulated.traces import Phase
from lightning_hetero.solvers.chain.model import evaluate
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.types import Cluster

_WORKERS, _SIZES = (1, 2, 4), (1, 2, 4, 8, 16)


def waves_s(machine: Machine, phases: Sequence[tuple[Phase, int]]) -> float:
    """Returns the mean time of a global batch, of the best number of workers and size of micro-batches [s]."""
    nominal = _problem(machine, machine.cluster)
    problems = [(_problem(machine, machine.cluster_in(phase)), n) for phase, n in phases]
    found: list[float] = []
    for workers in [n for n in _WORKERS if n <= nominal.n_devices]:
        groups = _dealt(nominal, workers)
        for size in _SIZES:
            samples = SAMPLES // workers
            pipes = [nominal.split(ranks, size, samples) for ranks in groups]
            fitting = [pipe for pipe in pipes if pipe is not None]
            if len(fitting) == workers:
                times = [n * _batch_s(problem, fitting, size) for problem, n in problems]
                found.append(sum(times) / sum(n for _, n in problems))
    return min(found, default=math.nan)


def _dealt(problem: Problem, n: int) -> list[tuple[int, ...]]:
    """Deals the devices by speed, forth and back, to n groups."""
    hands: list[list[int]] = [[] for _ in range(n)]
    for i, rank in enumerate(sorted(range(problem.n_devices), key=lambda r: (-problem.speeds[r], r))):
        lap, place = divmod(i, n)
        hands[place if lap % 2 == 0 else n - 1 - place].append(rank)
    return sorted(tuple(sorted(hand)) for hand in hands)


def _problem(machine: Machine, cluster: Cluster) -> Problem:
    capped = any(device.mem_bytes < math.inf for device in cluster.devices)
    return Problem(machine.model, cluster, SAMPLES, _SIZES, depth="low_memory" if capped else "per_link")


def _batch_s(problem: Problem, pipes: Sequence[Pipe], size: int) -> float:
    """Returns the samples of a global batch over those per second of all pipelines, once they are full [s]."""
    periods_s = [evaluate(problem.chain(pipe.ranks, size, problem.samples), pipe.cuts).period_s for pipe in pipes]
    per_s = sum(size / period_s for period_s in periods_s)
    return problem.samples / per_s if per_s > 0.0 else math.inf
