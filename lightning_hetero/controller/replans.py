"""What a run's changes of plan were for, and what came of them (layer P)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lightning_hetero.controller.messages import Decision, Outcome

_COMPARED = 3  # batches before and after a change


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """A change of plan, or one that was given up.

    Attributes:
        step: batches trained before it held, or was given up.
        kind: ``"shares"``: the same ranks and layers; ``"plan"``; ``"rollback"``: back to the plan before.
        reason: in words.
        generation: number of the plan, from 1; the first plan is 0.
        predicted_gain: part of the time of a batch that was to be saved; negative where money is saved instead.
        realised_gain: the same, measured: of the first batches under the plan against the last ones before; where
            layers moved or ranks rest, against what the plan before would take by then. None: not known yet.
        bytes: sent between ranks.
        pause_s: how long training stood still for it, the mean of the ranks [s].
        cancelled: why the plan before is in force still; empty: it is not.
    """

    step: int
    kind: str
    reason: str
    generation: int
    predicted_gain: float
    realised_gain: float | None = None
    bytes: int = 0
    pause_s: float = 0.0
    cancelled: str = ""

    @classmethod
    def of(cls, decision: Decision, step: int) -> Replan:
        """Returns the record of a decision that holds, or is given up, after ``step`` batches."""
        return cls(
            step=step, kind=decision.kind, reason=decision.reason, generation=decision.generation,
            predicted_gain=decision.gain_s / (decision.predicted_s + decision.gain_s),
        )  # fmt: skip


class ReplanLog:
    """A run's changes of plan; what they have won is added when it is known.

    Args:
        records: to append to.
    """

    def __init__(self, records: list[Replan]) -> None:
        self.records = records
        self._took_s: deque[float] = deque(maxlen=_COMPARED)  # the last batches under the plan in force
        self._before_s = math.nan  # those before it came into force

    def batch(self, generation: int, batch_s: float) -> dict[str, Any]:
        """Takes in a batch: the first ones under a plan show what it has won.

        Returns:
            for a trace, with the last of them: what it has won; else empty.
        """
        is_first = len(self._took_s) < _COMPARED
        self._took_s.append(batch_s)
        if not (is_first and self._before_s > 0.0):
            return {}
        measured_s = median(self._took_s)
        found = self._won(generation, measured_s, 1.0 - measured_s / self._before_s)
        return found if len(self._took_s) == _COMPARED else {}

    def in_force(self) -> None:
        """Another plan is in force from the next batch on."""
        if self._took_s:
            self._before_s = median(self._took_s)
            self._took_s.clear()

    def settle(self, outcome: Outcome) -> dict[str, Any]:
        """Takes in what the controller found of a structure; returns it for a trace."""
        before_s = outcome.measured_s + outcome.realised_gain_s
        found = self._won(outcome.generation, outcome.measured_s, outcome.realised_gain_s / before_s)
        return {**found, "kept": outcome.kept} if found else {}

    def _won(self, generation: int, measured_s: float, gain: float) -> dict[str, Any]:
        self.amend(generation, realised_gain=gain)
        held = [record for record in self.held if record.generation == generation]
        if not held:
            return {}
        return {
            "generation": generation,
            "measured_s": measured_s,
            "predicted_gain": held[-1].predicted_gain,
            "realised_gain": gain,
        }

    def amend(self, generation: int, **known: Any) -> None:
        """Adds what has become known of an earlier change."""
        for i, record in enumerate(self.records):
            if record.generation == generation and not record.cancelled:
                self.records[i] = replace(record, **known)

    @property
    def held(self) -> list[Replan]:
        """Changes that came into force."""
        return [record for record in self.records if not record.cancelled]

    def metrics(self) -> dict[str, float]:
        """Returns what has become of changes so far."""
        held = self.held
        found = {
            "replans": float(len(held)),
            "moved_bytes": float(sum(record.bytes for record in held)),
            "pause_s": sum(record.pause_s for record in self.records),
        }
        if held:
            found["predicted_gain"] = held[-1].predicted_gain
            if held[-1].realised_gain is not None:
                found["realised_gain"] = held[-1].realised_gain
        return found
