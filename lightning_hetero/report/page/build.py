"""A run, or two beside one another, as one HTML file that needs nothing else (layer P).

No script, no font, no address; light and dark by the reader's preference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_hetero.record.run import RecordedRun, named
from lightning_hetero.report.page import engine_views, views
from lightning_hetero.report.page.drawing import DARK, LIGHT, MARKS, variables
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.page.markup import Markup, element
from lightning_hetero.report.verdict import STRATEGIES, verdict_of

_STYLE = f"""
:root{{color-scheme:light dark;{variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}}
main{{max-width:720px;margin:0 auto;padding:16px}}
h1{{font-size:1.3rem;margin:.2em 0}}h2{{font-size:1.15rem;margin:0}}
p{{margin:.5em 0}}.mute,.question{{color:var(--mute)}}.question{{font-style:italic;margin:0}}.answer{{font-weight:600}}
.verdict{{border-left:6px solid var(--fair);padding:.2em 0 .2em .9em;margin:1em 0}}
.verdict.good{{border-color:var(--good)}}.verdict.poor{{border-color:var(--poor)}}
.verdict .waited{{font-size:1.25rem;font-weight:700;margin:0}}
section{{border-top:1px solid var(--grid);padding:1.2em 0}}
nav{{display:flex;flex-wrap:wrap;gap:.2em .9em;font-size:.9rem}}a{{color:var(--work)}}
svg{{display:block;width:100%;max-width:560px;height:auto;margin:.4em 0;font:12px system-ui,sans-serif}}
{MARKS}.legend{{display:flex;flex-wrap:wrap;gap:.1em 1em;font-size:.9rem;margin:.4em 0}}
.key i{{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}}
.key .hot{{background:var(--hot)}}.key .cool{{background:var(--cool)}}
.scroll{{overflow-x:auto;max-width:100%}}
table{{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}}
th,td{{text-align:left;padding:.25em .7em .25em 0;border-bottom:1px solid var(--grid);vertical-align:top}}
th{{color:var(--mute);font-weight:600}}
@media print{{section{{break-inside:avoid}}}}
"""
_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    '<link rel="icon" href="data:,">'
)

_NOTES = (
    "A device-second is a second of one rank in a training step, from its start to the end of the exchange of"
    " gradients; validation and checkpoints are not in it. Own work holds loading and the optimizer's step under"
    " hetero_balanced, not under stock DDP.",
    "Waiting is a rank's time in a step less its own work and the exchange. The exchange is what the rank that comes"
    " last sees of it.",
    "What if: the planner's answer for the recorded times (the balancing policy itself; ranks that never wait for the"
    " stale engine; a pipeline's plan). Taken as they were: the exchange, and what a rank's samples cost it.",
)
_PIPELINE_NOTE = (
    "For a pipeline, what-if is its plan's model, multiplied by what batches took over what the model says of the plan."
)
_NO_STEPS = "Own work was not measured: add StragglerMonitor() to the Trainer's callbacks."
_ONE_RANK = "One rank has nobody to be compared with."


class _View(NamedTuple):
    """A part of the page; ``ranks``: from so many ranks with measured steps on it is drawn."""

    name: str
    title: str
    ranks: int
    draw: Callable[[RunFacts], views.Drawn]
    question: str


_COMPARE = _View("compare", "Run A and run B", 0, engine_views.compare, "Did it help?")
_VIEWS = (
    _View("timeline", "Time lines", 2, views.timeline,
          "Who works, who waits, and what would an even split look like?"),
    _View("spent", "Where the time went", 1, views.spent,
          "How much of each rank's time is work, exchange and waiting, and for whom?"),
    _View("stages", "Ranks and stages of a step", 2, views.stages, "Is it one rank, one stage, or all?"),
    _View("what-if", "What if", 2, views.what_if, "What would another engine win, a mended rank, or fewer cards?"),
    _View("shares", "Shares and decisions", 1, views.shares,
          "What was decided, why, and did it give what it promised?"),
    _View("scores", "Slow ranks, slow times", 2, views.scores,
          "Is it one rank, one stretch of time, or all; beside the others, or beside itself?"),
    _View("pipeline", "Pipeline", 0, engine_views.pipeline,
          "What does each stage do when, and is a stage slower than planned?"),
    _View("staleness", "Staleness and server", 0, engine_views.staleness,
          "How old were the parameters, and does the server keep up?"),
    _View("budget", "Budget", 0, engine_views.budget, "Is the budget kept, and when did it press?"),
)  # fmt: skip


def page_of(
    run: RecordedRun,
    other: RecordedRun | None = None,
    results: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> str:
    """Returns the page of a run.

    Args:
        run: the run.
        other: another one; then the first view compares the two, and all others are the first run's.
        results: what their ``result.json`` say; empty: nothing.
    """
    facts = RunFacts(run, other, results)
    links, sections, absent = list[Markup](), list[Markup](), list[Markup]()
    for view in (*([] if other is None else [_COMPARE]), *_VIEWS):
        answer, body = _NO_STEPS if view.ranks and not run.steps else _ONE_RANK, Markup()
        if not view.ranks or (run.steps and run.ranks >= view.ranks):
            answer, body = view.draw(facts)
        if not body:
            absent.append(element("li", element("b", view.title), f": {answer}"))
            continue
        links.append(element("a", view.title, href=f"#{view.name}"))
        asked, answered = element("p", view.question, class_="question"), element("p", answer, class_="answer")
        sections.append(element("section", element("h2", view.title), asked, answered, body, id=view.name))
    if absent:
        sections.append(element("section", element("h2", "Left out"), element("ul", *absent), id="left-out"))
    verdict = verdict_of(run, facts.waiting, facts.scores, facts.alternatives)
    said = [element("p", text) for text in (verdict.cause, verdict.next_step, verdict.gain) if text]
    notes = [*_NOTES, *([_PIPELINE_NOTE] if run.engine == "pipeline" else []), *(f"Fault: {one}" for one in run.faults)]
    counted = element("ul", *(element("li", note) for note in notes))
    headline = element("p", " · ".join(_headline(run, results[0])), class_="mute")
    waited = element("p", verdict.waited, class_="waited")
    main = element(
        "main",
        element("header", element("h1", run.name), headline),
        element("div", waited, *said, class_=f"verdict {verdict.level}", id="verdict"),
        element("nav", *links),
        *sections,
        element("section", element("h2", "How it was counted"), counted, id="notes"),
    )
    head = element("head", Markup(_HEAD), element("title", run.name), element("style", Markup(_STYLE)))
    return Markup("<!DOCTYPE html>\n") + element("html", head, element("body", main), lang="en") + "\n"


def _headline(run: RecordedRun, result: Mapping[str, Any]) -> list[str]:
    facts = [STRATEGIES.get(run.engine, run.engine), f"{run.ranks} ranks", f"{run.batches} steps"]
    if scenario := result.get("scenario"):
        facts.append(f"emulation {scenario}")
    if result.get("fit_s") is not None:
        facts.append(f"fit {float(result['fit_s']):.1f} s")
    metric = named(result.get("metric"))
    if metric.get("value") is not None:
        facts.append(f"{metric['name']} {float(metric['value']):.4g}")
    return facts
