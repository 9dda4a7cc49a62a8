"""Series that were recorded in real processes: see `benchmarks.ablation.recorder`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.balanced.series import Series
from lightning_hetero.record import replay
from lightning_hetero.types import Event

FOLDER = Path(__file__).parent / "recorded"
FIXED_S, PER_SAMPLE_S, TOTAL = 0.009, 0.003, 64  # of the closed loop, in which the series are played


def recordings(folder: Path = FOLDER) -> list[str]:
    """Returns the names of the recordings."""
    return sorted(path.stem for path in folder.glob("*.json"))


def recorded(name: str, *, seed: int = 0, seeds: int = 1, folder: Path = FOLDER) -> Series:
    """Returns a recording as a series: with equal shares the ranks take the times that were recorded.

    Other shares take times in proportion to ``FIXED_S + PER_SAMPLE_S * samples``. All of it counts as speed and nothing
    as noise, so the ideal knows each step's times beforehand, which nobody can.

    Args:
        name: of the recording.
        seed: another one begins at another step; the recording goes round.
        seeds: how many there are.
        folder: with the recordings.
    """
    data = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    times: list[list[float]] = data["compute_s"]
    first = seed * len(times) // seeds
    equal_s = FIXED_S + PER_SAMPLE_S * TOTAL / len(times[0])
    slow = [tuple(s / equal_s for s in row) for row in (*times[first:], *times[:first])]
    free = None
    if told := data.get("free_cpu"):
        free = [tuple(math.nan if v is None else float(v) for v in row) for row in (*told[first:], *told[:first])]
    noise = [(1.0,) * len(times[0])] * len(times)
    return Series(name=f"recorded: {name}", slow=slow, noise=noise, free_cpu=free)


def from_events(events: Sequence[Event], warm_up: int = 2) -> dict[str, Any]:
    """Returns a recording: own work by step and rank [s], and the free part of the processors where it was told.

    Args:
        events: ``step`` events of all ranks on equal shares, and ``load`` events with ``free_cpu``.
        warm_up: first steps, which are left out.
    """
    told = {(e.step, e.rank): e.data["free_cpu"] for e in events if e.kind == "load"}
    steps = list(replay(events))[warm_up:]
    compute_s = [[float(f"{sample.compute_s:.4g}") for sample in step] for step in steps]
    free_cpu = [[told.get((sample.step, sample.rank)) for sample in step] for step in steps] if told else None
    return {"samples": steps[0][0].samples, "compute_s": compute_s, "free_cpu": free_cpu}
