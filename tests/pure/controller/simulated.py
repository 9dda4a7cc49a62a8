"""Runs a controller against a changing cluster, batch by batch, as training would.

batch starts -> the phase of the trace that holds -> the plan in force takes its time, operation by operation
batch ends   -> what was measured (with noise, if asked for) -> the controller decides
lag batches later the decision is in force; if layers move, training stops for the migration first
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from benchmarks.joint.machine import Batch, Machine, Phase
from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.solvers.chain.chain import Floats
from lightning_hetero.types import PipelinePlan


class Trace:
    """Phases in order of time.

    Args:
        phases: the first starts at 0.
        by_batch: they start at batches; False: at seconds.

    Raises:
        ValueError: no phase, the first not at 0, or not in order.
    """

    def __init__(self, phases: Sequence[Phase], *, by_batch: bool = True) -> None:
        self.phases, self.by_batch = tuple(phases), by_batch
        self._starts = [phase.start for phase in phases]
        if not phases or phases[0].start != 0.0 or sorted(self._starts) != self._starts:
            raise ValueError(f"phases start at {self._starts}: give one or more, in order, the first at 0")

    def at(self, batch: int, now_s: float) -> Phase:
        """Returns what holds as ``batch`` starts at ``now_s``."""
        return self.phases[bisect_right(self._starts, batch if self.by_batch else now_s) - 1]


class Decides(Protocol):
    """What answers measured batches; `Controller` is one."""

    def step(self, seen: Observation) -> Decision:
        """Returns what to do."""
        ...


class Unchanged:
    """Keeps its plan."""

    def __init__(self, plan: PipelinePlan) -> None:
        self._plan = plan

    def step(self, seen: Observation) -> Decision:
        """Returns the plan."""
        return Decision(batch=seen.batch, generation=0, kind="keep", plan=self._plan, reason="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the ranks cost, by rank; as in `LyapunovController`, which they should agree with."""

    prices: Sequence[float]
    rest_cost: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What came of it, by batch.

    Attributes:
        batch_s: time of the batch, pauses left out [s].
        pause_s: training stood still before it [s].
        money: what it took, pauses included.
        queues: after it, by constraint.
        decisions: all that changed something.
    """

    batch_s: Floats
    pause_s: Floats
    money: Floats
    queues: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    decisions: Sequence[Decision] = ()

    @property
    def mean_s(self) -> float:
        """Mean time of a batch, pauses included [s]."""
        return float((self.batch_s + self.pause_s).mean())


def simulate(
    decides: Decides,
    machine: Machine,
    trace: Trace,
    plan: PipelinePlan,
    *,
    batches: int,
    lag: int = 2,
    rates: Rates | None = None,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
    free_moves: bool = False,
) -> Run:
    """Trains for ``batches`` batches.

    Args:
        decides: the controller, made for ``plan``.
        machine: what plans take.
        trace: how the cluster changes.
        plan: in force at first.
        batches: number of them.
        lag: a decision made on batch t is in force from batch t + lag on, at least 1.
        rates: to add up costs; without them money is device seconds.
        noise: relative standard deviation of each measured time, and of the batch's own; needs ``rng``.
        rng: to draw noise from.
        free_moves: migrations take no time.
    """
    ranks = len(machine.cluster.devices)
    rates = rates or Rates(prices=[3600.0] * ranks)
    price = np.array(rates.prices)
    columns = {name: np.zeros(batches) for name in ("batch_s", "pause_s", "money")}
    queues: dict[str, Floats] = {}
    decisions: list[Decision] = []
    coming: deque[tuple[int, Decision]] = deque()
    now_s, generation, told = 0.0, 0, (1.0,) * ranks
    for t in range(batches):
        phase = trace.at(t, now_s)
        pause_s = 0.0
        while coming and coming[0][0] <= t:
            _, decision = coming.popleft()
            moves = machine.moves(plan, decision.plan)
            plan, generation = decision.plan, decision.generation
            pause_s += 0.0 if free_moves else machine.pause_s(moves, phase)
        batch = _noisy(machine.batch(plan, phase), noise, rng)
        prices = phase.prices or (1.0,) * ranks
        used = np.zeros(ranks)
        used[[rank for group in plan.groups for rank in group.ranks]] = 1.0
        held = used + rates.rest_cost * (1.0 - used)
        seconds = batch.seconds + pause_s
        columns["batch_s"][t], columns["pause_s"][t] = batch.seconds, pause_s
        columns["money"][t] = float(held @ (price * np.array(prices))) / 3600.0 * seconds
        changed = {r: float(p * price[r]) for r, (p, old) in enumerate(zip(prices, told, strict=True)) if p != old}
        told = prices
        devices = machine.cluster_in(phase).devices
        at_rest = [rank for rank in range(ranks) if not used[rank]]
        dummies_s = _drawn([1.0 / devices[rank].speed for rank in at_rest], noise, rng)
        rest_s = dict(zip(at_rest, dummies_s, strict=True))
        decision = decides.step(_seen(t, generation, batch, rest_s, changed, pause_s))
        for name, value in decision.queues.items():
            queues.setdefault(name, np.zeros(batches))[t] = value
        if decision.kind != "keep":
            decisions.append(decision)
            coming.append((t + max(lag, 1), decision))
        now_s += seconds
    return Run(**columns, queues=queues, decisions=decisions)


def _noisy(batch: Batch, noise: float, rng: np.random.Generator | None) -> Batch:
    links = _drawn([link.seconds for link in batch.links], noise, rng)
    return replace(
        batch,
        seconds=_drawn([batch.seconds], noise, rng)[0],
        work_s=tuple(_drawn(batch.work_s, noise, rng)),
        links=tuple(replace(link, seconds=s) for link, s in zip(batch.links, links, strict=True)),
    )


def _drawn(values: Sequence[float], noise: float, rng: np.random.Generator | None) -> list[float]:
    """Returns the values as they would be measured."""
    if not noise or rng is None:
        return list(values)
    drawn = np.array(values) * np.exp(noise * rng.standard_normal(len(values)) - 0.5 * noise * noise)
    return [float(value) for value in drawn]


def _seen(
    t: int,
    generation: int,
    batch: Batch,
    rest_s: Mapping[int, float],
    prices: Mapping[int, float],
    pause_s: float,
) -> Observation:
    return Observation(
        batch=t,
        generation=generation,
        batch_s=batch.seconds,
        work_s={rank: seconds for rank, seconds in enumerate(batch.work_s) if seconds > 0.0},
        links=[link for link in batch.links if link.seconds > 0.0],
        rest_s=rest_s,
        prices=prices,
        pause_s=pause_s,
    )
