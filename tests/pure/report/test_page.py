"""The page: well-formed, complete, nothing from outside, nothing drawn without data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from lightning_hetero.record.run import RecordedRun, RunChange
from lightning_hetero.report.page.build import names_of, page_of
from lightning_hetero.report.page.charts import element, joined
from lightning_hetero.report.page.facts import RunFacts
from tests.pure.report.kit import RUNS, SHOWN, balanced_run, run_with, stale_run


class Page(HTMLParser):
    """Reads a page and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.attributes if name == tag]


ALWAYS = {
    "course", "timeline", "spent", "shares", "scores", "pipeline", "staleness", "budget"
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_whole_and_needs_nothing_from_outside(name: str) -> None:
    text = page_of(RunFacts(RUNS[name]))
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|<script|@import|url\(|<img|<iframe", text)
    assert all((link.get("href") or "").startswith(("#", "data:")) for link in (*page.all("a"), *page.all("link")))
    ids = [attributes["id"] for _, attributes in page.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"] for link in page.all("a")} <= {f"#{one}" for one in ids}
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    assert not re.search(r'="[^"]*\b(?:nan|inf)\b[^"]*"', text)  # in a place or a size


@pytest.mark.parametrize("name", RUNS)
def test_every_view_has_a_title_a_question_and_an_answer_or_is_left_out_with_a_reason(name: str) -> None:
    text = page_of(RunFacts(RUNS[name]))
    found = dict(re.findall(r'<section id="([\w-]+)">(.*?)</section>', text, re.S))
    shown = set(found) - {"left-out", "notes"}
    assert shown == SHOWN[name]
    for one in shown:
        title, question, answer = re.match(
            r'<h2>([^<]+)</h2><p class="question">([^<]+)</p><p class="answer">([^<]+)</p>', found[one]
        ).groups()  # type: ignore[union-attr]
        assert title and question.endswith("?") and answer.endswith(".") and "<svg" in found[one], one
        assert "nan" not in answer.split()
    left_out = re.findall(r"<li><b>([^<]+)</b>: ([^<]+)</li>", found.get("left-out", ""))
    assert len(left_out) == len(ALWAYS - shown) and all(why for _, why in left_out)
    for svg in Page(text).all("svg"):
        assert svg["aria-label"] and re.fullmatch(r"0 0 420 \d+", svg["viewbox"] or "")


@pytest.mark.parametrize("name", RUNS)
def test_it_opens_with_the_verdict(name: str) -> None:
    text = page_of(RunFacts(RUNS[name]))
    assert text.index('id="verdict"') < text.index("<section")
    known = name not in ("one rank", "no work measured", "files missing")
    assert ("Ranks waited for" in text) == known


PAYLOAD = """<blink onx="1">'><blink onx='1'>"<!--&lt;"""
STRUCTURE = {"engine", "strategy"}  # words that say what is drawn


ATTRIBUTES = {
    "lang", "charset", "name", "content", "rel", "href", "class", "id", "viewbox", "role", "aria-label", "x", "y", "x1",
    "y1", "x2", "y2", "cx", "cy", "r", "width", "height", "points", "fill-opacity", "text-anchor",
}  # fmt: skip


def poisoned(value: Any, name: str = "", *, deep: bool) -> Any:
    """Puts the payload behind every string of a run, and of names behind those that the reader does not look for."""
    if isinstance(value, str):
        return value if name in STRUCTURE and not deep else value + PAYLOAD
    if isinstance(value, RecordedRun | RunChange):
        return replace(
            value, **{one.name: poisoned(getattr(value, one.name), one.name, deep=deep) for one in fields(value)}
        )
    if isinstance(value, Mapping):
        free = name in ("queues", "discarded", "reissued", "metrics", "versions", "hparams")
        return {k + PAYLOAD if free else k: poisoned(v, str(k), deep=deep) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(poisoned(v, name, deep=deep) for v in value)
    return value


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_no_string_of_a_trace_becomes_markup(name: str, deep: bool) -> None:
    """``deep``: also words that say what is drawn, e.g. the engine."""
    about = {"policy": "flexible", "bound": "2" if deep else 2, "strategy": "DDPStrategy"}
    about |= {"unix_s": 1e9, "versions": {"torch": "2"}, "commit": "abc", "hparams": {"lr": "0.1"}}
    cancelled = RunChange(step=1, reason="dear", cancelled="late", kind="plan")
    changes = RunChange(step=0, reason="slow", shares=(8, 8)), cancelled
    run = replace(RUNS[name], changes=(*RUNS[name].changes, *changes), faults=("rank 0: broken",), about=about)
    metric = {"name": "val_acc", "mode": "max", "value": 0.5}
    result = poisoned({"scenario": "two", "metric": metric, "fit_s": 1.0}, deep=deep)
    bad = poisoned(run, deep=deep)
    for many in (1, 2):
        page, own = (Page(page_of(*[RunFacts(one, result)] * many)) for one in (bad, run))
        told = " ".join(text for texts in page.texts.values() for text in texts) + str(page.attributes)
        if not deep:
            assert [tag for tag, _ in page.attributes] == [tag for tag, _ in own.attributes]
        assert "blink" not in {tag for tag, _ in page.attributes}
        assert {key for _, given in page.attributes for key in given} <= ATTRIBUTES
        assert told.count("blink onx") > 10 and "<!--" in told  # it is there, as text


def test_plain_strings_are_escaped_wherever_they_meet_markup() -> None:
    found = ["<i>" + element("b", "<"), element("b", "<") + "<i>", joined("<i>", element("b", "<"))]
    assert [str(one) for one in found] == ["&lt;i&gt;<b>&lt;</b>", "<b>&lt;</b>&lt;i&gt;", "&lt;i&gt;<b>&lt;</b>"]
    assert element("p", title='"<') == '<p title="&quot;&lt;"></p>'
    assert element("p", f"{element('b', 'lost')}") == "<p>&lt;b&gt;lost&lt;/b&gt;</p>"  # a plain string again


def test_marks_stay_inside_their_drawing() -> None:
    for run in RUNS.values():
        text = page_of(RunFacts(run))
        for height, body in re.findall(r'<svg viewBox="0 0 420 (\d+)"[^>]*>(.*?)</svg>', text, re.S):
            places = re.findall(r'<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"', body)
            for x, y, wide, high in (map(float, place) for place in places):
                assert min(x, y) >= 0 and x + wide <= 420.6 and y + high <= int(height) + 0.6


def test_staleness_is_told_against_its_bound() -> None:
    text = page_of(RunFacts(stale_run()))
    assert "6.2 % of the samples were stale, by at most 2 versions of 2 allowed. 8 samples were wasted, 4 given" in text
    assert "0.625 %" not in text and "1.56 % (bound)" in text


def words_of(text: str) -> str:
    return re.sub(r"<style>.*?</style>|<[^>]+>", " ", text, flags=re.S)


def test_the_head_says_when_where_with_what_and_how_the_run_was_made() -> None:
    text = page_of(RunFacts(RUNS["ddp"]))
    assert "<title>stock DDP: made</title>" in text and "2026-09-21 14:13 UTC · host host · torch 2.13" in text
    assert "commit 0123456789ab-dirty" in text and "<pre>max_epochs: 1</pre>" in text
    own = page_of(RunFacts(RUNS["ddp"], config="lr: <1>"))
    assert "<summary>Configuration</summary><pre>lr: &lt;1&gt;</pre>" in own
    assert "<h1>stock DDP</h1>" in page_of(RunFacts(replace(RUNS["ddp"], name="0")))


def test_losses_and_throughput_are_drawn_over_time() -> None:
    text = page_of(RunFacts(RUNS["ddp"]))
    assert "val_loss at the end: 0.025." in text and 'aria-label="val_loss over time"' in text
    assert 'aria-label="samples per second over time"' in text and "acc over time" not in text


def test_a_comparison_names_the_runs_and_says_which_is_faster_and_by_how_much() -> None:
    """3.05 s for 30 samples; 1.9 s for 16 each."""
    results = ({"fit_s": 20.0}, {"fit_s": 10.0})
    text = page_of(*map(RunFacts, (RUNS["ddp"], balanced_run()), results))
    title = "stock DDP and hetero_balanced compared"
    assert f"<title>{title}</title>" in text and f"<h1>{title}</h1>" in text
    more = (1.9 / 16) / (3.05 / 30)
    slower = f"hetero_balanced takes {more:.2f} times as long as stock DDP: 119 s per 1,000 samples instead of 102 s."
    assert slower in text
    assert "<td>fit [s]</td><td>20</td><td>10</td>" in text
    assert text.count('class="verdict') == 3  # of both, and of each
    three = page_of(*map(RunFacts, (RUNS["ddp"], RUNS["stale"], RUNS["files missing"])))
    assert "<h1>3 runs compared: stock DDP" in three and "files is missing" in words_of(three)


def test_runs_of_one_engine_are_told_apart() -> None:
    run = RUNS["ddp"]
    seeds = [RunFacts(replace(run, name=str(n)), {"overrides": ["strategy=ddp", f"seed={n}"]}) for n in (1, 2)]
    assert names_of(seeds) == ["stock DDP (seed=1)", "stock DDP (seed=2)"]
    assert names_of([RunFacts(replace(run, name=name)) for name in "ab"]) == ["stock DDP (a)", "stock DDP (b)"]
    assert names_of([RunFacts(run), RunFacts(run)]) == ["stock DDP (made) 1", "stock DDP (made) 2"]


def test_of_many_ranks_the_slow_ones_are_drawn() -> None:
    """Rank 12 takes twice as long per sample; of all ranks it has neither the most nor the least work."""
    steps = [(2 if rank == 12 else 4, 1.0 + 0.001 * rank, 0.1) for rank in range(24)]
    found = re.search(r'<section id="scores">(.*?)</section>', page_of(RunFacts(run_with([steps] * 12))), re.S)
    assert found is not None
    text = found[1]
    assert "Rank 12 is slow all along" in text and ">rank 12</text>" in text and ">rank 10</text>" not in text
    assert len(re.findall(r">rank \d+</text>", text)) == 16 and "Shown: 16 of 24 ranks, slow ones among them" in text
