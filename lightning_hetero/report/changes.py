"""What changes of shares or plan promised, and what they gave (layer P)."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_hetero.controller.replans import Replan, ReplanLog
from lightning_hetero.report.run import Change, Run

__all__ = ["Shares", "changes_of", "shares_of"]


def changes_of(run: Run) -> list[Change]:
    """Returns the run's changes with what they gave, as far as it is known.

    A controller measures that while it runs. Else it is measured here in the same way, by `ReplanLog`: the first
    batches under the new shares against the last ones before. A change is in force from the first full batch on that
    ran on its shares.
    """
    changes = list(run.changes)
    records: list[Replan] = []
    log = ReplanLog(records)
    pending = [i for i, change in enumerate(changes) if change.shares and math.isnan(change.realised_gain)]
    generation = 0
    for number in run.full:  # a short batch takes less, whatever was decided
        step = run.steps[number]
        ran = tuple(round(step.turns[r].samples) if r in step.turns else 0 for r in range(run.ranks))
        known = [i for i in pending if changes[i].step <= number]
        due = [i for i in known if changes[i].shares == ran]
        if due:
            i = due[-1]
            pending = [other for other in pending if other > i]
            generation = i + 1
            predicted = changes[i].predicted_gain
            records.append(
                Replan(
                    step=number, kind="shares", reason="", generation=generation,
                    predicted_gain=predicted,
                )
            )  # fmt: skip
            log.in_force()
        log.batch(generation, step.step_s)
    for record in records:
        if record.realised_gain is not None:
            at = record.generation - 1
            changes[at] = replace(changes[at], realised_gain=record.realised_gain)
    return changes


class Shares:
    """Samples per rank over the run.

    Attributes:
        steps: numbers of those on a full global batch.
        rows: by rank, samples in each of them; 0 where it took no part.
    """

    def __init__(self, run: Run) -> None:
        self.steps = run.full
        turns = [run.steps[number].turns for number in self.steps]
        self.rows = [[t[rank].samples if rank in t else 0.0 for t in turns] for rank in range(run.ranks)]

    @property
    def moved(self) -> bool:
        """Whether they ever changed."""
        return any(len(set(row)) > 1 for row in self.rows)

    @property
    def last(self) -> tuple[int, ...]:
        """Of the last full batch."""
        return tuple(round(row[-1]) for row in self.rows) if self.steps else ()


def shares_of(run: Run) -> Shares:
    """Returns the samples per rank over the run."""
    return Shares(run)
