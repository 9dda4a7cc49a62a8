"""Seeds of very many groups, judged by a few of their groups.

All seeds are judged by one group, the better ones by more, and all groups are planned of the best only: successive
halving (Karnin, Koren and Somekh, *ICML* 2013), here without chance. The groups are chosen evenly by speed; each stands
for those next to it. Where all devices differ, that takes hundreds of splits in place of thousands. A seed with a group
that does not fit may pass until all its groups are planned; then the next one takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lightning_hetero.solvers.chain.layers import Ints
from lightning_hetero.solvers.placement.order import Planned
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.seeds import Groups
from lightning_hetero.solvers.placement.shares import level
from lightning_hetero.solvers.placement.sync import sync_s

__all__ = ["FIRST", "drafted", "in_full", "sampled_s"]

FIRST = 1  # groups planned of every seed
_MORE = 4  # then of the better seeds
_EFFORT, _LEAST = 2500, 2  # devices in all seeds that are planned in full, and the fewest such seeds
_KEPT = 4  # better seeds for each that is planned in full


def in_full(
    ranked: Sequence[Groups],
    devices: int,
    sampled: Callable[[Groups, int], float],
    whole: Callable[[Groups], float],
) -> list[tuple[float, Groups]]:
    """Returns the times [s] of the best seeds, all their groups planned, the best first.

    Args:
        ranked: the best first, as judged by `FIRST` groups.
        devices: of the cluster: the more there are, the fewer seeds are planned in full.
        sampled: time of a seed, judged by so many groups [s].
        whole: time of a seed, all groups planned; ``inf``: one does not fit [s].
    """
    most = max(_LEAST, _EFFORT // devices)
    kept, rest = ranked[: _KEPT * most], ranked[_KEPT * most :]
    again = sorted([(sampled(groups, _MORE), groups) for groups in kept])
    found: list[tuple[float, Groups]] = []
    for groups in [*(groups for time_s, groups in again if time_s < math.inf), *rest]:
        if (time_s := whole(groups)) < math.inf:
            found.append((time_s, groups))
        if len(found) == most:
            break
    return sorted(found)


def sampled_s(
    problem: Problem, groups: Groups, plan: Callable[[tuple[int, ...]], Planned | None], count: int
) -> float:
    """Returns about what the groups take together [s]; ``inf`` if one of those that are planned does not fit.

    Args:
        problem: what is planned.
        groups: ranks by group.
        plan: plans a group; None: it does not fit.
        count: most groups that are planned.
    """
    by_speed = sorted(groups, key=lambda group: (float(problem.speeds[list(group)].sum()), group))
    count = min(count, len(groups))
    planned = [plan(by_speed[(2 * i + 1) * len(groups) // (2 * count)]) for i in range(count)]
    costs = [problem.cost(one.pipe) for one in planned if one is not None]
    if len(costs) < count:
        return math.inf
    stand_ins = [costs[i * count // len(groups)] for i in range(len(groups))]
    time_s = level(stand_ins, problem.samples)
    return time_s + sync_s(problem, [drafted(problem, group) for group in groups]) if time_s < math.inf else time_s


def drafted(problem: Problem, group: tuple[int, ...]) -> Pipe:
    """Returns a pipeline by rank whose borders divide the layers, one or more per stage, roughly by speed."""
    place = np.arange(len(group) + 1)
    speeds = np.concatenate([[0.0], np.cumsum(problem.speeds[list(group)])])
    wanted: Ints = np.rint(speeds / speeds[-1] * problem.n_layers).astype(np.int64)
    latest = problem.n_layers - len(group) + place
    cuts: Ints = np.maximum.accumulate(np.minimum(wanted, latest) - place) + place
    return Pipe(group, tuple(cuts.tolist()))
