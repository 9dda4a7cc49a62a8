"""The best three in real processes on emulated devices, beside stock DDP: what is run, and what it shows; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.balanced.cases import SPELLS, Case
from benchmarks.balanced.figures import SETTLED, typical
from benchmarks.torchrun import launch
from lightning_hetero.emulate import Scenario

WORKER = "benchmarks.ablation.worker"
DDP = ("DDP", "DDP again")
KINDS = ("equal", "spells", "jitter")
STEPS_MS = (3, 10, 30)  # of stock DDP on equal devices, all in all
NUMBER = {"equal": (300, 200, 80), "spells": (300, 240, 160), "jitter": (300, 200, 80)}  # steps of a run
REPEATS = {"equal": 9, "spells": 5, "jitter": 9}
PER_RANK = 32
FIXED = 0.2  # part of a step's work that does not depend on samples
NEVER = 1.02
JITTER = 0.2
KEPT = {"whole_s": "whole run", "steady_s": "steady"}
Cell: TypeAlias = Mapping[str, Any]
"""``runs``: engine -> one per turn, see `timed`."""

NOTES = (
    "Every rank is a process under Lightning, on the model of `benchmarks.balanced`: compute is emulated by"
    f" sleeping in proportion to samples ({FIXED:.0%} of an equal share's work is fixed), real work included;"
    " all else is real. The work is fitted so that a step of stock DDP takes 3, 10 or 30 ms on equal devices,"
    " all in all. Where more processes than cores take longer than that by themselves, it is as short as can"
    " be: *DDP's step* says how short, *taken / asked* that devices were not what the scenario says. *Spells*:"
    f" each rank is {SPELLS.factor:g} times slower for {SPELLS.steps} steps, a quarter of the time; *jitter*:"
    f" {JITTER:.0%}. Another seed in each turn, the same for all engines. Ratios to the run of DDP's in the same"
    f" turn, median over the turns: of the *whole run*, and of the *steady* steps from the {SETTLED}th on (their"
    " median; their mean under spells). *DDP again* is the noise of this."
)


def cells(quick: bool) -> list[tuple[str, int]]:
    """Returns the kinds and step times [ms] that are run."""
    return [(kind, ms) for kind in KINDS for ms in ((10,) if quick else STEPS_MS)]


def case_of(kind: str, world_size: int, ms: int, work_s: float, *, seed: int = 0, quick: bool = False) -> Case:
    """Returns one run.

    Args:
        kind: one of `KINDS`.
        world_size: ranks.
        ms: step of stock DDP on equal devices [ms].
        work_s: emulated work of an equal share [s].
        seed: of what is random.
        quick: fewer steps.
    """
    steps = NUMBER[kind][STEPS_MS.index(ms)]
    scenario = Scenario(
        speeds=[1.0],
        step_s=FIXED * work_s,
        sample_s=(1.0 - FIXED) * work_s / PER_RANK,
        jitter=JITTER if kind == "jitter" else 0.0,
        spells=SPELLS if kind == "spells" else None,
        seed=seed,
    )
    return Case(
        name=f"{world_size} ranks, {kind}, {ms} ms",
        world_size=world_size,
        scenario=scenario,
        per_rank=PER_RANK,
        steps=min(steps, 40) if quick else steps,
    )


def measure(quick: bool, names: Sequence[str], repeats: int | None = None) -> dict[str, Any]:
    """Runs DDP, DDP again and these candidates; returns what each cell took."""
    found: dict[str, Any] = {}
    for world_size in (4,) if quick else (4, 2):
        extent = "quick" if quick else "full"
        found |= launch(WORKER, world_size, "real", extent, 1 if quick else repeats or 0, *names)
    return found


def timed(case: Case, steps_s: Sequence[float]) -> dict[str, float]:
    """Returns what is kept of a run: ``whole_s``, and ``steady_s`` of a steady step."""
    return {"whole_s": sum(steps_s), "steady_s": typical(case)(steps_s[SETTLED:])}


def ratios(cell: Cell, engine: str, kept: str) -> list[float]:
    """Returns an engine's time over DDP's, turn by turn; ``kept``: ``"whole_s"`` or ``"steady_s"``."""
    return [a[kept] / b[kept] for a, b in zip(cell["runs"][engine], cell["runs"][DDP[0]], strict=True)]


def figures(raw: Mapping[str, Cell], default: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for name, cell in raw.items():
        ddp_s = statistics.median(run["steady_s"] for run in cell["runs"][DDP[0]])
        out.append(figure(f"{name}: DDP's step", ddp_s * 1e3, "ms"))
        for engine in others(cell):
            for kept, words in KEPT.items():
                value = statistics.median(ratios(cell, engine, kept))
                most = NEVER if engine == default else None
                out.append(figure(f"{name}: {engine} / DDP, {words}", value, "x", most=most))
        taken = max(run["taken"] for runs in cell["runs"].values() for run in runs)
        out.append(figure(f"{name}: emulated work, taken / asked, greatest of all", taken, "x"))
    return out


def others(cell: Cell) -> list[str]:
    """Returns the engines but the DDP that they are compared with."""
    return [engine for engine in cell["runs"] if engine != DDP[0]]


def figure(
    name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None
) -> dict[str, Any]:
    """Returns one figure, with at most one limit."""
    goal = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else None
    holds = value >= least if least is not None else value <= most if most is not None else None
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds}


def table(raw: Mapping[str, Cell]) -> str:
    """Returns ratios to DDP, whole run and steady, as a Markdown table."""
    engines = others(next(iter(raw.values())))
    lines = [["time / DDP: whole run, steady", *engines], ["---"] * (len(engines) + 1)]
    for name, cell in raw.items():
        both = [[statistics.median(ratios(cell, engine, kept)) for kept in KEPT] for engine in engines]
        lines.append([name, *(f"{whole:.3f}, {steady:.3f}" for whole, steady in both)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
