"""Several runs side by side (layer P)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from lightning_hetero.record.run import named
from lightning_hetero.report.course import last_metrics
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.page.markup import Markup
from lightning_hetero.report.page.views import table
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
    return table(["", *names_of(runs)], shown)


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
