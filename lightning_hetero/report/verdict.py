"""In words: how long was waited, why, what to do, what that gives, and which ranks and stages are slow (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hetero.record.ledger import Ledger
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.report.scores import Scores
from lightning_hetero.report.spent import Outlier, StepStage, StepStages, outliers_of
from lightning_hetero.report.what_if import Alternatives

_LITTLE = 0.03  # of the ranks' time
_MUCH_EXCHANGE = 0.2
_EARLY = 0.35  # of all waiting, in the first tenth of the steps
_BLAMED = 0.6  # of all idling, for one rank

_MUCH = 0.2  # of a step; a stage that all ranks share is named from here on
_TELLING = 100.0  # times the median; beyond, the median is next to nothing
_MOST_NAMED = 6  # ranks in a sentence
_SHARES = ("balanced", "stale")  # engines that give slow ranks less

STRATEGIES = {
    "ddp": "stock DDP",
    "balanced": 'strategy="hetero_balanced"',
    "stale": 'strategy="hetero_stale"',
    "pipeline": 'strategy="hetero_pipeline"',
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the report opens with.

    Attributes:
        waited: how long, of how many device-seconds.
        cause: why.
        next_step: what to do.
        gain: what that, or another engine, would give.
        level: ``good`` if nothing is to be won, ``fair``, or ``poor`` from a fifth of waiting on.
    """

    waited: str
    cause: str
    next_step: str
    gain: str = ""
    level: Literal["good", "fair", "poor"] = "fair"


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


def verdict_of(run: RecordedRun, waiting: Ledger, scores: Scores | None, what: Alternatives | None) -> Verdict:
    """Returns the verdict on a run."""
    if not run.steps:
        return Verdict(
            waited="How long ranks waited was not measured in this run.",
            cause="Under a stock strategy nothing times a rank's own work by itself.",
            next_step="Add StragglerMonitor() beside HeteroTrace() to the Trainer's callbacks, and run again.",
        )
    if run.ranks == 1:
        waited = "One device waits for nobody."
        return Verdict(waited=waited, cause="There was one rank.", next_step="Nothing to do here.", level="good")
    total = waiting.total
    return Verdict(
        waited=f"You waited {total.idle_s:.1f} of {total.total_s:.1f} device-seconds ({percent(waiting.waited)}).",
        cause=_cause(run, waiting, scores),
        next_step=_next_step(run, waiting, scores, what),
        gain="" if what is None else gain_text(what),
        level="good" if waiting.waited < _LITTLE else "fair" if waiting.waited < 0.2 else "poor",
    )


def _cause(run: RecordedRun, waiting: Ledger, scores: Scores | None) -> str:
    if _exchanges_much(waiting):
        return f"{percent(waiting.exchange)} of the time went into the exchange of gradients, which all ranks wait for."
    told = f"; {percent(waiting.exchange)} went into the exchange of gradients." if waiting.exchange > 0.005 else "."
    if waiting.waited < _LITTLE:
        return f"Nobody waits for long{told}"
    if waiting.early >= _EARLY:
        first = waiting.steps // 10
        told += f" {percent(waiting.early)} of the waiting was in the first {first} steps, while the run began."
    (rank, part), slow = waiting.caused, [] if scores is None else scores.slow_ranks
    named = _named(run, rank)
    if run.staged:
        cause = f"stages take turns, and between them a pipeline has bubbles; the most work per batch is {named}'s"
    # Under an engine that gives slow ranks less, they are no cause by themselves.
    elif scores is not None and rank in slow and (run.engine not in _SHARES or part >= _BLAMED):
        ratio = max(scores.typical[r] for r in slow)
        takes = f"{ranks_text(slow)} take up to" if len(slow) > 1 else f"{named} takes"
        cause = f"{takes} {ratio:.2f} times as long per item of work as the ranks' median"
    elif part < _BLAMED:
        cause = "no single rank: ranks are late by turns"
    elif scores is not None and rank in scores.spells:
        cause = f"{named} is slow at times, not always: {percent(part)} of the waiting was for it"
    else:
        more = "which is not slow per item: it has more work than the others"
        cause = f"{percent(part)} of the waiting was for {named}, {more}"
    return begun(cause) + told


def _exchanges_much(waiting: Ledger) -> bool:
    return waiting.exchange > max(_MUCH_EXCHANGE, waiting.waited)


def _named(run: RecordedRun, rank: int) -> str:
    device = run.devices.get(rank, "")
    return f"rank {rank}" + (f" ({device})" if device else "")


def begun(words: str) -> str:
    """Returns the words as the beginning of a sentence; `str.capitalize` would change a device's name."""
    return words[:1].upper() + words[1:]


