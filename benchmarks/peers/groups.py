"""Which trainings share their processes; pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.cases import PEERS, WORLD, Run, runs_of

ONCE = ("hivemind",)
"""Trained with the first seed only, as it takes minutes."""


def groups_of(*, quick: bool, seeds: Sequence[int]) -> dict[str, list[Run]]:
    """Returns the trainings that the same processes do one after the other, by name: those under Lightning."""
    peers = {peer.name: peer for peer in PEERS}
    groups: dict[str, list[Run]] = {}
    for run in runs_of(quick=quick, seeds=seeds):
        if run.peer in ONCE and run.seed != seeds[0]:
            continue
        together = peers[run.peer].lightning and peers[run.peer].ranks == WORLD
        name = f"{run.cluster}, seed {run.seed}: {'under Lightning' if together else run.peer}"
        groups.setdefault(name, []).append(run)
    return groups
