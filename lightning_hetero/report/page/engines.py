"""Views of what one engine alone has: staleness, schedule, budget; and of two runs (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.report.compare import Figure
from lightning_hetero.report.page.charts import (
    Bar,
    Line,
    Span,
    bars,
    heat_map,
    histogram,
    legend,
    lines,
    rank_kind,
    time_lines,
)
from lightning_hetero.report.page.views import View, table
from lightning_hetero.report.run import Run, named
from lightning_hetero.report.stages import Group, Stages
from lightning_hetero.report.verdict import milliseconds, percent

__all__ = ["budget_view", "compare_view", "pipeline_view", "queue_view", "staleness_view"]

_MOST_GROUPS = 4  # drawn
_MOST_AGES = 12


def staleness_view(run: Run) -> View:
    """How old contributions were, against the bound; what was wasted."""
    head = {
        "name": "staleness",
        "title": "Staleness",
        "question": "How old were the parameters that gradients were computed on?",
    }
    if run.engine != "stale":
        return View(**head, answer="Only hetero_stale trains on older parameters; here every gradient is fresh.")
    if not run.counts:
        return View(**head, answer="The server was never asked: log with StragglerMonitor() to have its counts here.")
    counts = run.counts[-1][1]
    ages = {int(age): float(n) for age, n in counts.get("staleness", {}).items()}
    total = math.fsum(ages.values())
    if not total:
        return View(**head, answer="Nothing was applied yet when the server was last asked.")
    bound = run.about.get("bound")
    last = max(max(ages), int(bound) if bound is not None and int(bound) < _MOST_AGES else 0)
    shown = list(range(min(last, _MOST_AGES) + 1))
    values = [100.0 * ages.get(age, 0.0) / total for age in shown]
    names = [str(age) for age in shown]
    if last > _MOST_AGES:
        values[-1] = 100.0 * math.fsum(n for age, n in ages.items() if age >= _MOST_AGES) / total
        names[-1] += "+"
    within = bound is not None and int(bound) <= _MOST_AGES
    body = histogram(
        names,
        values,
        label="samples by staleness",
        x_name="versions old",
        y_name="% of samples",
        bound=float(int(bound)) if bound is not None and within else math.nan,
    )
    stale = 1.0 - ages.get(0, 0.0) / total
    wasted = _total(counts.get("discarded"))
    answer = (
        f"{percent(stale)} of the samples were stale, by at most {max(ages)} versions"
        + (f" of {bound} allowed" if bound is not None else "; this policy sets no bound")
        + f". {wasted:g} samples were wasted, {_total(counts.get('reissued')):g} given to another rank."
    )
    rows = [["wasted", reason, f"{number:g}"] for reason, number in named(counts.get("discarded")).items()]
    rows += [["given again", reason, f"{number:g}"] for reason, number in named(counts.get("reissued")).items()]
    if rows:
        body += table(["samples", "reason", "number"], rows)
    return View(**head, answer=answer, body=body)


def _total(counts: Mapping[str, Any] | None) -> float:
    return math.fsum(float(number) for number in named(counts).values())


def queue_view(run: Run) -> View:
    """Messages that waited for the server, and what updates took."""
    head = {"name": "server", "title": "Server", "question": "Does the parameter server keep up?"}
    if run.engine != "stale":
        return View(**head, answer="Only hetero_stale has a parameter server.")
    if not run.counts:
        return View(**head, answer="The server was never asked: log with StragglerMonitor() to have its counts here.")
    last = run.counts[-1][1]
    updates = max(1.0, float(last.get("updates") or 0.0))
    x = [float(at) for at, _ in run.counts]
    body = lines(
        [Line(name="messages", kind="r0", x=x, y=[float(c.get("queue") or 0) for _, c in run.counts], dots=True)],
        label="messages waiting when the server looked",
        x_name="step",
        y_name="messages waiting",
    )
    apply_s = float(last.get("apply_s") or 0.0) / updates
    answer = (
        f"At most {last.get('longest_queue', 0)} messages waited; an update took {milliseconds(apply_s)} in the mean"
        f" and {milliseconds(float(last.get('longest_apply_s') or 0.0))} at most."
    )
    return View(**head, answer=answer, body=body)


def budget_view(run: Run) -> View:
    """A controller's queues."""
    head = {"name": "budget", "title": "Budget", "question": "Is the budget kept, and when did it press?"}
    if not run.queues:
        return View(**head, answer="No controller with a budget took part in this run.")
    names = list(dict.fromkeys(name for _, queues in run.queues for name in queues))
    x = [float(at) for at, _ in run.queues]
    body = legend([(rank_kind(i), name) for i, name in enumerate(names)]) + lines(
        [
            Line(name=name, kind=rank_kind(i), x=x, y=[queues.get(name, math.nan) for _, queues in run.queues])
            for i, name in enumerate(names)
        ],
        label="virtual queue of each budget",
        x_name="step",
        y_name="batches' budget overspent (below 0: saved)",
        level=0.0,
        marks=[(float(change.step), change.reason) for change in run.changes[-60:]],
    )
    last = run.queues[-1][1]
    steps = max(1, len(run.steps))
    told = [
        f"{name}: {abs(value):.1f} batches' budget {'overspent' if value > 0 else 'saved'} at the end,"
        f" {percent(abs(value) / steps)} of the run's"
        for name, value in last.items()
    ]
    return View(**head, answer="; ".join(told) + ".", body=body)


