"""What has to travel from one plan to another, and how long that takes (layer P).

A layer travels with its parameters, buffers and optimizer state, from the owner that has it and the best link to
whoever needs it: to a rank which does not hold it yet. Ranks send and receive one message at a time, all of them side
by side; so the pause is the busiest rank's, plus a fixed part for the agreement. Both are corrected by what
migrations took.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

from lightning_hetero.solvers.placement.pipes import Pipe, Problem

Piece = tuple[int, int, int, int]  # first layer, end, source, target; (-1, 0, ...): outside the backbone

_AGREE_S = 0.05
_WIRE_BYTES_PER_S = 2e9  # most that is believed of a link nobody measured
_KEPT = 5


def pieces_between(problem: Problem, old: Sequence[Pipe], new: Sequence[Pipe]) -> list[Piece]:
    """Returns runs of layers that travel, by target."""
    held = {rank: (pipe.cuts[s], pipe.cuts[s + 1]) for pipe in old for s, rank in enumerate(pipe.ranks)}
    leaders = [pipe.ranks[0] for pipe in old]
    pieces: list[Piece] = []
    for pipe in new:
        leader = pipe.ranks[0]
        if leader not in leaders and problem.outside.state_bytes > 0.0:
            pieces.append((-1, 0, _nearest(problem, leaders, leader), leader))
        for stage, rank in enumerate(pipe.ranks):
            first, end = pipe.cuts[stage], pipe.cuts[stage + 1]
            a, b = held.get(rank, (0, 0))
            for low, high in ((first, min(end, a)), (max(first, b), end)) if a < b else ((first, end),):
                at = low
                while at < high:
                    owners = [pipe.ranks[bisect_right(pipe.cuts, at) - 1] for pipe in old]
                    source = _nearest(problem, owners, rank)
                    upto = min(high, held[source][1])
                    pieces.append((at, upto, source, rank))
                    at = upto
    return pieces


def _nearest(problem: Problem, owners: Sequence[int], target: int) -> int:
    rows = problem.per_byte_rows
    return min(owners, key=lambda rank: (rows[rank][target], rank))


def piece_bytes(problem: Problem, piece: Piece) -> float:
    """Returns what a piece weighs."""
    if piece[0] < 0:
        return problem.outside.state_bytes
    return float(problem.one.state_to[piece[1]] - problem.one.state_to[piece[0]])


class MigrationModel:
    """How long a migration stops training; learns from those that were measured."""

    def __init__(self) -> None:
        self.ratios: list[float] = []  # measured over predicted, of the last ones

    def learn(self, predicted_s: float, measured_s: float) -> None:
        """Takes in a migration that was expected to take ``predicted_s``."""
        if predicted_s > 0.0 and measured_s > 0.0:
            raw_s = predicted_s / self.scale
            self.ratios = [*self.ratios, measured_s / raw_s][-_KEPT:]

    @property
    def scale(self) -> float:
        """What predictions are multiplied with."""
        return median(self.ratios) if self.ratios else 1.0

    def pause_s(self, problem: Problem, old: Sequence[Pipe], new: Sequence[Pipe]) -> float:
        """Returns how long it takes from ``old`` to ``new`` [s]; 0 if nothing moves."""
        busy: dict[tuple[int, int], float] = {}
        pieces = pieces_between(problem, old, new)
        for piece in pieces:
            _, _, source, target = piece
            if not (size_bytes := piece_bytes(problem, piece)) > 0.0:  # plain data parallelism: all ranks hold it
                continue
            per_byte_s = max(problem.per_byte_rows[source][target], 1.0 / _WIRE_BYTES_PER_S)
            seconds = float(problem.latency_s[source, target]) + size_bytes * per_byte_s
            for end in ((0, source), (1, target)):
                busy[end] = busy.get(end, 0.0) + seconds
        return (_AGREE_S + max(busy.values())) * self.scale if busy else 0.0
