"""Groupings to start a search from.

Three ways to make G groups of equal speed, each the best somewhere: cut a chain of nearest neighbours (fast links
inside of groups), deal by speed in a snake (groups alike), or both: deal inside of each island. Then every device
alone, which is plain data parallelism, and all of it again with only a part of the devices: the fastest, or one
island. Where memory is short, groups of equal speed may not hold a model: then the chain is also cut into pieces of
equal memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.order import nearest_chain
from lightning_hetero.solvers.placement.pipes import Problem

__all__ = ["Groups", "as_groups", "clusters", "counts", "dealt", "fastest", "islands", "neighbours", "subsets"]

Groups = tuple[tuple[int, ...], ...]
"""Ranks by group, each sorted, and the groups by their first rank."""

_APART = 2.0  # links that are so many times slower separate islands


def counts(most: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, ... up to ``most``, which is included.

    >>> counts(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    steps = {most, *(1 << k for k in range(most.bit_length())), *(3 << k for k in range(most.bit_length()))}
    return sorted(n for n in steps if n <= most)


def as_groups(groups: Sequence[Sequence[int]]) -> Groups:
    """Returns groups in their one normal form."""
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group)))


def neighbours(problem: Problem, ranks: Sequence[int], far_s: Floats) -> tuple[int, ...]:
    """Returns the chain of nearest neighbours from the fastest device on."""
    return nearest_chain(problem, ranks, min(ranks, key=lambda r: (-problem.speeds[r], r)), far_s)


def clusters(problem: Problem, chain: Sequence[int], n: int, *, by: Floats | None = None) -> Groups:
    """Cuts a chain of neighbours into n pieces of about equal speed, or of what ``by`` says of each device."""
    weights = (problem.speeds if by is None else by)[list(chain)]
    middles = np.cumsum(weights) - 0.5 * weights
    places = np.minimum((middles / float(weights.sum()) * n * (1.0 + 1e-12)).astype(np.int64), n - 1)
    pieces: list[list[int]] = [[] for _ in range(n)]
    into: list[int] = places.tolist()
    for rank, place in zip(chain, into, strict=True):
        pieces[place].append(rank)
    return as_groups(pieces)


def dealt(problem: Problem, parts: Sequence[Sequence[int]], n: int) -> Groups:
    """Deals the devices of each part by speed, forth and back, to its share of the n groups, one group at least."""
    speeds = [float(problem.speeds[list(part)].sum()) for part in parts]
    shares = apportion(speeds, n, lower=1, upper=[len(part) for part in parts]).shares
    groups: list[list[int]] = []
    for part, share in zip(parts, shares, strict=True):
        hands: list[list[int]] = [list[int]() for _ in range(share)]
        for i, rank in enumerate(fastest(problem, part, len(part))):
            lap, place = divmod(i, share)
            hands[place if lap % 2 == 0 else share - 1 - place].append(rank)
        groups += hands
    return as_groups(groups)


def fastest(problem: Problem, ranks: Sequence[int], n: int) -> list[int]:
    """Returns the n fastest, of equal ones those with most memory, then of lowest rank."""
    return sorted(ranks, key=lambda r: (-problem.speeds[r], -problem.caps[r], r))[:n]


def islands(problem: Problem, far_s: Floats) -> list[list[int]]:
    """Returns the devices in parts between which all links are slow; a single part if there is no such gap.

    Single linkage: the tree of shortest links, cut where lengths jump most.
    """
    n = problem.n_devices
    lengths, parents = far_s[0].copy(), np.zeros(n, dtype=np.int64)
    outside = np.ones(n, dtype=bool)
    outside[0] = False
    tree: list[tuple[float, int, int]] = []
    while outside.any():
        i = int(np.argmin(np.where(outside, lengths, np.inf)))
        outside[i] = False
        tree.append((float(lengths[i]), int(parents[i]), i))
        closer = outside & (far_s[i] < lengths)
        lengths[closer], parents[closer] = far_s[i][closer], i
    tree.sort()
    ratios = [b / max(a, 1e-300) for (a, _, _), (b, _, _) in pairwise(tree)]
    if not ratios or max(ratios) < _APART:
        return [list(range(n))]
    part = list(range(n))
    for _, a, b in tree[: int(np.argmax(ratios)) + 1]:
        old, new = max(part[a], part[b]), min(part[a], part[b])
        part = [new if p == old else p for p in part]
    return [[r for r in range(n) if part[r] == p] for p in sorted(set(part))]


def subsets(problem: Problem, parts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yields the fastest three quarters, half and quarter of the devices, and single islands, the fastest first."""
    everyone = range(problem.n_devices)
    for quarters in (3, 2, 1):
        yield sorted(fastest(problem, everyone, max(1, problem.n_devices * quarters // 4)))
    if len(parts) > 1:
        yield from sorted(
            [list(part) for part in parts], key=lambda part: (-float(problem.speeds[part].sum()), part[0])
        )[:3]
