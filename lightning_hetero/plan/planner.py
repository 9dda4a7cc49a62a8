"""All engines on one set-up, ranked, and which of them to take (layer P)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hetero.checked import finite_or_none
from lightning_hetero.cluster.spec import cluster_to_plain
from lightning_hetero.plan.estimate import EngineName, Estimate, strategy_name
from lightning_hetero.plan.parallel import balanced, ddp, sharded
from lightning_hetero.plan.pipelines import pipeline
from lightning_hetero.plan.setup import Setup
from lightning_hetero.plan.stale import stale
from lightning_hetero.shares.alone import fastest_alone

ENGINES: dict[EngineName, Callable[[Setup], Estimate]] = {
    "ddp": ddp, "balanced": balanced, "sharded": sharded, "pipeline": pipeline, "stale": stale,
}  # fmt: skip
"""From the one that changes least of how a model trains to the one that changes most."""

_ALIKE = 0.02  # of the throughput: less is not worth another engine
_ALIKE_STALE = 0.10  # nor is so much, where updates become others
_RATES = 8  # of links, by which devices are told apart that may train alone
_MOST_LEFT_OUT = 16  # devices up to which it is tried to leave some out
_SHORT_S = 3e-3  # README: of shorter steps, what is left out here is too large a part

LEFT_OUT = "Not counted: data loading, the optimizer's step and the framework's own time."
"""What each of the times is without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        setup: what was asked.
        estimates: those that can train this first, the fastest at the top.
        chosen: the engine to take; None: none can train.
        base: stock DDP, on the devices that do not rest under ``chosen``; None: it was not asked about.
        gone: ranks without which the balanced engine is faster than what is chosen with them.
        alone: the balanced engine without them; None: all devices are worth it, or there are too many to look.
        verdict: in a sentence.
    """

    setup: Setup
    estimates: tuple[Estimate, ...]
    chosen: Estimate | None
    base: Estimate | None
    gone: tuple[int, ...] = ()
    alone: Estimate | None = None

    @property
    def gain(self) -> float:
        """Throughput of the chosen engine over that of ``base``; NaN if one of them cannot train."""
        if self.base is None or not self.base.ok or self.chosen is None:
            return math.nan
        return self.chosen.samples_per_s / self.base.samples_per_s

    @property
    def too_short(self) -> bool:
        """Whether updates are so short that what is left out of the times decides."""
        return self.chosen is not None and self.chosen.step_s < _SHORT_S

    @property
    def verdict(self) -> str:
        """What to take, in a sentence, with the limits that it has."""
        chosen, base = self.chosen, self.base
        if chosen is None:
            return "no engine can train this: " + "; ".join(e.reasons[0] for e in self.estimates if e.reasons)
        text = (
            f"strategy={chosen.strategy}: {chosen.step_s * 1e3:.1f} ms per update, {chosen.samples_per_s:.4g} samples/s"
        )
        if self.too_short:
            return (
                f"{text}: too short to plan. Below about {_SHORT_S * 1e3:.0f} ms what is not counted decides: make"
                " updates longer (a larger batch or model), or stay with DDP"
            )
        rest = ", ".join(map(self.setup.name, chosen.resting))
        on = f" on the same {len(base.work_s)} devices" if rest and base is not None else ""
        if base is not None and chosen.engine == "ddp":
            text += "; stay with DDP: no engine is enough faster to justify the change"
        elif base is not None:
            ahead = f", {self.gain:.2f} times as fast as stock DDP{on}"
            text += ahead if base.ok else f"; stock DDP cannot train this: {base.reasons[0]}"
        if self.alone is not None:
            gone, alone_s = ", ".join(map(self.setup.name, self.gone)), self.alone.step_s
            return f"{text}; without {gone} an update would take {alone_s * 1e3:.1f} ms: leave out such devices"
        return f"{text}; leave out the idle devices: {rest}" if rest else text

    def as_plain(self) -> dict[str, Any]:
        """Returns strict JSON values."""
        return {
            "global_batch": self.setup.global_batch, "cluster": cluster_to_plain(self.setup.cluster),
            "verdict": self.verdict, "engine": None if self.chosen is None else self.chosen.strategy,
            "gain": finite_or_none(self.gain),
            "estimates": [estimate.as_plain(self.setup) for estimate in self.estimates],
        }  # fmt: skip


def plan(setup: Setup, engines: Sequence[EngineName] = tuple(ENGINES), *, pipeline_ahead: float = 1.0) -> Plan:
    """Estimates the engines and ranks them.

    The sharded engine is in question where a device does not hold the whole model.

    Taken is the engine that changes least of how the model trains among those with nearly the best throughput: within
    2 %; the stale engine, whose updates are others, must be more than 10 % ahead.

    Args:
        setup: what is asked.
        engines: those in question.
        pipeline_ahead: least throughput of a pipeline that is taken, over that of DDP and of the balanced engine.

    Raises:
        ValueError: no engine, or an unknown one.
    """
    if not engines or set(engines) - set(ENGINES):
        known = ", ".join(map(strategy_name, ENGINES))
        raise ValueError(f"engines={list(engines)!r} must be one or more of {known}")
    spacious = min(setup.most_samples()) > 0
    asked = [name for name in engines if name != "sharded" or not spacious]
    estimates = [estimate(setup) for name, estimate in ENGINES.items() if name in asked]
    chosen = _choose(estimates, pipeline_ahead)
    base = next((estimate for estimate in estimates if estimate.engine == "ddp"), None)
    if base is not None and base.ok and chosen is not None and chosen.resting:
        base = ddp(setup.without(chosen.resting))
    estimates.sort(key=lambda estimate: -estimate.samples_per_s)
    gone, alone = _alone(setup, chosen) if "balanced" in asked and chosen is not None else ((), None)
    return Plan(setup=setup, estimates=tuple(estimates), chosen=chosen, base=base, gone=gone, alone=alone)


def _alone(setup: Setup, chosen: Estimate) -> tuple[tuple[int, ...], Estimate | None]:
    """Returns the ranks without which the balanced engine is faster than what is chosen, and what it then takes."""
    if not 1 < setup.ranks <= _MOST_LEFT_OUT:
        return (), None
    ranks, links = range(setup.ranks), setup.cluster.links
    rates = {links[a][b].bandwidth_bytes_per_s for a in ranks for b in ranks if a != b}
    networks = {
        tuple(b for b in ranks if b == a or links[a][b].bandwidth_bytes_per_s >= rate)
        for rate in sorted(rates)[1 : 1 + _RATES] for a in ranks
    }  # fmt: skip

    def left_out(kept: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank not in kept)

    kept, _ = fastest_alone(
        setup.step_costs(), setup.global_batch, upper=setup.most_samples(),
        among=sorted(networks), exchange_s=lambda some: setup.without(left_out(some)).exchange(),
    )  # fmt: skip
    gone = left_out(kept)
    alone = balanced(setup.without(gone)) if gone else None
    if alone is None or alone.samples_per_s <= (1.0 + _ALIKE) * chosen.samples_per_s:
        return (), None
    return gone, alone


def _choose(estimates: Sequence[Estimate], pipeline_ahead: float) -> Estimate | None:
    whole = max((e.samples_per_s for e in estimates if e.ok and e.engine in ("ddp", "balanced")), default=0.0)
    able = [e for e in estimates if e.ok and (e.engine != "pipeline" or e.samples_per_s >= pipeline_ahead * whole)]
    same = [estimate for estimate in able if estimate.engine != "stale"]
    best = max((estimate.samples_per_s for estimate in same), default=0.0)
    chosen = next((e for e in same if e.samples_per_s >= (1.0 - _ALIKE) * best), None)
    other = next((e for e in able if e.engine == "stale"), None)
    if other is not None and other.samples_per_s > (1.0 + _ALIKE_STALE) * best:
        return other
    return chosen
