"""Plans at given batches, in place of a controller that measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.pipeline.decide.replanning import Jumps
from lightning_hetero.solvers.plans import plan_from_plain
from lightning_hetero.types import PipelinePlan


class Scripted:
    """Decides for a plan when a batch has been trained.

    Args:
        script: by number of the batch in the run, as a plan's plain values.
    """

    def __init__(self, script: Mapping[int, Any]) -> None:
        self.script = {batch: plan_from_plain(plan) for batch, plan in script.items()}
        self.observed: list[Observation] = []
        self.withdrawn: list[int] = []
        self.generation = 0
        self.plan: PipelinePlan | None = None

    def start(self, model: Any, cluster: Any, first: PipelinePlan, **options: Any) -> Scripted:
        self.generation, self.plan = 0, first
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"observed": len(self.observed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.resumed = state

    def step(self, observation: Observation) -> Decision:
        self.observed.append(observation)
        assert self.plan is not None
        plan = self.script.get(observation.batch, self.plan)
        if plan is self.plan:
            return self._decision(observation, "keep")
        same = [(g.ranks, g.cuts) for g in plan.groups] == [(g.ranks, g.cuts) for g in self.plan.groups]
        self.generation, self.plan = self.generation + 1, plan
        return self._decision(observation, "shares" if same else "plan")

    def _decision(self, observation: Observation, kind: Any) -> Decision:
        assert self.plan is not None
        reason = f"scripted after batch {observation.batch}"
        return Decision(
            batch=observation.batch, generation=self.generation, kind=kind, plan=self.plan, reason=reason,
            predicted_s=0.9, gain_s=0.1, queues={"money": float(observation.batch)},
        )  # fmt: skip

    def withdraw(self, generation: int) -> None:
        self.withdrawn.append(generation)


@contextmanager
def heard(*, at_once: bool) -> Iterator[None]:
    """Inside, all ranks wait behind each batch for what is decided on it, or never, whatever was measured."""
    with patch.object(Jumps, "add", lambda *_: at_once):
        yield


def group(ranks: list[int], cuts: list[int], samples: int, micro_samples: int = 4) -> dict[str, Any]:
    return {"ranks": ranks, "cuts": cuts, "samples": samples, "micro_samples": micro_samples}


def plan(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"groups": list(groups)}
