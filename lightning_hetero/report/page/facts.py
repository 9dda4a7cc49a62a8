"""What the page says of a run, each thing computed once (layer P)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_hetero.record.ledger import RunLedger, ledger_of
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.report.figures import Alternatives, PipelineFacts, Scores, alternatives_of, pipeline_of, scores_of
from lightning_hetero.report.verdict import Verdict, engine_name, verdict_of

_MOST_RANKS = 16  # of a drawing


@dataclass(frozen=True)
class RunFacts:
    """A run, what its ``result.json`` says, the text of its configuration, and what is computed of it once."""

    run: RecordedRun
    result: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: str = ""

    @property
    def title(self) -> str:
        """The engine, and the folder where that is a name and no number."""
        named = any(letter.isalpha() for letter in self.run.name)
        return engine_name(self.run.engine) + (f": {self.run.name}" if named else "")

    @cached_property
    def ledger(self) -> RunLedger:
        return ledger_of(self.run)

    @cached_property
    def scores(self) -> Scores | None:
        return scores_of(self.run)

    @cached_property
    def pipeline(self) -> PipelineFacts | None:
        return pipeline_of(self.run, self.ledger)

    @cached_property
    def alternatives(self) -> Alternatives | None:
        return alternatives_of(self.run, self.ledger, self.pipeline)

    @cached_property
    def verdict(self) -> Verdict:
        return verdict_of(self.run, self.ledger, self.scores, self.alternatives)

    @property
    def ranks(self) -> list[int]:
        """The ranks to draw: all, or of many the slow ones and those with most and least work."""
        ranks = list(range(self.run.ranks))
        if len(ranks) <= _MOST_RANKS:
            return ranks
        half = _MOST_RANKS // 2
        by_work = sorted(ranks, key=lambda rank: -self.ledger.ranks[rank].compute_s)
        slow = [] if self.scores is None else self.scores.slow_ranks[:_MOST_RANKS]
        others = [rank for pair in zip(by_work[:half], by_work[::-1], strict=False) for rank in pair]
        return sorted(list(dict.fromkeys([*slow, *others]))[:_MOST_RANKS])

    @property
    def shown(self) -> str:
        """What to say where not all ranks are drawn."""
        if self.run.ranks <= _MOST_RANKS:
            return ""
        return f" Shown: {_MOST_RANKS} of {self.run.ranks} ranks, slow ones among them."
