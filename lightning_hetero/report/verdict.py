"""In words: what one came for, how long was waited, why, and what to do (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.report.figures import HOT, Alternatives, Scores

_LITTLE = 0.03  # of the ranks' time
_MUCH_EXCHANGE = 0.2
_EARLY = 0.35  # of all waiting, in the first tenth of the steps
_BLAMED = 0.6  # of all waiting, for one rank
_BY_TURNS = 0.1  # of the ranks' time that devices of the same speed wait, if each of them is slow at times
_GAIN = 1.05  # times as fast, from which on an engine has gained something
_ALIKE = 0.02  # of a time; less is no difference
_SHORT_S = 3e-3  # below that an engine's own work costs as much as it saves
_SETTLED = 30  # steps by which shares fit the devices

_ENGINES = ("balanced", "stale", "pipeline", "federated", "sharded")
_SHARES = ("balanced", "stale", "sharded")  # engines that give slow ranks less


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the report opens with.

    Attributes:
        headline: whether the engine was worth it; of stock DDP, how long was waited and what to gain.
        said: how long was waited, why, what to do, and what that gives, a paragraph each.
        level: ``good`` if nothing is to be won, ``fair``, or ``poor``.
    """

    headline: str
    said: tuple[str, ...] = ()
    level: Literal["good", "fair", "poor"] = "fair"


def engine_name(engine: str) -> str:
    """Returns an engine's name as the Trainer takes it; stock strategies as people call them."""
    return f"hetero_{engine}" if engine in _ENGINES else {"ddp": "stock DDP"}.get(engine, engine)


def stock_name(engine: str) -> str:
    """Returns what a run under an engine is compared with."""
    return "equal parts" if engine == "sharded" else "stock DDP"


def percent(part: float) -> str:
    """Returns a part of 1 in words: ``12 %``."""
    if math.isnan(part):
        return "unknown"
    value = 100.0 * part
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def milliseconds(seconds: float) -> str:
    """Returns a time in words: ``31.2 ms``."""
    if math.isnan(seconds):
        return "unknown"
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.1f} ms"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks in words: ``rank 2``, ``ranks 0, 2 and 3``."""
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def as_fast(ratio: float) -> str:
    """Returns a speed-up in words: ``2.4 times as fast``; of less than 1 ``1.25 times as long``."""
    more = max(ratio, 1.0 / ratio)
    return f"{more:.{1 if more >= 1.95 else 2}f} times as {'long' if ratio < 1.0 else 'fast'}"


def verdict_of(run: RecordedRun, ledger: RunLedger, scores: Scores | None, what: Alternatives | None) -> Verdict:
    """Returns the verdict on a run."""
    if ledger.problem:
        why = ledger.problem.removeprefix("not known: ")
        return Verdict(headline=f"How long ranks waited is not known: {why}.", said=(_to_know(run),))
    if run.ranks == 1:
        return Verdict(headline="There was one rank: it waits for nobody.", level="good")
    total, words = ledger.total, _worth(run, ledger, scores, what)
    waited = f"ranks waited for {total.idle_s:.1f} of {total.total_s:.1f} device-seconds ({percent(ledger.waited)})"
    said = begun(waited) + f": {_cause(run, ledger, scores)}"
    note = begun(ledger.note) + "." if ledger.note else ""
    texts = (said, _next_step(run, ledger, scores, what), "" if what is None else others_text(what), note)
    level = "good" if ledger.waited < _LITTLE else "fair" if ledger.waited < 0.2 else "poor"
    gain = _gain(run, what)
    if run.engine in _ENGINES and what is not None and "ddp" in what.engines:  # which NaN cannot hold the model
        level = "poor" if gain <= 1.0 - _ALIKE else "fair" if gain < _GAIN else "good"
    return Verdict(headline=words, said=tuple(filter(None, texts)), level=level)


