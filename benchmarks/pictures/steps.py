"""Pictures of the balanced engine's steps, one by one: the README's time lines, and shares that follow a change."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from benchmarks.balanced.cases import Case, unequal_cases
from benchmarks.balanced.figures import SETTLED, ideal_step_s
from benchmarks.pictures.sheet import Picture
from benchmarks.results import Results
from lightning_hetero.report.page.charts import Line, Span, lines, rank_kind, time_lines

SHOWN = "4 ranks 1:1:1/2:1/4"
SWAPPED = "4 ranks, speeds reversed at step 30"
DDP_STEPS = 4  # in the time lines
WORDS = {1.0: "1", 0.5: "1/2", 0.25: "1/4"}


def _measured(results: Results, name: str) -> tuple[Case, dict[str, Any]]:
    """Returns a case and what was measured of it, by engine."""
    (case,) = [case for case in unequal_cases() if case.name == name]
    return case, next(group["cases"][name] for group in results.raw.values() if name in group["cases"])


def timeline(results: Results) -> Picture:
    """Stock DDP against the balanced engine once shares have settled, in the same time."""
    case, engines = _measured(results, SHOWN)
    end_s = math.fsum(engines["ddp"]["steps_s"][0][SETTLED : SETTLED + DDP_STEPS])
    step_ms = {"ddp": results[f"{SHOWN}: stock DDP step"], "ours": results[f"{SHOWN}: our step"]}
    panels: list[tuple[str, str]] = []
    for engine, name in (("ddp", "stock DDP"), ("ours", "hetero_balanced")):
        steps_s, samples = engines[engine]["steps_s"][0][SETTLED:], engines[engine]["samples"][0][SETTLED:]
        starts_s = [0.0, *accumulate(steps_s)]
        rows: list[tuple[str, list[Span]]] = []
        for rank, speed in enumerate(case.scenario.speeds):
            spans: list[Span] = []
            for step, (start_s, step_s) in enumerate(zip(starts_s, steps_s, strict=False)):
                if start_s < end_s - 1e-9:
                    number = samples[step][rank]
                    work_end_s = start_s + min(step_s, case.scenario.work_s(rank, SETTLED + step, number))
                    spans.append(Span(start_s=start_s, end_s=work_end_s, kind="work", label=str(number)))
                    spans.append(Span(start_s=work_end_s, end_s=start_s + step_s, kind="idle"))
            rows.append((f"speed {WORDS[speed]}", spans))
        panels.append((f"{name}: {step_ms[engine]:.0f} ms per step", time_lines(rows, end_s=end_s, label=name)))
    assert case.scenario.sample_s is not None
    work = f"({case.scenario.step_s * 1e3:g} ms + {case.scenario.sample_s * 1e3:g} ms per sample) / speed"
    return Picture(
        title=f"{step_ms['ddp'] / step_ms['ours']:.1f} times as fast: shares that fit the devices",
        legend=[("work", "own work (samples)"), ("idle", "waiting, exchange, Lightning")],
        panels=panels,
        source=f"Four emulated devices, global batch {case.global_batch}, from step {SETTLED} on; steps above are"
        f" medians of three runs. Own work is what the emulation asks for, {work}. benchmarks/balanced/results.json",
    )


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(step) for step in zip(*runs, strict=True)]


def shares(results: Results) -> Picture:
    """Shares and steps while speeds are reversed half-way."""
    case, engines = _measured(results, SWAPPED)
    given = engines["ours"]["samples"][0]
    ranks = [
        Line(name=f"rank {rank}", kind=rank_kind(rank), y=[float(step[rank]) for step in given])
        for rank in range(case.world_size)
    ]
    steps = [
        Line(name="stock DDP", kind="r6", y=[1e3 * s for s in _medians(engines["ddp"]["steps_s"])]),
        Line(name="hetero_balanced", kind="r4", y=[1e3 * s for s in _medians(engines["ours"]["steps_s"])]),
    ]
    assert case.swap_at is not None
    change = [(float(case.swap_at), "speeds reversed")]
    words = [WORDS[speed] for speed in case.scenario.speeds]
    named = [(rank_kind(rank), f"{first}, then {then}") for rank, (first, then) in enumerate(
        zip(words, reversed(words), strict=True))]  # fmt: skip
    ideal_ms = 1e3 * ideal_step_s(case.scenario, case.world_size, case.global_batch)
    right = results[f"{SWAPPED}: steps to 5% of ideal after swap"]
    return Picture(
        title=f"{right:.0f} steps after speeds are reversed, shares fit again",
        legend=[*named, ("r6", "step of stock DDP"), ("r4", "step of hetero_balanced"), ("bound", "ideal step")],
        panels=[
            ("Samples of each rank, by its speed", lines(ranks, label="shares", x_name="step", y_name="samples",
                                                         marks=change)),
            ("Step", lines(steps, label="steps", x_name="step", y_name="ms", marks=change, level=ideal_ms)),
        ],
        source=f"Four emulated devices, global batch {case.global_batch}, speeds reversed at step {case.swap_at}."
        " Shares of one run, steps as medians of three runs; ideal: the global batch over the sum of the speeds."
        " benchmarks/balanced/results.json",
    )  # fmt: skip