def _next_step(run: RecordedRun, waiting: Ledger, scores: Scores | None, what: Alternatives | None) -> str:
    if _exchanges_much(waiting):
        return (
            "Exchange less often or less: a larger batch per device, accumulate_grad_batches, or"
            " a DDP communication hook that compresses."
        )
    if waiting.waited < _LITTLE:
        return "Nothing to do about waiting."
    best = what.best[0] if what is not None else run.engine
    if best != run.engine and best in STRATEGIES:
        return f"Train with {STRATEGIES[best]}; data, model and optimizer stay as they are."
    if run.staged:
        return "More and smaller micro-batches make bubbles smaller; compare stages with their plan below."
    if scores is not None and scores.spells:
        return f"Look at what else runs on {ranks_text(scores.spells)}."
    if waiting.early >= _EARLY:
        return "A longer run waits less; nothing to do about the rest."
    rank, part = waiting.caused
    if part >= _BLAMED:
        return f"No engine of this package takes less; look at {_named(run, rank)}."
    return "No engine of this package takes less. Steps differ from one another: larger batches would even them out."


def gain_text(what: Alternatives) -> str:
    """Returns what another engine would give, in sentences."""
    (best, best_s), mine_s, ddp_s = what.best, what.measured_s, what.engines.get("ddp", math.nan)
    words = [f"A global batch takes {milliseconds(mine_s)}; no other engine would take 2 % less."]
    if best != what.engine:
        would = f"{STRATEGIES.get(best, best)} would take about {milliseconds(best_s)} per global batch instead of"
        words = [begun(f"{would} {milliseconds(mine_s)}: {mine_s / best_s:.2f} times as fast.")]
    if best == "stale" != what.engine:
        words.append("Its gradients may be a few updates old.")
    if "ddp" not in (what.engine, best) and not math.isnan(ddp_s):
        words.append(f"Stock DDP would take about {milliseconds(ddp_s)}.")
    return " ".join(words)


# ---- stages of a step -----------------------------------------------------------------------------------------


def stage_names(run: RecordedRun) -> Mapping[str, str]:
    """Returns what the stages are called, by kind."""
    names = {"work": "own work", "exchange": "exchange", "waiting": "waiting", "between": "between steps"}
    if run.engine == "stale":
        names["exchange"] = "server"
    elif run.engine == "federated":
        names |= {"work": "local steps", "exchange": "averaging"}
    elif run.staged:
        names["waiting"] = "bubbles"
    return names


def stage_answer(times: StepStages, names: Mapping[str, str]) -> str:
    """Returns in a sentence whether it is one rank, one stage, or all; ``names``: of the stages, see `stage_names`."""
    work = times.stages[0]
    if all(math.isnan(ratio) for ratio in work.ratios):
        return "Ranks hold different layers, which were not measured before the run, so they do not compare."
    others = [stage for stage in times.stages if stage.kind != "work" and times.part(stage) >= _MUCH]
    common = max(others, key=times.part, default=None)
    if found := outliers_of(times):
        kinds: dict[tuple[tuple[str, ...], bool, bool], list[Outlier]] = {}
        for one in found:
            kinds.setdefault((one.stages, one.everything, one.only), []).append(one)
        words = [_slow(alike, len(work.seconds), names) for alike in list(kinds.values())[:2]]
        if common is not None and common.kind == "exchange":
            words.append(_shared(times, common, names))
        return begun("; ".join(words) + ".")
    if common is not None:
        return f"No rank stands out: {_shared(times, common, names)}."
    told = f"{names['work']} is {percent(times.part(work))} of a step"
    return f"Nothing stands out: ranks take about as long as one another, and {told}."


def _slow(found: Sequence[Outlier], ranks: int, names: Mapping[str, str]) -> str:
    first, many = found[0], len(found) > 1
    named = f"{len(found)} of {ranks} ranks"
    if len(found) <= _MOST_NAMED:
        named = ranks_text(sorted(one.rank for one in found))
    stages = " and ".join(_in(names[kind]) for kind in first.stages)
    where = "in everything" if first.everything else stages + (" only" if first.only else "")
    by = "" if first.ratio > _TELLING else f" ({'up to ' if many else ''}{first.ratio:.1f} times the median)"
    return f"{named} {'are' if many else 'is'} slow {where}{by}"


def _shared(times: StepStages, stage: StepStage, names: Mapping[str, str]) -> str:
    """Returns what to say of a stage that is much of every rank's step."""
    spent = f"spend {percent(times.part(stage))} of a step {_in(names[stage.kind])}"
    if stage.kind != "waiting":
        return f"all ranks {spent}"
    by_turns = names["waiting"] == "waiting" and names["exchange"] == "exchange"
    return f"ranks {spent}" + (", by turns" if by_turns else "")


def _in(name: str) -> str:
    special = {"between steps": name, "waiting": name, "server": "at the server", "exchange": "in the exchange"}
    return special.get(name, f"in {name}")
