"""A run, or two beside one another, as a page (layer P)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_hetero.report.compare import compared
from lightning_hetero.report.page.engines import (
    budget_view,
    compare_view,
    pipeline_view,
    queue_view,
    staleness_view,
)
from lightning_hetero.report.page.html import page
from lightning_hetero.report.page.stages import stages_view
from lightning_hetero.report.page.views import (
    heat_view,
    scores_view,
    shares_view,
    spent_view,
    timeline_view,
)
from lightning_hetero.report.page.what_if import what_if_view
from lightning_hetero.report.run import Run, named
from lightning_hetero.report.scores import scores_of
from lightning_hetero.report.stage_times import stage_times_of
from lightning_hetero.report.stages import pipeline_what_if, stages_of
from lightning_hetero.report.verdict import STRATEGIES, verdict_of
from lightning_hetero.report.waiting import waiting_of
from lightning_hetero.report.what_if import what_if

__all__ = ["page_of"]

_NOTES = (
    "A device-second is a second of one rank in a training step, from its start to the end of the exchange of"
    " gradients; validation and checkpoints are not in it. Own work holds loading and the optimizer's step under"
    " hetero_balanced, not under stock DDP.",
    "Waiting is a rank's time in a step less its own work and the exchange. The exchange is what the rank that comes"
    " last sees of it.",
    "What if: the engines' own decide code (the balancing policy, the simulator of the stale engine's coordinator, the"
    " pipeline's plan and schedule) on the recorded times, of which the second half counts. Taken as they were: the"
    " exchange, and what a rank's samples cost it.",
)
_PIPELINE_NOTE = (
    "For a pipeline, what-if is its plan's model, multiplied by what batches took over what the model says of the plan."
)


def page_of(
    run: Run,
    other: Run | None = None,
    results: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> str:
    """Returns the page of a run.

    Args:
        run: the run.
        other: another one; then the first view compares the two, and all others are the first run's.
        results: what their ``result.json`` say; empty: nothing.
    """
    waiting, scores, stages = waiting_of(run), scores_of(run), stages_of(run)
    what = pipeline_what_if(run) if run.engine == "pipeline" else what_if(run)
    views = [
        *([] if other is None else [compare_view(compared(run, other, results), (run.name, other.name))]),
        timeline_view(run, waiting),
        spent_view(run, waiting),
        stages_view(run, stage_times_of(run), waiting),
        what_if_view(run, what),
        shares_view(run),
        heat_view(run, scores),
        scores_view(run, scores),
        pipeline_view(run, stages),
        staleness_view(run),
        queue_view(run),
        budget_view(run),
    ]
    notes = [*_NOTES, *([_PIPELINE_NOTE] if run.engine == "pipeline" else [])]
    notes += [f"Fault: {fault}" for fault in run.faults]
    return page(run.name, _facts(run, results[0]), verdict_of(run, waiting, scores, what), views, notes=notes)


def _facts(run: Run, result: Mapping[str, Any]) -> list[str]:
    facts = [STRATEGIES.get(run.engine, run.engine), f"{run.ranks} ranks", f"{len(run.steps) or len(run.step_s)} steps"]
    if scenario := result.get("scenario"):
        facts.append(f"emulation {scenario}")
    if result.get("fit_s") is not None:
        facts.append(f"fit {float(result['fit_s']):.1f} s")
    metric = named(result.get("metric"))
    if metric.get("value") is not None:
        facts.append(f"{metric['name']} {float(metric['value']):.4g}")
    return facts
