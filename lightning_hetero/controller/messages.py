"""What goes into the online controller for each batch, and what comes out of it (layer P).

Plain values throughout: whoever measures (a run, a simulator, a planner) fills in an `Observation`, whoever carries out
(the runtime's migration, a simulator) reads a `Decision`. Neither needs to know the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_hetero.types import PipelinePlan

DecisionKind = Literal["keep", "shares", "plan", "rollback"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """What one direction between two ranks carried during a batch.

    Attributes:
        source, target: ranks.
        messages: number of those that were timed.
        size_bytes: of these together.
        seconds: they were on the wire, together: waiting for the sender's computation, or behind one another, excluded.
    """

    source: int
    target: int
    messages: int
    size_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One batch, as it was measured.

    Attributes:
        batch: number of the batch in the run, from 0; each batch at most once, in rising order.
        generation: of the plan that it ran under: `Decision.generation`, 0 for the first plan.
        batch_s: from its start to its end, a pause for a migration left out [s]; NaN: not measured.
        work_s: own work of the batch by rank [s], forward and backward of all micro-batches, of a leader with the code
            around the backbone; free of any waiting. Idle ranks, and those not measured, are left out.
        layer_s: optional: the same by rank and layer (in the order of the stage's layers) [s].
        links: what was measured of messages between stages; directions not measured are left out.
        rest_s: of idle ranks: what a computation that is always the same took [s]; its change counts.
        prices: money per hour by rank, from now on; ranks left out keep their price.
        micro_batches: sizes by group, if they were not the plan's (a short last batch).
        pause_s: training stood still for a migration just before this batch [s].
    """

    batch: int
    generation: int
    batch_s: float = math.nan
    work_s: Mapping[int, float] = field(default_factory=dict[int, float])
    layer_s: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    links: Sequence[LinkTime] = ()
    rest_s: Mapping[int, float] = field(default_factory=dict[int, float])
    prices: Mapping[int, float] = field(default_factory=dict[int, float])
    micro_batches: Sequence[Sequence[int]] | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the last change of structure, once it was in force for a few batches.

    Attributes:
        generation: of the plan that was judged.
        measured_s: mean time per batch since [s].
        realised_gain_s: per batch, against what the plan before would take now [s]; negative: a loss.
        kept: False: it goes back to the plan before.
    """

    generation: int
    measured_s: float
    realised_gain_s: float
    kept: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do from the next batch on for which it can be done.

    Attributes:
        batch: the batch whose measurement led to it.
        generation: of `plan`: one more than before if the plan changed, however little.
        kind: ``keep``: nothing changes; ``shares``: samples and micro-batches change, nothing moves; ``plan``: layers
            move, or other ranks rest; ``rollback``: back to the plan before.
        plan: from now on, whole.
        reason: in words, for people and events.
        predicted_s: time of a batch under `plan`, the model's, corrected by what batches took so far [s].
        gain_s: time per batch that is won against keeping the plan [s]; negative where money is saved instead.
        cost_gain: by constraint of the budget: what is saved per batch, as a part of its budget.
        queues: by constraint, after this batch: how many batches' budget are overspent; negative: saved.
        outcome: of the last change of structure, in the decision that follows its trial.
    """

    batch: int
    generation: int
    kind: DecisionKind
    plan: PipelinePlan
    reason: str
    predicted_s: float = math.nan
    gain_s: float = 0.0
    cost_gain: Mapping[str, float] = field(default_factory=dict[str, float])
    queues: Mapping[str, float] = field(default_factory=dict[str, float])
    outcome: Outcome | None = None
