"""Views of every run: each answers one question from the run's facts (layer P).

A view is a function that returns its answer in a sentence and its drawing as markup; without a drawing the answer says
why nothing is drawn.

Views of what one engine alone has: its pipeline, its server, its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TypeAlias

from lightning_hetero.record.ledger import spent_in
from lightning_hetero.record.run import RecordedRun, RunStep, named
from lightning_hetero.report.figures import PipelineFacts, bubble, late_between, losses_of, throughput_of
from lightning_hetero.report.page import charts
from lightning_hetero.report.page.charts import Markup, element, joined
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.verdict import begun, milliseconds, percent, ranks_text

Drawn: TypeAlias = tuple[str, Markup]
"""A view's answer and its drawing."""

_STEPS = 6  # of the time lines
_MOST_CHANGES = 14  # of the table
_MOST_LOSSES = 3  # drawn
_SPENT = [("work", "own work"), ("exchange", "exchange of gradients"), ("idle", "waiting")]

def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Returns an HTML table in a box that scrolls."""
    names = element("thead", element("tr", *(element("th", cell) for cell in head)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("div", element("table", names, body), class_="scroll")


# ---- where the time went --------------------------------------------------------------------------------------


def timeline(facts: RunFacts) -> Drawn:
    """Actual and ideal, for a few steps."""
    run, steps = facts.run, facts.run.complete
    if not steps:
        return "No step was made by all ranks together.", Markup()
    first = min(int(0.75 * len(steps)), max(0, len(steps) - _STEPS))
    chosen = steps[first : first + _STEPS]
    begin_s = min(turn.begin_s for turn in chosen[0].turns.values())
    actual: dict[int, list[charts.Span]] = {rank: [] for rank in facts.ranks}
    ideal, now_s = list[charts.Span](), 0.0
    for step, spent in zip(chosen, spent_in(run, chosen), strict=True):
        for rank in facts.ranks:
            turn, own = step.turns[rank], spent[rank]
            tip = f"step {step.index}, rank {rank}: {turn.samples:g} samples, {milliseconds(own.compute_s)} of work"
            for _, kind, from_s, to_s in turn.slices({"idle": own.idle_s, "exchange": own.exchange_s}):
                span = charts.Span(start_s=from_s - begin_s, end_s=to_s - begin_s, kind=kind, tip=tip)
                actual[rank].append(span)
        work_s, exchange_s = ideal_s(run, step, min(own.exchange_s for own in spent.values()))
        ideal.append(charts.Span(start_s=now_s, end_s=now_s + work_s, kind="work"))
        ideal.append(charts.Span(start_s=now_s + work_s, end_s=now_s + work_s + exchange_s, kind="exchange"))
        now_s += work_s + exchange_s
    end_s = max(now_s, *(span.end_s for spans in actual.values() for span in spans))
    rows = [(f"rank {rank}", spans) for rank, spans in actual.items()]
    drawing = charts.time_lines(
        [*rows, ("ideal, each", ideal)], end_s=end_s, label="time lines of ranks, actual and ideal",
        breaks=[len(rows)],
    )  # fmt: skip
    ideal_is = "the same work, spread evenly," if run.staged else "the same samples, shared so that all end together,"
    answer = (
        f"{len(chosen)} steps took {milliseconds(end_s)}; {ideal_is}"
        f" {milliseconds(now_s)}. Epoch {chosen[0].epoch} from step {chosen[0].index} on.{facts.shown}"
    )
    return answer, charts.legend(_SPENT) + drawing


def ideal_s(run: RecordedRun, step: RunStep, exchange_s: float) -> tuple[float, float]:
    """Returns the work and the exchange of a step whose items are shared so that all ranks end together [s].

    Each rank's rate in this step holds. Where ranks hold different layers, the work is spread evenly instead.
    """
    turns = [turn for turn in step.turns.values() if turn.compute_s > 0]
    rate = math.fsum(turn.items / turn.compute_s for turn in turns)
    if run.staged or not rate > 0:
        return math.fsum(turn.compute_s for turn in turns) / max(1, len(turns)), exchange_s
    return math.fsum(turn.items for turn in turns) / rate, exchange_s


def spent(facts: RunFacts) -> Drawn:
    """Work, exchange and waiting of each rank, and for whom."""
    run, waiting = facts.run, facts.ledger
    rows: list[charts.Bar] = []
    for rank in facts.ranks:
        own = waiting.ranks[rank]
        parts = [("work", own.compute_s), ("exchange", own.exchange_s), ("idle", own.idle_s), ("cell", own.rest_s)]
        tip = f"work {own.compute_s:.2f} s, exchange {own.exchange_s:.2f} s, waiting {own.idle_s:.2f} s"
        part = own.idle_s / own.total_s if own.total_s > 0 else 0.0
        rows.append(charts.Bar(name=f"rank {rank}", parts=parts, text=f"{percent(part)} waiting", tip=tip))
    body = charts.legend([*_SPENT, ("cell", "idle, as decided")] if waiting.total.rest_s > 0 else _SPENT)
    body += charts.bars(rows, label="seconds of each rank by what they went into")
    what = "a bubble of the pipeline, or a slower stage" if run.staged else "a slower rank"
    waited, exchange = percent(waiting.waited), percent(waiting.exchange)
    answer = f"{waited} of all ranks' time is waiting for {what}, {exchange} exchange."
    blamed, part = waiting.caused
    if blamed >= 0 and waiting.waited > 0.005:
        answer += f" {percent(part)} of the waiting was for rank {blamed}."
    if late := late_between(run, waiting):
        rank, taken_s, ratio = late
        than = f" ({ratio:.1f} times the median)" if ratio < 100.0 else ""
        answer += f" Between steps, e.g. for its loader, rank {rank} takes {milliseconds(taken_s)}{than}."
    return answer + facts.shown, body


# ---- over time ------------------------------------------------------------------------------------------------


def course(facts: RunFacts) -> Drawn:
    """Losses and throughput over time."""
    return curves([("", facts.run)])


def curves(runs: Sequence[tuple[str, RecordedRun]]) -> Drawn:
    """Returns losses and throughput over time, each in one drawing for all of these named runs."""
    losses = [losses_of(run) for _, run in runs]
    names = sorted({name for found in losses for name in found}, key=lambda name: ("val" not in name.lower(), name))
    words, drawn = list[str](), {name: [found.get(name, []) for found in losses] for name in names[:_MOST_LOSSES]}
    for name, found in drawn.items():
        ends = [f"{of} {curve[-1][1]:.4g}".strip() for (of, _), curve in zip(runs, found, strict=True) if curve]
        words.append(f"{name} at the end: {', '.join(ends)}")
    drawn["samples per second"] = [throughput_of(run) for _, run in runs]
    body = Markup()
    for name, found in drawn.items():
        series = [
            charts.Line(
                name=of, kind=charts.rank_kind(i), x=[x for x, _ in curve], y=[y for _, y in curve], dots=name in names
            )
            for i, ((of, _), curve) in enumerate(zip(runs, found, strict=True))
            if len(curve) > 1
        ]
        if series:
            label, fit = f"{name} over time", name in names
            body += charts.lines(series, label=label, x_name="seconds", y_name=name, fit=fit, whole=False)
    nothing = "No loss was logged with self.log, so there is only the throughput" if body else "Nothing was recorded"
    return ". ".join(words or [nothing]) + ".", body


# ---- who is slow, and what was decided -------------------------------------------------------------------------


def scores(facts: RunFacts) -> Drawn:
    """Ranks and time: one rank, one stretch of time, or all; compared with the others and with itself."""
    found = facts.scores
    if found is None:
        return "Stages differ in what an item costs them: see the pipeline's stages.", Markup()
    ranks, columns = facts.ranks, [str(first) for first in found.first]
    drawing = charts.heat_map(
        [f"rank {rank}" for rank in ranks], columns,
        [
            [charts.ratio_cell(v, f"rank {r}, {at}: {v:.2f}") for at, v in zip(columns, found.others[r], strict=True)]
            for r in ranks
        ],
        label="seconds per item of each rank over time, compared with the ranks' median", x_name="step",
    )  # fmt: skip
    words = [
        f"{ranks_text(slow)} {'is' if len(slow) == 1 else 'are'} slow {when}"
        for slow, when in ((found.slow_ranks, "all along"), (found.spells, "for a while"))
        if slow
    ]
    if found.slow_windows:
        words.append(f"all ranks are slow in {len(found.slow_windows)} of {len(found.first)} stretches")
    body = element("p", "Seconds per item of work over the ranks' median; full colour from 1.5 on.") + drawing
    answer = ". ".join(map(begun, words)) or "Neither: all ranks take about as long per item of work, all along"
    return f"{answer}.{facts.shown}", body


def shares(facts: RunFacts) -> Drawn:
    """Shares over time, and each change's promise and outcome."""
    run, changes = facts.run, facts.run.outcomes()
    samples = [run.steps[number].samples_of(run.ranks) for number in run.full]
    if not samples or (len(set(samples)) == 1 and not changes):
        return "Shares never changed: every rank had the same samples in each full batch.", Markup()
    order = sorted(range(run.ranks), key=lambda rank: -samples[-1][rank])
    ranks = sorted(set(order[:4] + order[-4:]))
    x = [float(number) for number in run.full]
    body = charts.lines(
        [
            charts.Line(name=f"rank {rank}", kind=charts.rank_kind(rank), x=x, y=[float(one[rank]) for one in samples])
            for rank in ranks
        ],
        label="samples per rank over the steps", x_name="step", y_name="samples per rank",
        marks=[(float(change.step), f"step {change.step}: {change.reason}") for change in changes[-60:]],
    )
    held = [change for change in changes if not change.cancelled]
    gains = [(c.realised_gain, c.predicted_gain) for c in held if not math.isnan(c.realised_gain - c.predicted_gain)]
    answer = f"{len(held)} changes came into force"
    if gains:
        given, promised = map(fmean, zip(*gains, strict=True))
        answer += (
            f"; the {len(gains)} that were measured made a batch {percent(given)} shorter on average,"
            f" {percent(promised)} was expected"
        )
    elif not changes and run.engine == "stale":
        answer = "No change was decided: samples per rank follow from who asks for work"
    elif not changes:
        answer = "Samples per rank differ between batches, but no decision was recorded"
    if not run.staged:
        answer += f". The last full batch was shared {'/'.join(map(str, samples[-1][:16]))}"
    if changes:
        rows = [
            [str(one.step), one.reason, "/".join(map(str, one.shares[:16])) or one.kind, percent(one.predicted_gain),
             f"cancelled: {one.cancelled}" if one.cancelled else percent(one.realised_gain)]
            for one in changes[-_MOST_CHANGES:]
        ]  # fmt: skip
        body += table(["step", "reason", "shares", "expected", "measured"], rows)
    if len(changes) > _MOST_CHANGES:
        body += element("p", f"The last {_MOST_CHANGES} of {len(changes)} changes.")
    return answer + ".", body


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
        label="virtual queue of each budget", x_name="step", y_name="batches' budget overspent (below 0: saved)",
        level=0.0, marks=[(float(change.step), change.reason) for change in run.changes[-60:]],
    )  # fmt: skip
    told = [
        f"{name}: {abs(value):.1f} batches' budget {'overspent' if value > 0 else 'saved'} at the end,"
        f" {percent(abs(value) / max(1, len(run.steps)))} of the run's"
        for name, value in run.queues[-1][1].items()
    ]
    return "; ".join(told) + ".", body
