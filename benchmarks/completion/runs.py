"""One schedule, and the trainings on it by both rules."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.stale.cases import COSTS, Case, JitteredWork
from benchmarks.stale.learning import BATCH, RECIPES, TRAINING_SAMPLES, Learner, Training
from benchmarks.stale.simulated import ENDS, synchronously
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Flexible
from lightning_hetero.stale.decide.simulate.simulator import simulate

__all__ = ["RULES", "trained"]

RULES = {"join": False, "complete": True}
Row = dict[str, Any]


def trained(case: Case, recipes: tuple[str, ...], seed: int) -> Row:
    """Returns time to the bound, the late fraction, and the final losses to DDP's by rule and recipe."""
    torch.set_num_threads(1)  # the batches are tiny
    learners = {
        rule: {recipe: Learner(RECIPES[recipe], seed, completes=completes) for recipe in recipes}
        for rule, completes in RULES.items()
    }
    workers, speeds = range(len(case.speeds)), case.build(seed)
    epochs = max(RECIPES[recipe].epochs for recipe in recipes)
    trace = simulate(
        Coordinator(Flexible(), workers=workers),
        JitteredWork(speeds, len(workers), case.jitter, seed),
        workers=workers,
        epochs=[ENDS] * epochs,
        costs=COSTS,
        hooks=Training([learner for some in learners.values() for learner in some.values()], seed),
        record=False,
    )
    alone = {recipe: synchronously(recipe, seed, RECIPES[recipe].epochs)["loss"] for recipe in recipes}
    return {
        "late": 1.0 - trace.staleness.get(0, 0) / sum(trace.staleness.values()),
        "to_bound": trace.makespan_s / speeds.ideal_s([BATCH] * (TRAINING_SAMPLES // BATCH * epochs)),
        "losses": {
            rule: {recipe: min(learner.final_loss(), 100.0) / alone[recipe] for recipe, learner in some.items()}
            for rule, some in learners.items()
        },
    }
