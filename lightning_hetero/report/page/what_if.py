"""What would help: other engines, a mended rank, fewer cards (layer P)."""

from __future__ import annotations

import math

from lightning_hetero.report.page.charts import Bar, Line, bars, legend, lines
from lightning_hetero.report.page.views import NO_STEPS, ONE_RANK, View, absent
from lightning_hetero.report.run import Run
from lightning_hetero.report.verdict import STRATEGIES, milliseconds, percent, ranks_text
from lightning_hetero.report.what_if import WhatIf

__all__ = ["what_if_view"]


def what_if_view(run: Run, what: WhatIf | None) -> View:
    """Other engines, mended ranks, dropped cards."""
    head = ("what-if", "What if", "What would another engine win, a mended rank, or fewer cards?")
    if what is None and run.steps and run.ranks > 1:
        why = "too few full global batches were recorded"
        if run.engine == "pipeline":
            why = "layers were not measured, so there is no model of the plan to ask"
        return absent(head, f"Nothing can be said: {why}.")
    if what is None:
        return absent(head, ONE_RANK if run.steps else NO_STEPS)
    own = STRATEGIES.get(what.engine, what.engine)
    rows = [Bar(name="as it was", parts=[("idle", what.measured_s)], text=milliseconds(what.measured_s))]
    rows += [
        Bar(name=_short(name), parts=[("work", seconds)], text=milliseconds(seconds))
        for name, seconds in what.engines.items()
        if not math.isnan(seconds) and not (name == what.engine == "pipeline")
    ]
    body = f"<p>A global batch of {what.samples} samples:</p>" + bars(rows, label="time of a batch by engine")
    best, best_s = what.best
    answer = (
        f"{STRATEGIES.get(best, best)}: about {milliseconds(best_s)} instead of {milliseconds(what.measured_s)}."
        if best != what.engine
        else f"No engine takes 2 % less than {own}."
    )
    if what.mended and what.few_s > 0:
        gains = [max(0.0, 1.0 - one.step_s / what.few_s) for one in what.mended]
        top = max(range(len(gains)), key=lambda i: gains[i])
        like = "the fastest device" if what.engine == "pipeline" else "the median of the others"
        if gains[top] > 0.005:
            body += f"<p>Saved under the same engine, if this rank were as fast as {like}:</p>"
            body += bars(
                [
                    Bar(name=f"rank {one.rank}", parts=[("work", 100.0 * gain)], text=percent(gain))
                    for one, gain in zip(what.mended, gains, strict=True)
                ],
                label="saved by a mended rank",
            )
        if gains[top] > 0.02:
            answer += f" Rank {what.mended[top].rank}, mended, would save {percent(gains[top])}."
        else:
            answer += " No single rank, mended, would save 2 %."
    if len(what.dropped) > 1:
        body += "<p>The same global batch without the slowest 0, 1, 2, … cards (memory is not looked at):</p>"
        kinds = [("r0", _short("ddp")), ("r1", _short(what.beside))]
        count = [float(len(one.ranks)) for one in what.dropped]
        body += legend(kinds) + lines(
            [
                Line(name=kinds[0][1], kind="r0", x=count, y=[1e3 * one.ddp_s for one in what.dropped], dots=True),
                Line(name=kinds[1][1], kind="r1", x=count, y=[1e3 * one.engine_s for one in what.dropped], dots=True),
            ],
            label="time of a batch by cards dropped",
            x_name="cards dropped, slowest first",
            y_name="ms per global batch",
        )
        answer += " " + _drop_answer(what)
    return View(name=head[0], title=head[1], question=head[2], answer=answer, body=body)


def _short(engine: str) -> str:
    return {"ddp": "stock DDP"}.get(engine, f"hetero_{engine}")


def _drop_answer(what: WhatIf) -> str:
    words: list[str] = []
    of_each = {"ddp": [one.ddp_s for one in what.dropped], what.beside: [one.engine_s for one in what.dropped]}
    for name, taken in of_each.items():
        pairs = zip(taken, (one.ranks for one in what.dropped), strict=True)
        known = [(seconds, ranks) for seconds, ranks in pairs if not math.isnan(seconds)]
        if not known:
            continue
        seconds, ranks = min(known, key=lambda pair: pair[0])
        saved = 1.0 - seconds / known[0][0]
        words.append(
            f"{_short(name)} is fastest with all cards"
            if not ranks or saved < 0.02
            else f"{_short(name)} is fastest without {ranks_text(sorted(ranks))} ({percent(saved)} less)"
        )
    joined = "; ".join(words)
    return joined[:1].upper() + joined[1:] + "."