def _to_know(run: RecordedRun) -> str:
    if run.missing:
        files = ", ".join(f"rank{rank}.jsonl" for rank in run.missing[:8]) + (", ..." if run.missing[8:] else "")
        return f"Each node writes its own ranks' files: copy {files} into the same folder and run the command again."
    if not run.steps:
        return "Add StragglerMonitor() to the Trainer's callbacks, next to HeteroTrace(), and run again."
    return "Record all ranks: give each of them HeteroTrace(), and run again."


def _gain(run: RecordedRun, what: Alternatives | None) -> float:
    """Returns how many times as fast as stock DDP the run was; NaN: not known."""
    return math.nan if what is None else what.engines.get("ddp", math.nan) / what.measured_s


def _worth(run: RecordedRun, ledger: RunLedger, scores: Scores | None, what: Alternatives | None) -> str:
    """Returns in a sentence or two what one came for."""
    name = engine_name(run.engine)
    if what is None:
        why = f" ({ledger.too_few})" if ledger.too_few else ""
        return f"{begun(name)} took {milliseconds(ledger.step_s)} per batch. What others would take is not known{why}."
    mine, ddp_s = milliseconds(what.measured_s), what.engines.get("ddp", math.nan)
    if run.engine in _ENGINES:
        if "ddp" in what.engines and math.isnan(ddp_s):
            return f"{name} trains a model that stock DDP cannot hold: {mine} per batch."
        stock = stock_name(run.engine)
        gain, ddp = _gain(run, what), f"{mine} per batch, {stock} about {milliseconds(ddp_s)}"
        if math.isnan(gain):
            return f"{name} took {mine} per batch. What {stock} would take is not known."
        if gain >= _GAIN:
            return f"{name} worked: {ddp}: {as_fast(gain)}."
        gained = "gained nothing" if gain > 1.0 - _ALIKE else "made it slower"
        return f"{name} {gained}: {ddp}. {_why_not(run, ledger, scores, what)}"
    best, best_s = what.best
    if best == run.engine:
        return f"Stay with {name}: {mine} per batch, and no other engine would be noticeably faster."
    waited = f"Devices waited {percent(ledger.waited)} of the time"
    other = f"{engine_name(best)} would take about {milliseconds(best_s)} per batch instead of {mine}"
    return f"{waited}; {other}: {as_fast(what.measured_s / best_s)}."


def _why_not(run: RecordedRun, ledger: RunLedger, scores: Scores | None, what: Alternatives) -> str:
    """Returns why an engine gained nothing."""
    if ledger.steps < _SETTLED:
        return f"There were only {ledger.steps} steps; shares fit the devices after about {_SETTLED}."
    if what.measured_s < _SHORT_S:
        return f"Steps are too short: below about {milliseconds(_SHORT_S)} an engine costs as much as it saves."
    if ledger.exchange > _MUCH_EXCHANGE:
        where = "at the server" if run.engine == "stale" else "in the exchange of gradients"
        return f"{percent(ledger.exchange)} of the time was spent {where}."
    known = [] if scores is None else [ratio for ratio in scores.typical if not math.isnan(ratio)]
    if known and max(known) < HOT * min(known) and ledger.waited < _BY_TURNS:
        return "The devices are about equally fast, so there is nothing to balance."
    if ledger.early >= _EARLY:
        first = ledger.steps // 10
        return f"{percent(ledger.early)} of the waiting was in the first {first} steps; a longer run may gain."
    if run.engine == "balanced" and ledger.caused[1] < _BLAMED:
        return "No single rank is slow all the time; hetero_stale suits ranks that are slow at random."
    return f"Ranks still waited {percent(ledger.waited)} of the time."


