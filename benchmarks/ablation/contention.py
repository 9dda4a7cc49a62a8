"""Real interference: two ranks, a core each, and busy loops on one of the cores; nothing is emulated. No torch here."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.ablation.real import KEPT, WORKER, Cell, figure, others, ratios
from benchmarks.balanced.figures import SETTLED
from benchmarks.torchrun import launch

LOOPS = 2  # on rank 1's core
KINDS = ("steady", "comes and goes")
PHASE = 40  # steps with the loops, and without
STEPS = {"steady": 120, "comes and goes": 240}
REPEATS = 5
LEAST = 1.7

NOTES = (
    f"Two ranks, pinned to a core each, train a small network of matrix products in float32, and {LOOPS} busy"
    f" loops run on rank 1's core: all the time, or on every other stretch of {PHASE} steps, the same steps for"
    " every engine. Nothing is emulated. The system gives each of three processes on the core a third of it. So"
    " equal shares take 3 times as long as on a free core, and the best ones 3/2 times if the exchange of"
    " gradients costs nothing: half of DDP's time. DDP's time over the engine's in the same turn, median over"
    f" the turns; *steady*: mean of the steps from the {SETTLED}th on."
)


def is_loaded(kind: str) -> Callable[[int], bool]:
    """Returns what tells whether the loops run in a step."""
    return (lambda _: True) if kind == "steady" else (lambda step: step // PHASE % 2 == 1)


def steps_of(kind: str, quick: bool) -> int:
    return (24 if kind == "steady" else 100) if quick else STEPS[kind]


def measure(quick: bool, names: Sequence[str], repeats: int | None = None) -> dict[str, Any]:
    """Runs DDP, DDP again and these candidates.

    Raises:
        RuntimeError: there is one core only.
    """
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("two ranks need a core each, and there is one: leave this part out by --part")
    extent = "quick" if quick else "full"
    return launch(WORKER, 2, "contention", extent, 1 if quick else repeats or REPEATS, *names)


def timed(steps_s: Sequence[float]) -> dict[str, float]:
    """Returns what is kept of a run."""
    return {"whole_s": sum(steps_s), "steady_s": statistics.fmean(steps_s[SETTLED:])}


def gain(cell: Cell, engine: str, kept: str) -> float:
    """Returns DDP's time over an engine's, median over the turns."""
    return statistics.median(1.0 / ratio for ratio in ratios(cell, engine, kept))


def figures(raw: Mapping[str, Cell], default: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for kind, cell in raw.items():
        for engine, runs in cell["runs"].items():
            step_s = statistics.median(run["steady_s"] for run in runs)
            out.append(figure(f"{kind}: {engine}, mean step", step_s * 1e3, "ms"))
        for engine in others(cell):
            for kept, words in KEPT.items():
                held = (engine, kind, kept) == (default, "steady", "steady_s")
                least = LEAST if held else None
                out.append(figure(f"{kind}: DDP / {engine}, {words}", gain(cell, engine, kept), "x", least=least))
    return out


def table(raw: Mapping[str, Cell]) -> str:
    """Returns the gains, whole run and steady, as a Markdown table."""
    engines = others(next(iter(raw.values())))
    lines = [["DDP's time / time: whole run, steady", *engines], ["---"] * (len(engines) + 1)]
    for kind, cell in raw.items():
        cells = [", ".join(f"{gain(cell, engine, kept):.2f}" for kept in KEPT) for engine in engines]
        lines.append([f"{LOOPS} busy loops, {kind}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
