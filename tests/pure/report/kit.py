"""Traces made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.types import Event

Told = tuple[float, float, float]
"""Samples, own work [s], waiting [s] of a rank in a step."""


def opened(rank: int, ranks: int, **about: Any) -> Event:
    data = {"version": 1, "world_size": ranks, "names": [f"host cpu:{rank}"], "strategy": "DDPStrategy", **about}
    return Event(kind="run", rank=rank, epoch=0, step=0, t_s=0.0, data=data)


def events_of(steps: Sequence[Sequence[Told]], *, ahead_s: Sequence[float] = (), **about: Any) -> list[Event]:
    """The steps of one epoch, one behind the other; ``ahead_s``: of each rank's clock."""
    ranks = len(steps[0])
    found = [opened(rank, ranks, **about) for rank in range(ranks)]
    now_s = 0.0
    for number, step in enumerate(steps):
        now_s += max(compute_s + wait_s for _, compute_s, wait_s in step)
        for rank, (samples, compute_s, wait_s) in enumerate(step):
            data = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
            t_s = now_s + (ahead_s[rank] if ahead_s else 0.0)
            found.append(Event(kind="step", rank=rank, epoch=0, step=number, t_s=t_s, data=data))
    return found


def run_with(steps: Sequence[Sequence[Told]], more: Sequence[Event] = (), **about: Any) -> RecordedRun:
    return run_of([*events_of(steps, **about), *more], name="made")


def decision(step: int, shares: Sequence[int], *, rank: int = 0, **data: Any) -> Event:
    told = {"shares": list(shares), "reason": "rebalanced", **data}
    return Event(kind="decision", rank=rank, epoch=0, step=step, t_s=0.0, data=told)