def _cause(run: RecordedRun, ledger: RunLedger, scores: Scores | None) -> str:
    if _exchanges_much(ledger):
        return f"{percent(ledger.exchange)} of the time went into the exchange of gradients, which all ranks wait for."
    told = f"; {percent(ledger.exchange)} went into the exchange of gradients." if ledger.exchange > 0.005 else "."
    if ledger.waited < _LITTLE:
        return f"no rank waited long{told}"
    if ledger.early >= _EARLY:
        told += f" {percent(ledger.early)} of the waiting was in the first {ledger.steps // 10} steps."
    (rank, part), slow = ledger.caused, [] if scores is None else scores.slow_ranks
    named = _named(run, rank)
    if run.staged:
        cause = f"stages take turns, and a pipeline has bubbles in between; {named} has the most work per batch"
    # Under an engine that gives slow ranks less, they are not the cause.
    elif scores is not None and rank in slow and (run.engine not in _SHARES or part >= _BLAMED):
        ratio = max(scores.typical[r] for r in slow)
        takes = f"{ranks_text(slow)} take up to" if len(slow) > 1 else f"{named} takes"
        cause = f"{takes} {ratio:.2f} times as long per item of work as the ranks' median"
    elif part < _BLAMED:
        cause = f"no single rank is to blame, {named} was waited for most ({percent(part)} of the waiting)"
    elif scores is not None and rank in scores.spells:
        cause = f"{named} is slow at times, not always: {percent(part)} of the waiting was for it"
    else:
        more = "which is not slow per item: it has more work than the others"
        cause = f"{percent(part)} of the waiting was for {named}, {more}"
    return cause + told


def _exchanges_much(ledger: RunLedger) -> bool:
    return ledger.exchange > max(_MUCH_EXCHANGE, ledger.waited)


def _named(run: RecordedRun, rank: int) -> str:
    device = run.devices.get(rank, "")
    return f"rank {rank}" + (f" ({device})" if device else "")


def begun(words: str) -> str:
    """Returns the words as the beginning of a sentence; `str.capitalize` would change a device's name."""
    return words if words.startswith("hetero_") else words[:1].upper() + words[1:]


def _next_step(run: RecordedRun, ledger: RunLedger, scores: Scores | None, what: Alternatives | None) -> str:
    best = what.best[0] if what is not None else run.engine
    if best != run.engine and best in _ENGINES:
        old = " Its gradients may be a few updates old." if best == "stale" else ""
        return f'Train with strategy="{engine_name(best)}"; nothing else in your code changes.{old}'
    if best != run.engine:
        return f"Train with {engine_name(best)}."
    if _exchanges_much(ledger):
        return (
            "Exchange less often or less: a larger batch per device, accumulate_grad_batches, or"
            " gradients in fewer bits."
        )
    if ledger.waited < _LITTLE:
        return "Nothing to do about waiting."
    if run.staged:
        return "More and smaller micro-batches make bubbles smaller; compare stages with their plan below."
    if scores is not None and scores.spells:
        return f"Look at what else runs on {ranks_text(scores.spells)}."
    if ledger.early >= _EARLY:
        return "A longer run waits less; there is nothing to do about the rest."
    rank, part = ledger.caused
    todo = f"look at {_named(run, rank)}" if part >= _BLAMED else "steps differ, and larger batches would even them out"
    return f"No other engine would gain enough to change; {todo}."


def others_text(what: Alternatives) -> str:
    """Returns what each other engine would take, in a sentence; empty: none was asked about."""
    words: list[str] = []
    for engine, seconds in what.engines.items():
        if engine == what.engine:
            continue
        if math.isnan(seconds):
            words.append(f"{engine_name(engine)} cannot hold the model")
        else:
            ratio = what.measured_s / seconds
            than = "" if abs(ratio - 1.0) < _ALIKE else f" ({as_fast(ratio)})"
            name = stock_name(what.engine) if engine == "ddp" else engine_name(engine)
            words.append(f"{name} would take about {milliseconds(seconds)}{than}")
    took = f"{engine_name(what.engine)} took {milliseconds(what.measured_s)} per global batch of {what.samples} samples"
    return begun("; ".join([took, *words]) + ".") if words else ""
