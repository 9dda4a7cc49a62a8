"""What no plan can be faster than, whatever the devices' groups, orders, borders and shares.

For G groups, with F the speed of all devices used, f of the fastest, and w(n) the least work of n samples:

    work     F T >= w(N): no device does more than its speed allows.
    fill     T_g >= fill_g + (m - 1) period_g, where a fill is at least one micro-batch's work on the fastest device and
             a period its work over the group's speed. Summed up: F T >= w(N) + w(least micro-batch) * (F / f - G).
    owners   a layer has G owners: T >= its work for all samples / speed of the G fastest. Likewise for the leaders.
    crowd    a device holds neighbouring layers that fit it, so it does their work for N samples at most.
    sync     all parameters go around G owners: the mean over devices is no more than the longest.

Memory bounds G: all replicas together must fit all devices. The bound is the least over the G that are left.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_hetero.solvers.chain.layers import Ints
from lightning_hetero.solvers.placement.pipes import Problem

__all__ = ["lower_bound_s"]

_LENIENT = 1.0 - 1e-9


def lower_bound_s(problem: Problem, most_groups: int) -> float:
    """Returns a time of the global batch that no plan with at most ``most_groups`` groups is below [s].

    ``inf`` if not even one replica fits all devices together. O(G + D log D + L).
    """
    samples, speeds = problem.samples, np.sort(problem.speeds)[::-1]
    all_speed, fastest = float(speeds.sum()), float(speeds[0])
    fixed_s, per_sample_s = (float(v) for v in problem.work_s[:, -1] + problem.leader_s)
    biggest = min(problem.sizes[-1], samples)
    batches = -(-samples // biggest)  # in all groups together, at least
    layers = np.diff(problem.work_s, axis=1)
    alone_s = max(
        float((batches * layers[0] + samples * layers[1]).max()), float(problem.leader_s @ [batches, samples])
    )
    owners = np.cumsum(speeds)
    replica_bytes = float(problem.state_bytes[-1] + problem.activation_bytes[-1])
    replica_bytes += problem.leader_state_bytes + problem.leader_activation_bytes
    fits = float(problem.caps.sum()) / replica_bytes if replica_bytes > 0.0 else math.inf
    most_groups = min(most_groups, samples, len(speeds), int(min(fits * (2.0 - _LENIENT), len(speeds))))
    if most_groups < 1:
        return math.inf
    crowd_s = _crowd_s(problem, batches * fixed_s + samples * per_sample_s)
    off_diagonal = problem.per_byte_s[~np.eye(len(speeds), dtype=bool)]
    per_byte_s = float(off_diagonal.min()) if off_diagonal.size else 0.0
    params = float(problem.param_bytes[-1]) + problem.leader_param_bytes
    best_s = math.inf
    for groups in range(1, most_groups + 1):
        # Where there are several, one may get less than a full micro-batch.
        one_s = fixed_s + (min(problem.sizes[0], samples) if groups == 1 else 1) * per_sample_s
        work = max(batches, groups) * fixed_s + samples * per_sample_s
        # With some devices at rest F is smaller: the bound is monotone in F on either side of G f.
        used = {all_speed, min(all_speed, groups * fastest)}
        time_s = min([(work + one_s * max(0.0, speed / fastest - groups)) / speed for speed in used])
        time_s = max(time_s, crowd_s, alone_s / float(owners[groups - 1]), one_s / fastest)
        wire_s = 2.0 * (groups - 1) * params * per_byte_s / len(speeds) * (1.0 - problem.sync_overlap)
        best_s = min(best_s, time_s + wire_s)
    return best_s * _LENIENT


def _crowd_s(problem: Problem, work: float) -> float:
    """Returns the least T with sum over devices of min(T speed, N most_work) >= work."""
    samples = problem.samples
    weight = problem.state_bytes + problem.activation_bytes  # one sample in flight at least
    most = np.full(problem.n_devices, work)
    caps: list[float] = np.unique(problem.caps[np.isfinite(problem.caps)]).tolist()
    for cap in caps:
        ends: Ints = np.searchsorted(weight, weight + cap * (2.0 - _LENIENT), side="right") - 1
        # Fixed costs are paid once per micro-batch, of one sample at least.
        held = samples * float(
            (problem.work_s[:, ends] - problem.work_s).sum(axis=0).max() + problem.leader_s.sum()
        )
        most[problem.caps == cap] = min(held, work)
    if float(most.sum()) < work * _LENIENT:
        return math.inf
    full_s = most / problem.speeds
    order = np.argsort(full_s, kind="stable")
    held = np.concatenate([[0.0], np.cumsum(most[order])])[:-1]
    free = np.cumsum(problem.speeds[order][::-1])[::-1]
    done = held + full_s[order] * free
    i = min(int(np.searchsorted(done, work * _LENIENT)), len(order) - 1)
    return float((work - held[i]) / free[i])
