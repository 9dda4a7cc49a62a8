"""The time of a batch with other engines, by the planner (layer P).

The exchange and what a rank's samples cost it in each step stay as they were recorded, and all ranks can hold what they
get. For a pipeline the model answers that it was planned from; its times are multiplied by what batches took over what
it says of the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hetero.cluster.spec import override_cluster
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import Setup, setup_from_run
from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.report.pipelines import PipelineFacts
from lightning_hetero.solvers.placement import evaluate_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternatives:
    """What a global batch takes, and would take [s].

    Attributes:
        engine: of the run.
        samples: a full global batch.
        measured_s: as measured, the mean of the last steps.
        engines: by engine; NaN: it cannot train in this way.
        chosen: the engine that the planner takes of these.
    """

    engine: str
    samples: int
    measured_s: float
    engines: dict[str, float]
    chosen: str

    @property
    def best(self) -> tuple[str, float]:
        """The engine to take, and what it takes [s]; the one in use where that does not take 2 % less."""
        mine_s, chosen_s = self.engines.get(self.engine, self.measured_s), self.engines.get(self.chosen, math.nan)
        return (self.chosen, chosen_s) if chosen_s < 0.98 * mine_s else (self.engine, mine_s)


def alternatives_of(run: RecordedRun, ledger: RunLedger, pipeline: PipelineFacts | None = None) -> Alternatives | None:
    """Returns what others would take; None where ranks' times do not compare, or too little was measured."""
    if pipeline is not None:
        return _of_pipeline(run, pipeline)
    if run.ranks < 2 or run.staged or ledger.too_few:
        return None
    try:
        setup = setup_from_run(run, ledger=ledger)
    except ValueError:  # files are missing, no full batch, or a rank has never worked
        return None
    sharded = run.engine == "sharded"  # others may not hold the model; stock DDP stands for equal parts
    answer = plan(setup, ("ddp",) if sharded else ("ddp", "balanced", "stale"))
    engines: dict[str, float] = {one.engine: one.step_s if one.ok else math.nan for one in answer.estimates}
    measured_s = ledger.step_s
    if run.engine in engines:
        engines[run.engine] = measured_s
    return Alternatives(
        engine=run.engine, samples=setup.global_batch, measured_s=measured_s, engines=engines,
        chosen=run.engine if sharded else "ddp" if answer.chosen is None else answer.chosen.engine,
    )  # fmt: skip


def _of_pipeline(run: RecordedRun, found: PipelineFacts) -> Alternatives | None:
    groups, cluster, model = found.plan.groups, found.cluster, found.model
    if model is None or not run.steps:
        return None
    modelled_s = evaluate_plan(model, cluster, groups).total_s
    off = found.measured_s / modelled_s if 0.0 < modelled_s < math.inf else math.nan
    samples, speeds = sum(group.samples for group in groups), [device.speed for device in cluster.devices]
    roomy = override_cluster(cluster, mem_bytes=[None] * len(speeds))
    others: dict[str, float] = {}
    if samples >= len(speeds):
        answer = plan(Setup(cluster=roomy, model=model, global_batch=samples), ("ddp", "balanced"))
        others = {one.engine: one.step_s * off for one in answer.estimates}
    return Alternatives(
        engine="pipeline", samples=samples, measured_s=found.measured_s,
        engines={**others, "pipeline": found.measured_s},
        chosen=min(others, key=lambda name: others[name], default="pipeline"),
    )  # fmt: skip
