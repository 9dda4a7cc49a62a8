"""Between which ranks of a plan messages may stay on the devices, past the hosts' memory (layer P)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MOST_COMMUNICATORS", "RankDevice", "direct_pairs", "neighbours"]

MOST_COMMUNICATORS = 6
"""That a rank usually has: to and from each of two neighbours, and of two sets of owners of the same layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """What a rank computes on.

    Attributes:
        identity: of the device, the same for two ranks that share it; empty: it has no memory of its own (a CPU).
        backend: of process groups on it, e.g. ``nccl``; empty: one that wants host memory.
    """

    identity: str
    backend: str


def neighbours(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the pairs of ranks that send one another messages, in both directions, sorted.

    >>> neighbours([(0, 2, 1), (3,)])
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    >>> neighbours([(1, 0)])
    [(0, 1), (1, 0)]
    """
    rings = [(a, b) for ranks in groups if len(ranks) > 1 for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
    return sorted({pair for a, b in rings for pair in ((a, b), (b, a))})


def direct_pairs(devices: Sequence[RankDevice], groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the pairs of `neighbours` of which each rank has a device to itself, and both the same backend.

    Ranks that share a device take turns on it: a transfer in which one waits for the other would wait for its own turn.

    Args:
        devices: by rank.
        groups: of the plan.

    >>> own = [RankDevice(identity=f"gpu-{rank}", backend="nccl") for rank in range(3)]
    >>> direct_pairs([*own, own[0]], [(0, 1), (1, 2)])
    [(1, 2), (2, 1)]
    """
    users = Counter(device.identity for device in devices)

    def fit(rank: int) -> bool:
        device = devices[rank]
        return bool(device.identity and device.backend) and users[device.identity] == 1

    return [(a, b) for a, b in neighbours(groups) if fit(a) and fit(b) and devices[a].backend == devices[b].backend]
