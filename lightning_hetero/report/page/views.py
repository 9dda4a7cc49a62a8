"""Views of every run, each with the question that it answers, and what all views are made of (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lightning_hetero.report.changes import changes_of, shares_of
from lightning_hetero.report.page.charts import (
    Bar,
    Line,
    Span,
    bars,
    heat_map,
    legend,
    lines,
    rank_kind,
    time_lines,
)
from lightning_hetero.report.run import Change, Run, Step
from lightning_hetero.report.scores import Scores
from lightning_hetero.report.verdict import milliseconds, percent, ranks_text
from lightning_hetero.report.waiting import Waiting, least_wait_s, spent_in

__all__ = [
    "NO_STEPS",
    "ONE_RANK",
    "View",
    "absent",
    "heat_view",
    "scores_view",
    "shares_view",
    "shown_ranks",
    "spent_view",
    "table",
    "timeline_view",
]

_MOST_RANKS = 16  # of a drawing
_STEPS = 6  # of the time lines
_SPENT = [("work", "own work"), ("exchange", "exchange of gradients"), ("idle", "waiting")]
_REST = ("cell", "at rest, as decided")
NO_STEPS = "Own work was not measured: add StragglerMonitor() to the Trainer's callbacks."
ONE_RANK = "One rank has nobody to be compared with."


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A part of the page.

    Attributes:
        name: its anchor.
        title: a few words.
        question: that it answers.
        answer: in a sentence; of a view without data, why there is none.
        body: HTML; empty: there is no data.
    """

    name: str
    title: str
    question: str
    answer: str
    body: str = ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an HTML table in a box that scrolls by itself."""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def absent(head: tuple[str, str, str], why: str) -> View:
    """Returns a view without data: its name, title and question, and why there is none."""
    return View(name=head[0], title=head[1], question=head[2], answer=why)


def shown_ranks(run: Run, waiting: Waiting) -> list[int]:
    """Returns the ranks to draw: all, or of many those with most and least work."""
    ranks = list(range(run.ranks))
    if len(ranks) <= _MOST_RANKS:
        return ranks
    by_work = sorted(ranks, key=lambda rank: -waiting.ranks[rank].compute_s)
    half = _MOST_RANKS // 2
    return sorted(by_work[:half] + by_work[-half:])


def some(run: Run, ranks: Sequence[int]) -> str:
    """Returns what to say where not all ranks are drawn."""
    return "" if len(ranks) == run.ranks else f" Shown: the {len(ranks)} of {run.ranks} ranks with most and least work."


# ---- where the time went --------------------------------------------------------------------------------------


def timeline_view(run: Run, waiting: Waiting) -> View:
    """Actual beside ideal, for a few steps."""
    head = ("timeline", "Time lines", "Who works, who waits, and what would an even split look like?")
    steps = run.complete
    if not steps or run.ranks < 2:
        return absent(head, ONE_RANK if run.steps and run.ranks < 2 else NO_STEPS)
    first = min(int(0.75 * len(steps)), max(0, len(steps) - _STEPS))
    chosen = steps[first : first + _STEPS]
    begin_s = min(t.end_s - t.wait_s - t.compute_s for t in chosen[0].turns.values())
    ranks, least_s = shown_ranks(run, waiting), 0.0 if run.meets else least_wait_s(run)
    actual: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for step in chosen:
        for rank, spent in spent_in(run, step, least_s=least_s).items():
            if rank in actual:
                turn = step.turns[rank]
                tip = (
                    f"epoch {step.epoch}, step {step.index}, rank {rank}: {turn.samples:g} samples,"
                    f" {milliseconds(spent.compute_s)} work, {milliseconds(spent.idle_s)} waiting"
                )
                at_s = turn.end_s - turn.wait_s - turn.compute_s - begin_s
                for kind, seconds in (
                    ("work", spent.compute_s), ("idle", spent.idle_s), ("exchange", spent.exchange_s)
                ):  # fmt: skip
                    actual[rank].append(Span(start_s=at_s, end_s=at_s + seconds, kind=kind, tip=tip))
                    at_s += seconds
    ideal, now_s = list[Span](), 0.0
    for step in chosen:
        work_s, exchange_s = ideal_s(run, step, least_s)
        ideal.append(Span(start_s=now_s, end_s=now_s + work_s, kind="work"))
        ideal.append(Span(start_s=now_s + work_s, end_s=now_s + work_s + exchange_s, kind="exchange"))
        now_s += work_s + exchange_s
    end_s = max(max(span.end_s for spans in actual.values() for span in spans), now_s)
    rows = [(f"rank {rank}", spans) for rank, spans in actual.items()]
    drawing = time_lines(
        [*rows, ("ideal, each", ideal)],
        end_s=end_s,
        label="time lines of ranks, actual and ideal",
        breaks=[len(rows)],
    )
    ideal_is = "the same work, spread evenly," if run.staged else "the same samples, shared so that all end together,"
    answer = (
        f"{len(chosen)} steps took {milliseconds(end_s)}; {ideal_is}"
        f" {milliseconds(now_s)}. Epoch {chosen[0].epoch} from step {chosen[0].index} on.{some(run, ranks)}"
    )
    return View(name=head[0], title=head[1], question=head[2], answer=answer, body=legend(_SPENT) + drawing)


def ideal_s(run: Run, step: Step, least_s: float) -> tuple[float, float]:
    """Returns the work and the exchange of a step whose items are shared so that all ranks end together [s].

    Each rank's rate in this step holds. Where ranks hold different layers, the work is spread evenly instead.
    """
    spent = spent_in(run, step, least_s=least_s)
    exchange_s = min(one.exchange_s for one in spent.values())
    turns = [turn for turn in step.turns.values() if turn.compute_s > 0]
    rate = math.fsum(turn.items / turn.compute_s for turn in turns)
    if run.staged or not rate > 0:
        return math.fsum(turn.compute_s for turn in turns) / max(1, len(turns)), exchange_s
    return math.fsum(turn.items for turn in turns) / rate, exchange_s


def spent_view(run: Run, waiting: Waiting) -> View:
    """Compute, communication, idle, and for whom."""
    head = ("spent", "Where the time went", "How much of each rank's time is work, exchange and waiting, and for whom?")
    if not run.steps:
        return absent(head, NO_STEPS)
    ranks = shown_ranks(run, waiting)
    rows: list[Bar] = []
    for rank in ranks:
        own = waiting.ranks[rank]
        tip = f"work {own.compute_s:.2f} s, exchange {own.exchange_s:.2f} s, waiting {own.idle_s:.2f} s"
        part = own.idle_s / own.total_s if own.total_s > 0 else 0.0
        rows.append(
            Bar(
                name=f"rank {rank}",
                parts=[
                    ("work", own.compute_s), ("exchange", own.exchange_s), ("idle", own.idle_s), ("cell", own.rest_s),
                ],
                text=f"{percent(part)} waiting",
                tip=tip,
            )
        )
    body = legend([*_SPENT, _REST] if waiting.total.rest_s > 0 else _SPENT)
    body += bars(rows, label="seconds of each rank by what they went into")
    blamed, part = waiting.caused
    if blamed >= 0 and waiting.waited > 0.005:
        caused = [
            Bar(name=f"rank {rank}", parts=[("idle", waiting.caused_s[rank])], text=f"{waiting.caused_s[rank]:.1f} s")
            for rank in ranks
        ]
        body += "<p>Waiting of the others while this rank was the slowest of a step:</p>"
        body += bars(caused, label="waiting that each rank caused")
    what = "a bubble of the pipeline, or a slower stage" if run.staged else "a slower rank"
    answer = (
        f"{percent(waiting.waited)} of all ranks' time is waiting for {what},"
        f" {percent(waiting.exchange)} exchange."
        + (f" {percent(part)} of the waiting was for rank {blamed}." if waiting.waited > 0.005 else "")
        + some(run, ranks)
    )
    return View(name=head[0], title=head[1], question=head[2], answer=answer, body=body)


# ---- who is slow ----------------------------------------------------------------------------------------------


def heat_view(run: Run, scores: Scores | None) -> View:
    """Ranks and time: one rank, one stretch of time, or all?"""
    head = ("heat", "Slow ranks, slow times", "Is it one rank, one stretch of time, or all?")
    if scores is None:
        why = "Stages differ in what an item costs them: see the pipeline's stages." if run.staged else NO_STEPS
        return absent(head, ONE_RANK if run.steps and run.ranks < 2 else why)
    order = sorted(range(run.ranks), key=lambda rank: -scores.typical[rank])[:_MOST_RANKS]
    ranks = sorted(order)
    columns = [str(first) for first in scores.first]
    drawing = heat_map(
        [f"rank {rank}" for rank in ranks],
        columns,
        [scores.others[rank] for rank in ranks],
        label="seconds per item of each rank over time, beside the ranks' median",
        x_name="step",
    )
    words: list[str] = []
    if slow := scores.slow_ranks:
        words.append(f"{ranks_text(slow)} {'is' if len(slow) == 1 else 'are'} slow all along".capitalize())
    if spells := scores.spells:
        words.append(f"{ranks_text(spells)} {'is' if len(spells) == 1 else 'are'} slow for a while".capitalize())
    if scores.slow_windows:
        words.append(f"All ranks are slow in {len(scores.slow_windows)} of {len(scores.first)} stretches")
    answer = ". ".join(words) if words else "Neither: all ranks take about as long per item of work, all along"
    body = "<p>Seconds per item of work over the ranks' median; full colour from 1.5 on.</p>" + drawing
    return View(name=head[0], title=head[1], question=head[2], answer=answer + ".", body=body)


def scores_view(run: Run, scores: Scores | None) -> View:
    """Relative and individual scores."""
    head = ("scores", "Scores", "Is a rank slower than the others, or than itself?")
    if scores is None:
        return absent(head, "Ranks' times do not compare in this run.")
    ranks = sorted(sorted(range(run.ranks), key=lambda rank: -_most(scores.itself[rank]))[:8])
    chart = lines(
        [
            Line(
                name=f"rank {rank}", kind=rank_kind(rank), x=[float(n) for n in scores.first], y=scores.itself[rank]
            )
            for rank in ranks
        ],
        label="seconds per item of each rank over its own fastest fifth",
        x_name="step",
        y_name="times its own fastest fifth",
        level=1.0,
    )
    rows = [
        [str(rank), f"{scores.typical[rank]:.2f}", f"{_most(scores.itself[rank]):.2f}", _named(scores, rank)]
        for rank in range(min(run.ranks, 64))
    ]
    told = table(["rank", "beside the others (median)", "beside itself (worst)", "found slow"], rows)
    if scores.named:
        answer = "The test of StragglerMonitor has found " + "; ".join(
            f"rank {found.rank}, {found.slowdown:.2f} times, since epoch {found.epoch}, step {found.step}"
            for found in scores.named
        )
    else:
        answer = "The test of StragglerMonitor has found no slow rank"
    body = legend([(rank_kind(rank), f"rank {rank}") for rank in ranks]) + chart + told
    return View(name=head[0], title=head[1], question=head[2], answer=answer + ".", body=body)


def _most(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _named(scores: Scores, rank: int) -> str:
    found = next((found for found in scores.named if found.rank == rank), None)
    return "" if found is None else f"epoch {found.epoch}, step {found.step}"


# ---- what was decided -----------------------------------------------------------------------------------------


def shares_view(run: Run) -> View:
    """Shares over time, and each change's promise and outcome."""
    head = ("shares", "Shares and decisions", "What was decided, why, and did it give what it promised?")
    if not run.steps:
        return absent(head, NO_STEPS)
    changes, shares = changes_of(run), shares_of(run)
    if not shares.steps or (not shares.moved and not changes):
        return absent(head, "Shares never changed: every rank had the same samples in each full batch.")
    order = sorted(range(run.ranks), key=lambda rank: -shares.rows[rank][-1])
    ranks = sorted(order[:4] + order[-4:]) if run.ranks > 8 else list(range(run.ranks))
    x = [float(n) for n in shares.steps]
    chart = lines(
        [
            Line(name=f"rank {rank}", kind=rank_kind(rank), x=x, y=shares.rows[rank])
            for rank in dict.fromkeys(ranks)
        ],
        label="samples per rank over the steps",
        x_name="step",
        y_name="samples per rank",
        marks=[(float(change.step), f"step {change.step}: {change.reason}") for change in changes[-60:]],
    )
    body = legend([(rank_kind(rank), f"rank {rank}") for rank in dict.fromkeys(ranks)]) + chart
    held = [change for change in changes if not change.cancelled]
    known = [c for c in held if not math.isnan(c.realised_gain) and not math.isnan(c.predicted_gain)]
    answer = f"{len(held)} changes came into force"
    if not changes:
        answer = "No change was decided: samples per rank follow from who asks for work" if run.engine == "stale" else (
            "Samples per rank differ between batches, but no decision was recorded"
        )
    if known:
        promised = math.fsum(c.predicted_gain for c in known) / len(known)
        given = math.fsum(c.realised_gain for c in known) / len(known)
        answer += (
            f"; of the {len(known)} that were measured the mean gain was {percent(given)} of a batch,"
            f" and {percent(promised)} was promised"
        )
    if not run.staged and shares.last:
        answer += f". The last full batch was shared {'/'.join(map(str, shares.last[:16]))}"
    if changes:
        rows = [_change_row(change) for change in changes[-14:]]
        body += table(["step", "reason", "shares", "promised", "given"], rows)
        if len(changes) > 14:
            body += f"<p>The last 14 of {len(changes)} changes.</p>"
    return View(name=head[0], title=head[1], question=head[2], answer=answer + ".", body=body)


def _change_row(change: Change) -> list[str]:
    shares = "/".join(map(str, change.shares[:16])) or change.kind
    given = "given up: " + change.cancelled if change.cancelled else percent(change.realised_gain)
    return [str(change.step), change.reason, shares, percent(change.predicted_gain), given]
