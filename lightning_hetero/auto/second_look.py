"""Whether what was chosen from a trial is still right, by the steps that were trained since (layer P).

A trial is short: it may meet no slow spell, and devices change. Looked at are the records of the balanced engine, which
has each rank's own work of each step; of the others the trial's word stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from lightning_hetero.auto.choice import Choice, ChosenName, choose
from lightning_hetero.record.costs import costs_of
from lightning_hetero.record.ledger import Tally, spent_together
from lightning_hetero.record.run import RunStep, Turn
from lightning_hetero.types import StepReport

_LEAST = 24  # reports that say more than a trial; one may be of several steps


class SecondLook:
    """Adds up steps, and chooses once more.

    Args:
        first: the choice of the balanced engine, with its plan.
        engines: those in question. Never the pipeline: what its layers cost is not recorded.
        refused: why engines do not train this module, by name.
    """

    def __init__(self, first: Choice, engines: Sequence[ChosenName], refused: Mapping[str, str]) -> None:
        assert first.plan is not None
        self._setup, self._refused = first.plan.setup, refused
        self._engines: list[ChosenName] = [name for name in engines if name != "pipeline"]
        self._tally, self._last = Tally(self._setup.ranks), (-1, -1)

    def note(self, report: StepReport | None) -> None:
        """Counts the step of a report, once, if all ranks have worked in it."""
        if report is None or (report.epoch, report.step) == self._last:
            return
        self._last = report.epoch, report.step
        turns = {record.rank: Turn(**asdict(record), end_s=math.nan) for record in report.records}
        if all(turn.compute_s > 0.0 for turn in turns.values()):
            self._tally.add(RunStep(epoch=report.epoch, index=report.step, turns=turns), spent_together(turns))

    def choose(self) -> Choice | None:
        """Returns another choice than the first one, which the steps so far ask for; None: it was right."""
        ledger = self._tally.ledger() if self._last != (-1, -1) else None
        if ledger is None or ledger.steps < _LEAST:
            return None
        try:
            costs = costs_of(ledger)
            # Reading and stepping are in the work that was recorded.
            told = {"costs": costs.lines, "slowness": costs.slowness, "exchange_s": costs.rest_s, "own_s": 0.0}
            found = choose(replace(self._setup, **told), self._engines, self._refused)
        except ValueError:  # a rank has had no samples, or there are too few for these ranks
            return None
        if found.plan is None or found.plan.chosen is None or found.engine == "balanced":
            return None
        now_s = next(e.step_s for e in found.plan.estimates if e.engine == "balanced")
        line = (
            f"hetero_auto: by the steps so far hetero_{found.engine} would take {found.plan.chosen.step_s * 1e3:.1f} ms"
            f" per update, hetero_balanced takes {now_s * 1e3:.1f} ms; the next fit of this Trainer takes it"
        )
        return replace(found, line=line)
