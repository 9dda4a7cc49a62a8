"""Views of what one engine alone has: its pipeline, its server, its budget; and of two runs (layer P)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_hetero.record.ledger import Ledger
from lightning_hetero.record.run import RecordedRun, named
from lightning_hetero.report.page import charts
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.page.markup import Markup, element, joined
from lightning_hetero.report.page.views import Drawn, table
from lightning_hetero.report.pipelines import PipelineFacts, bubble
from lightning_hetero.report.verdict import milliseconds, percent

_MOST_GROUPS = 4  # drawn
_MOST_AGES = 12
_KINDS = {"F": "work", "B": "r1", "H": "r2"}


def pipeline(facts: RunFacts) -> Drawn:
    """The schedule, its bubbles, and each stage beside its plan."""
    found = facts.pipeline
    if found is None:
        return "Only hetero_pipeline divides layers among devices.", Markup()
    groups = found.plan.groups
    body = joined(*(_schedule(found, number) for number in range(min(len(groups), _MOST_GROUPS))))
    if len(groups) > _MOST_GROUPS:
        body += element("p", f"The first {_MOST_GROUPS} of {len(groups)} groups.")
    known = [(s.ratio, i, s) for i, group in enumerate(found.stages) for s in group if not math.isnan(s.ratio)]
    answer = f"A batch took {milliseconds(found.measured_s)}"
    if found.plan.total_s > 0:
        answer += f", planned were {milliseconds(found.plan.total_s)}"
    if known:
        body += element("p", "Own work over what was planned for it; full colour from 1.5 on:") + charts.heat_map(
            [f"group {i}" for i in range(len(groups))],
            [f"stage {i}" for i in range(max(map(len, found.stages)))],
            [[charts.ratio_cell(s.ratio, f"rank {s.rank}: {s.ratio:.2f}") for s in group] for group in found.stages],
            label="stages beside their plan",
        )
        ratio, at, stage = max(known, key=lambda one: one[0])
        low = min(known, key=lambda one: one[0])[0]
        if ratio > 1.15 * low and ratio > 1.15:
            answer += f". Group {at}, rank {stage.rank}, is off most: {ratio:.2f} times what was planned"
        else:
            answer += f". All stages take about as planned beside one another ({low:.2f} to {ratio:.2f} times)"
    rows = [
        [f"{i}", f"{s.rank}", f"{s.layers[0]} to {s.layers[1]}", *map(milliseconds, (s.planned_s, s.measured_s)),
         percent(s.idle)]
        for i, group in enumerate(found.stages)
        for s in group
    ]  # fmt: skip
    body += table(["group", "rank", "layers", "planned", "own work", "not working"], rows)
    working = {rank for group in groups for rank in group.ranks}
    if resting := [str(rank) for rank in range(facts.run.ranks) if rank not in working]:
        answer += f". At rest: {', '.join(resting)}"
    return answer + ".", body


def _schedule(found: PipelineFacts, number: int) -> Markup:
    schedule, samples = found.schedule(number), found.plan.groups[number].samples
    if schedule is None:
        no = "Layers were not measured, so there is no schedule to draw."
        return element("p", f"Group {number}: {samples} samples. {no}")
    rows: list[tuple[str, Sequence[charts.Span]]] = []
    for device, stage in enumerate(found.stages[number]):
        spans = [
            charts.Span(
                start_s=start_s,
                end_s=end_s,
                kind=_KINDS.get(op.kind.value, "work"),
                tip=f"micro-batch {op.micro_batch} on rank {stage.rank}: {milliseconds(end_s - start_s)}",
                label=str(op.micro_batch),
            )
            for op, start_s, end_s in schedule.devices[device]
        ]
        rows.append((f"rank {stage.rank}", spans))
    told = f"{percent(bubble(schedule))} of its devices' time is bubble, as planned"
    keys = charts.legend([("work", "forward"), ("r2", "head"), ("r1", "backward")])
    drawing = charts.time_lines(rows, end_s=schedule.makespan_s, label="schedule of a group")
    return element("p", f"Group {number}: {samples} samples; {told}:") + keys + drawing


def staleness(facts: RunFacts) -> Drawn:
    """How old contributions were, against the bound; what was wasted; whether the server keeps up."""
    run = facts.run
    if run.engine != "stale":
        return "Only hetero_stale trains on older parameters and has a server; here every gradient is fresh.", Markup()
    if not run.counts:
        return "The server was never asked: log with StragglerMonitor() to have its counts here.", Markup()
    counts = run.counts
    ages = {int(age): float(n) for age, n in counts.get("staleness", {}).items()}
    total = math.fsum(ages.values())
    if not total:
        return "Nothing was applied yet when the server was last asked.", Markup()
    bound = run.about.get("bound")
    last = min(max(ages), _MOST_AGES)
    parts = [100.0 * ages.get(age, 0.0) / total for age in range(last)]
    parts.append(100.0 * math.fsum(n for age, n in ages.items() if age >= last) / total)
    names = [f"{age}{'+' if age == last < max(ages) else ''} versions" for age in range(last + 1)]
    body = element("p", "% of the samples by how many versions old their parameters were:") + charts.bars(
        [
            charts.Bar(name=name, parts=[("work", part)], text=f"{part:.3g} %" + (" (bound)" if bound == age else ""))
            for age, (name, part) in enumerate(zip(names, parts, strict=True))
        ],
        label="samples by staleness",
    )
    rows = [
        [told, reason, f"{number:g}"]
        for told, name in (("wasted", "discarded"), ("given again", "reissued"))
        for reason, number in named(counts.get(name)).items()
    ]
    body += table(["samples", "reason", "number"], rows) if rows else Markup()
    apply_s, longest_s = float(counts.get("apply_s") or 0.0), float(counts.get("longest_apply_s") or 0.0)
    mean_s = apply_s / max(1.0, float(counts.get("updates") or 0.0))
    wasted, given_again = (math.fsum(map(float, named(counts.get(n)).values())) for n in ("discarded", "reissued"))
    answer = (
        f"{percent(1.0 - ages.get(0, 0.0) / total)} of the samples were stale, by at most {max(ages)} versions"
        + (f" of {bound} allowed" if bound is not None else "; this policy sets no bound")
        + f". {wasted:g} samples were wasted, {given_again:g} given to another rank. At most"
        f" {counts.get('longest_queue', 0)} messages waited for the server; an update took"
        f" {milliseconds(mean_s)} in the mean and {milliseconds(longest_s)} at most."
    )
    return answer, body


def budget(facts: RunFacts) -> Drawn:
    """A controller's queues."""
    run = facts.run
    if not run.queues:
        return "No controller with a budget took part in this run.", Markup()
    names = list(dict.fromkeys(name for _, queues in run.queues for name in queues))
    x = [float(at) for at, _ in run.queues]
    body = charts.legend([(charts.rank_kind(i), name) for i, name in enumerate(names)]) + charts.lines(
        [
            charts.Line(name=n, kind=charts.rank_kind(i), x=x, y=[held.get(n, math.nan) for _, held in run.queues])
            for i, n in enumerate(names)
        ],
        label="virtual queue of each budget",
        x_name="step",
        y_name="batches' budget overspent (below 0: saved)",
        level=0.0,
        marks=[(float(change.step), change.reason) for change in run.changes[-60:]],
    )
    told = [
        f"{name}: {abs(value):.1f} batches' budget {'overspent' if value > 0 else 'saved'} at the end,"
        f" {percent(abs(value) / max(1, len(run.steps)))} of the run's"
        for name, value in run.queues[-1][1].items()
    ]
    return "; ".join(told) + ".", body


