"""A run, or a comparison of several, as one HTML file that needs nothing else (layer P).

No script, no font, no address; light and dark by the reader's preference.

Several runs side by side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from lightning_hetero.record.run import named
from lightning_hetero.report.figures import last_metrics
from lightning_hetero.report.page import views
from lightning_hetero.report.page.charts import COLOURS, MARKS, Markup, element
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.verdict import as_fast, begun, engine_name, milliseconds

_ALIKE = 0.02  # of the throughput; less is no difference


def names_of(runs: Sequence[RunFacts]) -> list[str]:
    """Returns a name for each run: its engine; of runs with the same one also what else was chosen, or the folder."""
    engines = [engine_name(one.run.engine) for one in runs]
    given = [[str(text) for text in one.result.get("overrides") or ()] for one in runs]
    counted, common = Counter(engines), set(given[0]).intersection(*given)
    found: list[str] = []
    for engine, one, own in zip(engines, runs, given, strict=True):
        also = " ".join(text for text in own if text not in common and "strategy" not in text) or one.run.name
        found.append(f"{engine} ({also})" if counted[engine] > 1 and also else engine)
    return [name if found.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(found)]


def outcome(runs: Sequence[RunFacts]) -> list[str]:
    """Returns which run was faster, and by how much, in sentences; the base is stock DDP, or the first."""
    names, speeds = names_of(runs), [one.ledger.samples_per_s for one in runs]
    known = [at for at, speed in enumerate(speeds) if speed > 0.0]
    words: list[str] = []
    base = next((at for at in known if runs[at].run.engine == "ddp"), known[0] if known else -1)
    took = {at: f"{milliseconds(runs[at].ledger.step_s)} per batch" for at in known}
    if len({round(runs[at].ledger.batch) for at in known}) > 1:  # batches do not compare
        took = {at: f"{1e3 / speeds[at]:.3g} s per 1,000 samples" for at in known}
    for at in sorted(known, key=lambda at: -speeds[at]):
        ratio = speeds[at] / speeds[base]
        if at != base:
            than = f"{'is' if ratio > 1.0 else 'takes'} {as_fast(ratio)} as"
            than = "takes as long as" if abs(ratio - 1.0) < _ALIKE else than
            instead = took[base].partition(" per ")[0]
            words.append(begun(f"{names[at]} {than} {names[base]}: {took[at]} instead of {instead}."))
    for name, one, speed in zip(names, runs, speeds, strict=True):
        if not speed > 0.0:
            words.append(begun(f"{name}: {one.ledger.problem or 'no time is known'}."))
    return words


def figures(runs: Sequence[RunFacts]) -> Markup:
    """Returns what the runs, or some of them, came to, a column per run."""
    metrics = [{**last_metrics(one.run), **_result_metric(one)} for one in runs]
    rows: list[tuple[str, list[float]]] = [(name, [figure(one) for one in runs]) for name, figure in _FIGURES]
    names = sorted({name for own in metrics for name in own})
    rows += [(name, [own.get(name, math.nan) for own in metrics]) for name in names]
    shown = [[name, *map(_number, own)] for name, own in rows if not all(map(math.isnan, own))]
    return views.table(["", *names_of(runs)], shown)


_FIGURES: tuple[tuple[str, Callable[[RunFacts], float]], ...] = (
    ("ms per batch", lambda one: 1e3 * one.ledger.step_s),
    ("samples per second", lambda one: one.ledger.samples_per_s), ("samples per batch", lambda one: one.ledger.batch),
    ("steps", lambda one: float(one.run.batches)), ("waiting [%]", lambda one: 100.0 * one.ledger.waited),
    ("exchange [%]", lambda one: 100.0 * one.ledger.exchange),
    ("device-seconds", lambda one: one.ledger.total.total_s), ("fit [s]", lambda one: _value(one.result.get("fit_s"))),
)  # fmt: skip


def _result_metric(one: RunFacts) -> dict[str, float]:
    metric = named(one.result.get("metric"))
    return {str(metric["name"]): _value(metric.get("value"))} if metric.get("name") else {}


def _value(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


_STYLE = COLOURS + (Path(__file__).parent / "page.css").read_text() + MARKS
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
    "What other engines would take: the planner's answer for the recorded times (the balancing policy itself; ranks"
    " that never wait for the stale engine; a pipeline's plan). Assumed unchanged: the exchange, and what a rank's"
    " samples cost it. What fewer or faster devices would give, the planner says of the same recording.",
)
_PIPELINE_NOTE = (
    "For a pipeline, that is its plan's model, multiplied by what batches took over what the model says of the plan."
)
_ONE_RANK = "there is one rank, which has no other to compare with"


class _View(NamedTuple):
    """A part of the page; ``ranks``: from so many ranks with measured steps on it is drawn."""

    name: str
    title: str
    ranks: int
    draw: Callable[[RunFacts], views.Drawn]
    question: str


_VIEWS = (
    _View("timeline", "Time lines", 2, views.timeline, "Who works, who waits, and what would an even split look like?"),
    _View("spent", "Where the time went", 1, views.spent,
          "How much of each rank's time is work, exchange and waiting, and for whom?"),
    _View("course", "Over time", 1, views.course, "How did loss and throughput develop?"),
    _View("shares", "Shares and decisions", 1, views.shares, "What was decided, why, and did it help as expected?"),
    _View("scores", "Slow ranks, slow times", 2, views.scores, "Is it one rank, one stretch of time, or all of them?"),
    _View("pipeline", "Pipeline", 0, views.pipeline,
          "What does each stage do when, and is a stage slower than planned?"),
    _View("staleness", "Staleness and server", 0, views.staleness,
          "How old were the parameters, and does the server keep up?"),
    _View("budget", "Budget", 0, views.budget, "Is the budget kept, and when did it press?"),
)  # fmt: skip


def page_of(*runs: RunFacts) -> str:
    """Returns the page of a run, or of several a comparison."""
    return _page_of_one(runs[0]) if len(runs) == 1 else _page_of_many(runs)


def _page_of_one(facts: RunFacts) -> str:
    run, verdict = facts.run, facts.verdict
    links, sections, absent = list[Markup](), list[Markup](), list[Markup]()
    for view in _VIEWS:
        answer, body = begun(facts.ledger.problem or _ONE_RANK) + ".", Markup()
        if not view.ranks or (not facts.ledger.problem and run.ranks >= view.ranks):
            answer, body = view.draw(facts)
        if not body:
            absent.append(element("li", element("b", view.title), f": {answer}"))
            continue
        links.append(element("a", view.title, href=f"#{view.name}"))
        sections.append(_section(view.name, view.title, view.question, answer, body))
    if absent:
        sections.append(element("section", element("h2", "Left out"), element("ul", *absent), id="left-out"))
    notes = [*_NOTES, *(f"Fault: {one}" for one in run.faults)]
    notes += [_PIPELINE_NOTE] if run.engine == "pipeline" else []
    counted = element("ul", *(element("li", note) for note in notes))
    sections.append(element("section", element("h2", "How it was counted"), counted, id="notes"))
    header = [element("h1", facts.title), element("p", " · ".join(_headline(facts)), class_="mute"), _origin(facts)]
    opened = _verdict(verdict.level, verdict.headline, verdict.said, "verdict")
    return _page(facts.title, header, opened, links, sections)


def _page_of_many(runs: Sequence[RunFacts]) -> str:
    names = names_of(runs)
    title = f"{' and '.join(names)} compared" if len(runs) == 2 else f"{len(runs)} runs compared: {', '.join(names)}"
    answer, body = views.curves([(name, one.run) for name, one in zip(names, runs, strict=True)])
    links = [element("a", "Side by side", href="#figures")]
    sections = [_section("figures", "Side by side", "What did each run come to?", "", figures(runs))]
    if body:
        sections.append(_section("course", "Over time", "Which run learns faster?", answer, body))
        links.append(element("a", "Over time", href="#course"))
    for number, (name, one) in enumerate(zip(names, runs, strict=True)):
        told = [*_headline(one), f"folder {one.run.name}"]
        verdict = _verdict(one.verdict.level, one.verdict.headline, one.verdict.said)
        inside = [element("h2", name), element("p", " · ".join(told), class_="mute"), _origin(one), verdict]
        sections.append(element("section", *inside, id=f"run-{number}"))
        links.append(element("a", name, href=f"#run-{number}"))
    first, *others = outcome(runs)
    return _page(title, [element("h1", title)], _verdict("good", first, others, "verdict"), links, sections)


def _page(
    title: str, header: Sequence[Markup], verdict: Markup, links: Sequence[Markup], body: Sequence[Markup]
) -> str:
    main = element("main", element("header", *header), verdict, element("nav", *links), *body)
    head = element("head", Markup(_HEAD), element("title", title), element("style", Markup(_STYLE)))
    return Markup("<!DOCTYPE html>\n") + element("html", head, element("body", main), lang="en") + "\n"


def _verdict(level: str, headline: str, said: Sequence[str], id: str = "") -> Markup:
    words = [element("p", headline, class_="waited"), *(element("p", text) for text in said)]
    return element("div", *words, class_=f"verdict {level}", id=id)


def _section(name: str, title: str, question: str, answer: str, body: Markup) -> Markup:
    asked = element("p", question, class_="question")
    answered = element("p", answer, class_="answer") if answer else Markup()
    return element("section", element("h2", title), asked, answered, body, id=name)


def _headline(facts: RunFacts) -> list[str]:
    run, result = facts.run, facts.result
    told = [f"{run.ranks} ranks" if run.ranks > 1 else "1 rank", f"{run.batches} steps"]
    if scenario := result.get("scenario"):
        told.append(f"emulation {scenario}")
    if result.get("fit_s") is not None:
        told.append(f"fit {float(result['fit_s']):.1f} s")
    metric = named(result.get("metric"))
    if metric.get("value") is not None:
        told.append(f"{metric['name']} {float(metric['value']):.4g}")
    return told


def _origin(facts: RunFacts) -> Markup:
    """Returns when, where and with what the run was made, and its configuration."""
    run, about = facts.run, facts.run.about
    told = list[str]()
    if isinstance(began_s := about.get("unix_s"), float):
        told.append(f"{datetime.fromtimestamp(began_s, timezone.utc):%Y-%m-%d %H:%M} UTC")
    hosts = dict.fromkeys(device.rpartition(" ")[0] for device in run.devices.values())
    if hosts := [host for host in hosts if host]:
        told.append(("hosts " if len(hosts) > 1 else "host ") + ", ".join(hosts[:4]) + (", …" if hosts[4:] else ""))
    told += [f"{name} {version}" for name, version in named(about.get("versions")).items()]
    if commit := about.get("commit"):
        told.append(f"commit {commit}")
    settings = {**named(about.get("trainer")), **named(about.get("hparams"))}
    config = facts.config or "\n".join(f"{name}: {value}" for name, value in settings.items())
    line = element("p", " · ".join(told), class_="mute") if told else Markup()
    more = element("details", element("summary", "Configuration"), element("pre", config))
    return line + more if config else line
