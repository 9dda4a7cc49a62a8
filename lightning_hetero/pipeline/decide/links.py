"""Links between ranks: which stay on the devices, and how long messages were on them (layer P)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

MOST_COMMUNICATORS = 6
"""That a rank usually has: to and from each of two neighbours, and of two sets of owners of the same layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """What a rank computes on.

    Attributes:
        identity: of the device, the same for two ranks that share it; empty: it has no separate memory (a CPU).
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


# ---- how long messages were on the wire, by two clocks that nothing has set ------------------------------------
#
#     sender      ready at s, its clock  ────────►  arrived at a, the receiver's clock       a - s  =  wire + offset
#     the way back                       ◄────────                                           a - s  =  wire - offset
#
# A message is stamped when it is ready to go, so that waiting for the sender's computation counts nowhere. It counts if
# it found the way empty; one that had to queue behind another is left out: it is not known how long it lay where.
#
# No message comes before it was sent, so each one bounds the offset of the clocks, from above on one side, from below
# on the other; each side tells its bound with every message that it sends. Where 0 lies between the bounds the clocks
# are one, as on one machine: then times are exact. Else the offset is taken to be in the middle: the sum of both
# directions is exact, and how it divides is as sure as the fastest message either way was fast. Old bounds give way as
# clocks may drift.
#
# Of a batch the faster half of the messages is taken: a thread that gets its turn late makes a few look slower.

_DRIFT = 1e-4  # of two clocks, at most: quartz drifts by a few 1e-5, and may be corrected
_KEPT = 256  # messages, if they are not asked for


class LinkClock:
    """Times what one rank receives from one other; all times in seconds.

    Attributes:
        least_s: what a message from there seems to take at least, by both clocks; to be sent to the other side.

    >>> clock = LinkClock()
    >>> clock.came(sent_s=10.0, back_s=0.3, arrived_s=10.5, size_bytes=100)  # 0.3: the way back, as seen there
    >>> clock.came(sent_s=10.4, back_s=0.3, arrived_s=11.0, size_bytes=100)  # sent before the first had come
    >>> clock.take()
    (1, 100.0, 0.5)
    >>> clock = LinkClock()
    >>> clock.came(sent_s=112.0, back_s=100.4, arrived_s=12.3, size_bytes=100)  # the other clock is 100 s ahead
    >>> round(clock.take()[2], 6)
    0.35
    """

    __slots__ = ("_busy_s", "_last_s", "_took", "least_s")

    def __init__(self) -> None:
        self.least_s = math.inf
        self._last_s = 0.0
        self._busy_s = -math.inf  # when the last message had arrived
        self._took: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def came(self, *, sent_s: float, back_s: float, arrived_s: float, size_bytes: int, waited: bool = True) -> None:
        """Takes note of a message.

        Args:
            sent_s: when it was ready to go, by the sender's clock.
            back_s: the sender's `least_s` of the way back; infinite: nothing has gone that way.
            arrived_s: by this rank's clock.
            size_bytes: of it.
            waited: it was waited for until then. Else it had come at some time before, and is left out.
        """
        seems_s = arrived_s - sent_s
        self.least_s = min(self.least_s + _DRIFT * abs(arrived_s - self._last_s), seems_s)
        self._last_s = arrived_s
        offset_s = 0.0 if self.least_s >= 0.0 and back_s >= 0.0 else 0.5 * (self.least_s - back_s)
        if waited and math.isfinite(back_s) and sent_s + offset_s >= self._busy_s:
            self._took.append((max(seems_s - offset_s, 0.0), size_bytes))
        self._busy_s = arrived_s

    def take(self) -> tuple[int, float, float]:
        """Returns messages, their bytes and seconds since it was last asked: of the faster half of those timed."""
        took, self._took = self._took, deque(maxlen=_KEPT)
        found = sorted(took, key=lambda one: one[0] / max(one[1], 1))[: (len(took) + 1) // 2]
        return len(found), float(sum(size for _, size in found)), sum(seconds for seconds, _ in found)