# ---- run A beside run B ---------------------------------------------------------------------------------------


def compare(facts: RunFacts) -> Drawn:
    """Run A against run B."""
    assert facts.other is not None
    rows: list[list[str]] = []
    answer, body = "Their steps cannot be compared: own work was not measured in both.", Markup()
    for name, a, b, less_is_better in compared(facts):
        change = b / a - 1.0 if a else math.nan
        told = better = ""
        if math.isfinite(change):
            told = f"{'+' if change > 0 else '-'}{percent(abs(change))}"
            if less_is_better is not None and abs(change) >= 0.005:
                better = "better" if (change < 0) == less_is_better else "worse"
        rows.append([name, _number(a), _number(b), told or "-", better])
        if told and not body:
            answer = f"B takes {percent(abs(change))} {'less' if change < 0 else 'more'} time per sample than A."
            drawn = [charts.Bar(name=run, parts=[(kind, s)], text=f"{s:.3g} s") for run, kind, s in
                     (("A", "r0", a), ("B", "r1", b))]  # fmt: skip
            body = charts.bars(drawn, label="time per 1,000 samples")
    head = ["", f"A: {facts.run.name}", f"B: {facts.other.name}", "change", ""]
    return answer, body + table(head, rows) if rows else Markup()


def per_sample_s(run: RecordedRun) -> float:
    """Returns what a sample took in training, validation and what is between epochs left out [s]; NaN where own work
    was not measured."""
    samples = math.fsum(step.samples for step in run.steps)
    return fmean(run.taken_s()) * len(run.steps) / samples if samples else math.nan


def _waiting(figure: Callable[[Ledger], float]) -> Callable[[RunFacts], float]:
    return lambda one: figure(one.waiting) if one.run.steps else math.nan


_FIGURES: tuple[tuple[str, Callable[[RunFacts], float], bool | None], ...] = (
    ("time per 1,000 samples, within epochs [s]", lambda one: 1e3 * per_sample_s(one.run), True),
    ("waiting [%]", _waiting(lambda waiting: 100 * waiting.waited), True),
    ("exchange of gradients [%]", _waiting(lambda waiting: 100 * waiting.exchange), True),
    ("device-seconds in steps", _waiting(lambda waiting: waiting.total.total_s), None),
    ("fit, start-up left out [s]", lambda one: _value(one.results[0], "fit_s"), True),
    ("samples per second of the fit", lambda one: _value(one.results[0], "samples_per_s"), False),
)


def compared(facts: RunFacts) -> list[tuple[str, float, float, bool | None]]:
    """Returns the figures that both runs, or one of them, have: name, the runs' values, whether less is better."""
    assert facts.other is not None
    other = RunFacts(facts.other, None, (facts.results[1], facts.results[0]))
    found = [(name, figure(facts), figure(other), less) for name, figure, less in _FIGURES]
    a, b = (named(result.get("metric")) for result in facts.results)
    names = {str(metric["name"]) for metric in (a, b) if metric.get("name")}
    if len(names) == 1:
        found.append((names.pop(), _value(a, "value"), _value(b, "value"), a.get("mode", b.get("mode")) == "min"))
    return [one for one in found if not (math.isnan(one[1]) and math.isnan(one[2]))]


def _value(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return math.nan if value is None else float(value)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
