"""How good generated schedules are: makespan over the planner's model, by depth, order and speed of the links.

The model is what plans are searched by, fill + (m - 1) * bottleneck (`model_s`). A schedule whose
makespan is above it breaks the planner's promise; below it, parts of the fill overlapped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.pipeline.schedules import model_s, one_f_one_b, per_link, proportional
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, generate, makespan_s
from lightning_hetero.pipeline.decide.schedule import PipelineTimes

NOTES = (
    "Makespan of the generated schedule / (fill + (m - 1) * bottleneck); new random pipelines per row: 2-8 stages of "
    "0.5-1 of the bottleneck, forward : backward = 1 : 2, head 2-30 % of the bottleneck, 2-6 micro-batches per stage. "
    "*link x*: round trips are drawn from 0 to x bottlenecks. The output loops back to the leader."
)
LINKS = (0.0, 0.1, 0.3, 0.5, 1.0)
OURS = "per-link depth, H > F > B"
TEXTBOOK = "depth S-i, B > H > F"

Draw = Callable[[PipelineTimes], SchedulePolicy]
Raw = dict[str, list[float]]


def _more(times: PipelineTimes, depths: Sequence[int], extra: int) -> tuple[int, ...]:
    return tuple(min(depth + extra, times.micro_batches) for depth in depths)


POLICIES: dict[str, Draw] = {
    TEXTBOOK: one_f_one_b,
    "per-link depth, B > H > F": lambda t: SchedulePolicy(depths=per_link(t).depths, priority="BHF"),
    OURS: per_link,
    "depth S+1-i, H > F > B": lambda t: SchedulePolicy(depths=_more(t, one_f_one_b(t).depths, 1)),
    "unlimited depth, H > B > F": lambda t: SchedulePolicy(depths=(t.micro_batches,) * t.stages, priority="HBF"),
}


def pipeline(rng: np.random.Generator, link: float) -> PipelineTimes:
    """Draws a pipeline whose links' round trips take up to ``link`` bottlenecks."""
    stages = int(rng.integers(2, 9))
    micro_batches = int(rng.integers(2 * stages, 6 * stages + 1))
    stage_s = rng.uniform(0.5, 1.0, stages)
    head_s = float(rng.uniform(0.02, 0.3) * stage_s.max())
    one_way_s = rng.uniform(0.0, link, stages) * stage_s.max() / 2.0
    return proportional(
        [1.0] * micro_batches,
        forward_s=(stage_s / 3.0).tolist(),
        backward_s=(2.0 * stage_s / 3.0).tolist(),
        link_s=one_way_s[:-1].tolist(),
        loop_s=float(one_way_s[-1]),
        head_s=(head_s / 3.0, 2.0 * head_s / 3.0),
    )


def measure(quick: bool = False) -> Raw:
    """Returns every ratio by the name of its case."""
    count = 20 if quick else 80
    raw: Raw = {}
    for row, link in enumerate(LINKS):
        rng = np.random.default_rng([1, row])
        drawn = [pipeline(rng, link) for _ in range(count)]
        for name, policy in POLICIES.items():
            raw[f"link {link:g}: {name}"] = [makespan_s(t, policy(t)) / model_s(t) for t in drawn]
        raw[f"link {link:g}: activations held, per-link / S-i"] = [
            sum(per_link(t).depths) / sum(one_f_one_b(t).depths) for t in drawn
        ]
    repeats = 5 if quick else 20
    raw["8 stages x 64 micro-batches, operation lists [ms]"] = _times_ms(lambda t: generate(t, per_link(t)), repeats)
    raw["8 stages x 64 micro-batches, makespan only [ms]"] = _times_ms(lambda t: makespan_s(t, per_link(t)), repeats)
    return raw


def _times_ms(act: Callable[[PipelineTimes], object], repeats: int) -> list[float]:
    rng = np.random.default_rng(2)
    elapsed: list[float] = []
    for _ in range(repeats):
        stage_s = rng.uniform(0.5, 1.0, 8)
        times = proportional(
            [1.0] * 64, forward_s=stage_s.tolist(), backward_s=(2.0 * stage_s).tolist(),
            link_s=rng.uniform(0.0, 0.5, 7).tolist(), loop_s=0.2, head_s=(0.1, 0.2),
        )  # fmt: skip
        start = time.process_time()
        act(times)
        elapsed.append(1e3 * (time.process_time() - start))
    return elapsed


def figures(raw: Raw) -> list[dict[str, Any]]:
    """Returns the table: median and maximum per case, with goals for what the engine uses by default."""
    table: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, limit: float | None = None) -> None:
        goal = None if limit is None else f"<= {limit:g}"
        holds = None if limit is None else value <= limit
        table.append({"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "holds": holds})

    for case, values in raw.items():
        _, _, what = case.partition(": ")
        if what.startswith("activations"):
            add(f"{case}, median", statistics.median(values), "x")
        elif case.endswith("[ms]"):
            add(case.removesuffix(" [ms]"), statistics.median(values), "ms", 50.0)
        else:
            ours = what == OURS
            add(f"{case}, median", statistics.median(values), "x model", 1.0 if ours else None)
            # two stages and few micro-batches: the leader's three kinds of work collide now and then
            add(f"{case}, max", max(values), "x model", 1.1 if ours else None)
    return table


def table(raw: Raw) -> str:
    """Returns the ratios of all depths and orders, link by link, as a Markdown table."""
    columns = ["link", *POLICIES, "activations held, per-link / S-i"]
    rows: list[list[str]] = [columns, ["---"] * len(columns)]
    for link in LINKS:
        cells = [f"{link:g}"]
        for name in POLICIES:
            values = raw[f"link {link:g}: {name}"]
            shown = (statistics.median(values), float(np.quantile(values, 0.9)), max(values))
            cells.append(" / ".join(f"{value:.2f}" for value in shown))
        cells.append(f"x{statistics.median(raw[f'link {link:g}: {columns[-1]}']):.2f}")
        rows.append(cells)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "Makespan / model, median / 90 % / max:\n\n" + "\n".join(lines)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and returns the figures.

    Args:
        quick: fewer pipelines (seconds).
    """
    return figures(measure(quick))