def pipeline_view(run: Run, stages: Stages | None) -> View:
    """The schedule, its bubbles, and each stage beside its plan."""
    head = {
        "name": "pipeline",
        "title": "Pipeline",
        "question": "What does each stage do when, and is a stage slower than planned?",
    }
    if stages is None:
        return View(**head, answer="Only hetero_pipeline divides layers among devices.")
    body = ""
    for number, group in enumerate(stages.groups[:_MOST_GROUPS]):
        bubble = f"; {percent(group.bubble)} of its devices' time is bubble" if group.schedule is not None else ""
        body += f"<p>Group {number}: {group.samples} samples{bubble}, as planned:</p>" + _schedule(group)
    if len(stages.groups) > _MOST_GROUPS:
        body += f"<p>The first {_MOST_GROUPS} of {len(stages.groups)} groups.</p>"
    wide = max(len(group.stages) for group in stages.groups)
    ratios = [[*(stage.ratio for stage in g.stages), *([math.nan] * (wide - len(g.stages)))] for g in stages.groups]
    known = [(s.ratio, i, s) for i, g in enumerate(stages.groups) for s in g.stages if not math.isnan(s.ratio)]
    answer = f"A batch took {milliseconds(stages.measured_s)}"
    if stages.planned_s > 0:
        answer += f", planned were {milliseconds(stages.planned_s)}"
    if known:
        body += "<p>Own work over what was planned for it; full colour from 1.5 on:</p>" + heat_map(
            [f"group {i}" for i in range(len(stages.groups))],
            [f"stage {i}" for i in range(wide)],
            ratios,
            label="stages beside their plan",
        )
        ratio, at, stage = max(known, key=lambda found: found[0])
        low = min(known, key=lambda found: found[0])[0]
        if ratio > 1.15 * low and ratio > 1.15:
            answer += f". Group {at}, rank {stage.rank}, is off most: {ratio:.2f} times what was planned"
        else:
            answer += f". All stages take about as planned beside one another ({low:.2f} to {ratio:.2f} times)"
    rows = [
        [
            str(i), str(stage.rank), f"{stage.layers[0]} to {stage.layers[1]}", milliseconds(stage.planned_s),
            milliseconds(stage.measured_s), percent(stage.idle),
        ]
        for i, group in enumerate(stages.groups)
        for stage in group.stages
    ]  # fmt: skip
    body += table(["group", "rank", "layers", "planned", "own work", "not working"], rows)
    if stages.resting:
        answer += f". At rest: {', '.join(map(str, stages.resting))}"
    return View(**head, answer=answer + ".", body=body)


_KINDS = {"F": "work", "B": "r1", "H": "r2"}


def _schedule(group: Group) -> str:
    timeline = group.schedule
    if timeline is None:
        return "<p>Layers were not measured, so there is no schedule to draw.</p>"
    rows: list[tuple[str, Sequence[Span]]] = []
    for device, stage in enumerate(group.stages):
        spans = [
            Span(
                start_s=start_s,
                end_s=end_s,
                kind=_KINDS.get(op.kind.value, "work"),
                tip=f"{op.token(with_stage=False)} on rank {stage.rank}: {milliseconds(end_s - start_s)}",
                label=str(op.micro_batch),
            )
            for op, start_s, end_s in timeline.devices[device]
        ]
        rows.append((f"rank {stage.rank}", spans))
    keys = legend([("work", "forward"), ("r2", "head"), ("r1", "backward")])
    return keys + time_lines(rows, end_s=timeline.makespan_s, label="schedule of a group")


def compare_view(figures: Sequence[Figure], names: tuple[str, str]) -> View:
    """Run A against run B."""
    a, b = names
    rows: list[list[str]] = []
    verdicts: list[str] = []
    drawn: list[Bar] = []
    for figure in figures:
        change = figure.b / figure.a - 1.0 if figure.a else math.nan
        known = not (math.isnan(change) or math.isinf(change))
        better = ""
        if known and figure.less_is_better is not None and abs(change) >= 0.005:
            better = "better" if (change < 0) == figure.less_is_better else "worse"
        told = f"{'+' if change > 0 else '-'}{percent(abs(change))}" if known else "-"
        rows.append([figure.name, _number(figure.a), _number(figure.b), told, better])
        if figure.name.startswith("time per") and known:
            verdicts.append(
                f"B takes {percent(abs(change))} {'less' if change < 0 else 'more'} time per sample than A in its steps"
            )
            drawn = [
                Bar(name="A", parts=[("r0", figure.a)], text=f"{figure.a:.3g} s"),
                Bar(name="B", parts=[("r1", figure.b)], text=f"{figure.b:.3g} s"),
            ]
    body = bars(drawn, label="time per 1,000 samples") if drawn else ""
    body += table(["", f"A: {a}", f"B: {b}", "change", ""], rows)
    return View(
        name="compare",
        title="Run A and run B",
        question="Did it help?",
        answer=(". ".join(verdicts) or "Their steps cannot be compared: own work was not measured in both") + ".",
        body=body if rows else "",
    )


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
