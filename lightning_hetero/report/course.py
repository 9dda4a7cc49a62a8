"""How a run went over time: what it logged, and its throughput (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from lightning_hetero.record.run import RecordedRun, RunStep

_WINDOWS = 60  # of the throughput

Curve = list[tuple[float, float]]
"""Time since the first step began [s], and a value."""


def losses_of(run: RecordedRun) -> dict[str, Curve]:
    """Returns the logged losses by name, at the end of the step that they were logged in; of one that was logged per
    step and per epoch that of the steps."""
    found: dict[str, Curve] = {}
    for number, values in run.metrics:
        for name, value in values.items():
            if "loss" in name.lower():
                found.setdefault(name, []).append((_end_s(run.steps[number]), value))
    return {name: curve for name, curve in found.items() if f"{name.removesuffix('_epoch')}_step" not in found}


def last_metrics(run: RecordedRun) -> Mapping[str, float]:
    """Returns what was logged last, by name; not Lightning's second and third name for the same."""
    found = {name: value for _, values in run.metrics for name, value in values.items()}
    double = [f"{name}_{by}" for name in found for by in ("step", "epoch")]
    return {name: value for name, value in found.items() if name not in double}


def throughput_of(run: RecordedRun) -> Curve:
    """Returns samples per second over windows of steps, pauses between epochs left out."""
    pairs = [
        (step.samples, _end_s(step) - _end_s(before), _end_s(step))
        for before, step in pairwise(run.steps)
        if (before.epoch, before.index + 1) == (step.epoch, step.index)
    ]
    size = -(-len(pairs) // _WINDOWS) or 1
    windows = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    taken = [(math.fsum(s for s, _, _ in w), math.fsum(s for _, s, _ in w), w[-1][2]) for w in windows]
    return [(end_s, samples / seconds) for samples, seconds, end_s in taken if seconds > 0.0]


def _end_s(step: RunStep) -> float:
    return max(turn.end_s for turn in step.turns.values())
