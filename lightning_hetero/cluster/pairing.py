"""What a probe measures and what it makes of it: links by pairs of ranks, and memory (layer P).

All links of n ranks are n (n - 1) / 2 meetings of two. In a round every rank meets at most one other, so that no
measurement disturbs another at its ends: the round-robin tournament (circle method, textbook) needs n - 1 rounds. For
many ranks that takes too long, and links between the same two hosts are equal: then all pairs within each host meet,
one rank per host meets those of other hosts, and among very many only those at distances 1, 2, 4, ... do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median, median_high, median_low
from typing import TypeAlias

from lightning_hetero.types import Link

Pair: TypeAlias = tuple[int, int]

_PART = 0.9  # of free memory: pieces between tensors that are of no use
_WORKSPACE_BYTES = 0.5 * 2.0**30  # of cuBLAS, cuDNN and the like, and what a step needs for a moment


def tournament(players: Sequence[int]) -> list[list[Pair]]:
    """Returns rounds of disjoint pairs in which every two players meet exactly once.

    n - 1 rounds for an even number n of players, n for an odd one, in each of which another player has a break.

    >>> tournament([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*players, None] if len(players) % 2 else [*players]
    rounds: list[list[Pair]] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        across = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in across if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]  # the first keeps the seat, the others move up by one
    return rounds


def meetings(hosts: Sequence[str], *, all_up_to: int = 16) -> list[list[Pair]]:
    """Returns the rounds in which ranks measure their links; the pairs of a round are disjoint.

    Args:
        hosts: name of each rank's host, by rank.
        all_up_to: with at most so many ranks all pairs meet; with at most so many hosts one rank of each meets one of
            every other host.

    Returns:
        Rounds of pairs (a, b), a < b. The pairs join all ranks, directly or through others.
    """
    n = len(hosts)
    if n <= all_up_to:
        return [pairs for pairs in tournament(range(n)) if pairs]  # one rank meets nobody
    local: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        local.setdefault(host, []).append(rank)
    inside = [_few(ranks, all_up_to) for ranks in local.values()]
    depth = max(map(len, inside))
    rounds = [[pair for host in inside if turn < len(host) for pair in host[turn]] for turn in range(depth)]
    first = [ranks[0] for ranks in local.values()]
    return [pairs for pairs in rounds + _few(first, all_up_to) if pairs]


def _few(ranks: Sequence[int], all_up_to: int) -> list[list[Pair]]:
    """All pairs of a few ranks; of many those at distances 1, 2, 4, ...: 2 log2(n) rounds instead of n."""
    n = len(ranks)
    if n <= all_up_to:
        return tournament(ranks)
    rounds: list[list[Pair]] = []
    distance = 1
    while distance < n:
        for parity in (0, 1):
            starts = [i for i in range(n - distance) if i // distance % 2 == parity]
            rounds.append([(ranks[i], ranks[i + distance]) for i in starts])
        distance *= 2
    return [pairs for pairs in rounds if pairs]


def level(values: Sequence[float], tolerance: float) -> list[float]:
    """Returns the values with those that differ by noise only made equal: equal hardware gets equal plans.

    In ascending order a value joins the group of the one before while it is at most ``1 + tolerance`` times the group's
    least; each becomes its group's median. Values are >= 0 or ``inf``.

    >>> level([1.0, 0.52, 0.98, 0.5], 0.05)
    [0.99, 0.51, 0.99, 0.51]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    levelled = list(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] > values[order[start]] * (1.0 + tolerance):
            group = order[start:end]
            middle = median([values[i] for i in group])
            for i in group:
                levelled[i] = middle
            start = end
    return levelled


def complete_links(
    measured: Mapping[Pair, Link], hosts: Sequence[str], *, wired: Collection[str] = (), tolerance: float = 0.0
) -> tuple[tuple[Link, ...], ...]:
    """Returns the whole matrix of links from those that were measured, which are noisy and need not be all.

    Links from one host to another share a network, those inside a host without ``wired`` devices its memory: each such
    class gets the median of what was measured of it. A class that was not measured is taken for the slower of what the
    one host sends and what the other receives.

    Args:
        measured: by (from, to).
        hosts: name of each rank's host, by rank.
        wired: hosts whose devices are joined by separate wires (GPUs), so that each link inside has its own value;
            those that differ by less than ``tolerance`` are made equal, see `level`, and those not measured get the
            median of the others.
        tolerance: relative.

    Raises:
        ValueError: nothing is known about the links of a host.
    """
    classes: dict[tuple[str, str], list[Link]] = {}
    for (a, b), link in measured.items():
        classes.setdefault((hosts[a], hosts[b]), []).append(link)
    shared = {ends: _middle(links) for ends, links in classes.items()}

    def of_class(a: str, b: str) -> Link:
        if (a, b) not in shared:
            sent = [link for (x, y), links in classes.items() if x == a != y for link in links]
            received = [link for (x, y), links in classes.items() if x != b == y for link in links]
            if a == b or not (sent and received):
                raise ValueError(f"no link from host {a!r} to host {b!r} was measured, nor any to compare it with")
            ends = _middle(sent), _middle(received)
            shared[a, b] = _link(min(end.bandwidth_bytes_per_s for end in ends), max(end.latency_s for end in ends))
        return shared[a, b]

    inside = {(a, b): link for (a, b), link in measured.items() if hosts[a] == hosts[b] and hosts[a] in wired}
    rates = level([link.bandwidth_bytes_per_s for link in inside.values()], tolerance)
    waits = level([link.latency_s for link in inside.values()], tolerance)
    own = dict(zip(inside, map(_link, rates, waits), strict=True))
    n, free = len(hosts), Link()
    return tuple(
        tuple(free if a == b else own.get((a, b)) or of_class(hosts[a], hosts[b]) for b in range(n)) for a in range(n)
    )


def _link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


def _middle(links: Iterable[Link]) -> Link:
    links = list(links)
    # The better one of two in the middle: whatever disturbs a measurement makes the link look slower.
    rate = median_high(link.bandwidth_bytes_per_s for link in links)
    return _link(rate, median_low(link.latency_s for link in links))


def budget_bytes(free_bytes: float, *, ranks: int = 1, communicators_bytes: float = 0.0) -> float:
    """Returns what the plan may count with on one of the ranks that share a device [bytes].

    Args:
        free_bytes: on the device; ``inf``, as on hosts, stays.
        ranks: that share it.
        communicators_bytes: what the backend of process groups will take for this rank.

    >>> budget_bytes(10 * 2.0**30, ranks=2, communicators_bytes=2.0**30) / 2.0**30
    3.0
    """
    return max(1.0, _PART * free_bytes / ranks - _WORKSPACE_BYTES - communicators_bytes)
