"""Views of what one engine alone has: its pipeline, its server, its budget (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.record.run import named
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
    """The schedule, its bubbles, and each stage compared with its plan."""
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
        ratio, at, stage = max(known, key=lambda one: one[0])
        low = min(known, key=lambda one: one[0])[0]
        if ratio > 1.15 * low and ratio > 1.15:
            answer += f". Group {at}, rank {stage.rank}, is off most: {ratio:.2f} times what was planned"
        else:
            answer += f". All stages take about as planned, relative to each other ({low:.2f} to {ratio:.2f} times)"
    rows = [
        [f"{i}", f"{s.rank}", f"{s.layers[0]} to {s.layers[1]}", *map(milliseconds, (s.planned_s, s.measured_s)),
         f"{s.ratio:.2f}", percent(s.idle)]
        for i, group in enumerate(found.stages)
        for s in group
    ]  # fmt: skip
    body += table(["group", "rank", "layers", "planned", "own work", "ratio", "not working"], rows)
    working = {rank for group in groups for rank in group.ranks}
    if resting := [str(rank) for rank in range(facts.run.ranks) if rank not in working]:
        answer += f". Idle: {', '.join(resting)}"
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
                start_s=start_s, end_s=end_s, kind=_KINDS.get(op.kind.value, "work"),
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
    body = charts.lines(
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
