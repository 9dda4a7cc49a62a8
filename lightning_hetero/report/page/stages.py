"""Ranks and stages of a step: one rank, one stage, or all? (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_hetero.report.page.charts import legend
from lightning_hetero.report.page.svg import WIDTH, Drawing, text_width
from lightning_hetero.report.page.views import NO_STEPS, ONE_RANK, View, absent, shown_ranks
from lightning_hetero.report.run import Run
from lightning_hetero.report.stage_times import StageTimes, StepStage, outliers_of, stage_answer, stage_names
from lightning_hetero.report.verdict import milliseconds, percent
from lightning_hetero.report.waiting import Waiting

__all__ = ["stages_view"]

_ROW = 22.0
_FULL = 0.5  # beside the median: where a colour is full
_ON_COLOUR = 0.75  # strength from which letters need the colour for those on colours

_WHAT = {
    "work": "forward and backward",
    "exchange": "what the rank that comes last sees of it",
    "waiting": "for other ranks",
    "between": "all else: loading, the optimizer's step, callbacks, logging",
}
_WHAT_OF = {
    "balanced": {
        "work": "loading, forward, backward, the optimizer's step",
        "between": "all else, e.g. callbacks and logging",
    },
    "stale": {
        "work": "loading, forward, backward",
        "exchange": "the least that this rank sees of it",
        "waiting": "for the server or an assignment, beyond that",
        "between": "all else, e.g. callbacks and logging",
    },
    "federated": {
        "work": "loading, forward, backward, the optimizer's step",
        "exchange": "the least that a rank sees of a meeting",
        "waiting": "for other ranks at a meeting",
        "between": "all else, e.g. the average, callbacks and logging",
    },
    "pipeline": {"work": "forward and backward of its layers", "waiting": "for other stages and groups"},
}
"""Where engines count otherwise than stock DDP does under `StragglerMonitor`."""


def stages_view(run: Run, times: StageTimes | None, waiting: Waiting) -> View:
    """Ranks and stages: rows and columns."""
    head = ("stages", "Ranks and stages of a step", "Is it one rank, one stage, or all?")
    if times is None:
        return absent(head, ONE_RANK if run.steps else NO_STEPS)
    names, ranks = stage_names(run), _ranks(run, times, waiting)
    answer = stage_answer(times, names)
    drawing = _map(times, ranks, names, label=f"time of each rank by stage of a step, in milliseconds. {answer}")
    what = {**_WHAT, **_WHAT_OF.get(run.engine, {})}
    beside = "planned, beside the others" if run.staged else "the ranks' median"
    body = legend([("hot", f"longer than {beside}"), ("cool", "shorter"), ("idle", "waiting")]) + drawing
    body += "<p>" + "; ".join(f"<b>{names[s.kind]}</b>: {what[s.kind]}" for s in times.stages) + ".</p>"
    steps = f"mean over {times.steps} steps" if times.steps > 1 else "of one step"
    if any(stage.kind == "between" for stage in times.stages):
        steps += "; between steps the median"
    body += (
        f"<p>ms per step, {steps}. Full colour from 1.5 times the"
        " median on. The last row is each stage's part of a step.</p>"
    )
    told = "" if len(ranks) == run.ranks else f" Shown: {len(ranks)} of {run.ranks} ranks, slow ones among them."
    return View(name=head[0], title=head[1], question=head[2], answer=answer + told, body=body)


def _ranks(run: Run, times: StageTimes, waiting: Waiting) -> list[int]:
    """Returns the ranks to draw, the slow ones among them."""
    ranks = shown_ranks(run, waiting)
    if len(ranks) == run.ranks:
        return ranks
    slow = [one.rank for one in outliers_of(times)][: len(ranks)]
    others = [rank for rank in ranks if rank not in slow]
    return sorted([*slow, *others[: len(ranks) - len(slow)]])


def _map(times: StageTimes, ranks: Sequence[int], names: Mapping[str, str], *, label: str) -> str:
    left = 10.0 + max(text_width(f"rank {rank}") for rank in (*ranks, 0))
    wide = (WIDTH - left) / len(times.stages)
    drawing = Drawing(_ROW * (len(ranks) + 1) + 30.0, label)
    for j, stage in enumerate(times.stages):
        x = left + wide * j
        drawing.text(x + wide / 2.0, 12.0, names[stage.kind], "mute", anchor="middle")
        ratios = stage.ratios
        for i, rank in enumerate(ranks):
            if not math.isnan(seconds := stage.seconds[rank]):
                kind, strength, beside = _colour(stage, seconds, ratios[rank], times.step_s)
                tip = f"rank {rank}, {names[stage.kind]}: {milliseconds(seconds)}{beside}"
                y = 20.0 + _ROW * i
                drawing.rect(x + 1.0, y, wide - 2.0, _ROW - 2.0, "cell", tip=tip)
                drawing.rect(x + 1.0, y, wide - 2.0, _ROW - 2.0, kind, opacity=strength, tip=tip)
                letters = "inside" if kind != "idle" and strength >= _ON_COLOUR else ""
                drawing.text(x + wide / 2.0, y + 14.0, _short_ms(seconds), letters, anchor="middle")
        y, part = 26.0 + _ROW * len(ranks), times.part(stage)
        if not math.isnan(part):
            drawing.rect(x + 1.0, y, wide - 2.0, _ROW - 2.0, "cell")
            drawing.rect(x + 1.0, y + _ROW - 6.0, (wide - 2.0) * min(1.0, part), 4.0, _bar(stage))
            drawing.text(x + wide / 2.0, y + 12.0, percent(part), anchor="middle")
    for i, rank in enumerate(ranks):
        drawing.text(0.0, 35.0 + _ROW * i, f"rank {rank}", most=left - 6.0)
    drawing.text(0.0, 40.0 + _ROW * len(ranks), "part", "mute")
    return drawing.svg()


def _bar(stage: StepStage) -> str:
    return {"work": "work", "exchange": "exchange"}.get(stage.kind, "idle")


def _colour(stage: StepStage, seconds: float, ratio: float, step_s: float) -> tuple[str, float, str]:
    """Returns a cell's colour, its strength from 0 to 1, and what it says in words."""
    if stage.kind == "waiting":  # by its part of a step: the rank that waits is not the slow one
        part = min(1.0, seconds / step_s) if step_s > 0.0 else 0.0
        return "idle", part, f", {percent(part)} of a step"
    if math.isnan(ratio):
        return "hot", 0.0, ""
    beside = "" if math.isinf(ratio) else f", {ratio:.2f} times the median"
    over = " of what was planned" if stage.expected else ""
    return "hot" if ratio >= 1.0 else "cool", min(1.0, abs(ratio - 1.0) / _FULL), beside + over


def _short_ms(seconds: float) -> str:
    """Returns milliseconds in at most six letters."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 99.95 or value < 0.005 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
