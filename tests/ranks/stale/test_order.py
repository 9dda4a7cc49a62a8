"""The simulator against real processes: with the same times the same ranks train the same samples in the same steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.stale.simulator import Hooks, simulate
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Assigned
from lightning_hetero.stale.decide.policy import by_name
from tests.ranks.harness import run_ranks
from tests.ranks.stale.fits import Noting, fit
from tests.ranks.stale.models import Constant

pytestmark = pytest.mark.ranks
BATCH, STEPS = 12, 10
SAMPLES = BATCH * STEPS
SAMPLE_S = (0.012, 0.02, 0.045)  # by rank, about
APART_S = 0.02  # at least between two ends, so that real processes can keep the order
ATTEMPTS = 8
POLICIES = ("asp", "bsp", "flexible")


@dataclass
class Course:
    """What one rank does: ``batches``: step and samples of each; ``due_s``: when each is computed, from the start."""

    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    due_s: list[float] = field(default_factory=list)


class OnTime(Noting):
    """Computes each of its batches until it is due, from when all have their first."""

    def __init__(self, due_s: list[float]) -> None:
        super().__init__()
        self.due_s, self.began_s = due_s, 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.strategy.current_samples() and not self.began_s:  # type: ignore[attr-defined]
            dist.barrier()  # in the step itself it would be refused
            self.began_s = time.monotonic()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.strategy.current_samples():  # type: ignore[attr-defined]
            done = len(self.noted.batches)
            wanted_s = self.due_s[min(done, len(self.due_s) - 1)]
            time.sleep(max(0.0, self.began_s + wanted_s - time.monotonic()))
        return super().training_step(batch, batch_idx)


def job(rank: int, world: int, name: str, due_s: list[list[float]]) -> list[tuple[int, list[int]]]:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))
    strategy = {"policy": by_name(name), "predictor": Constant()}
    loader = DataLoader(data, batch_size=BATCH // world)
    seen = fit(rank, world, loader, strategy=strategy, module=OnTime(due_s[rank]), max_epochs=1)
    return [(tick, indices) for _, tick, indices in seen.batches]


def work_s(rank: int, step: int, now_s: float, samples: int) -> float:
    """Each rank has its own time slots in which its batches end."""
    world = len(SAMPLE_S)
    round_s, slot_s = world * APART_S, rank * APART_S
    rounds = math.ceil((now_s + samples * SAMPLE_S[rank] - slot_s) / round_s - 1e-6)
    return rounds * round_s + slot_s - now_s


def simulated(name: str, world: int) -> list[Course]:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()  # of stock Lightning
    courses = [Course() for _ in range(world)]
    coordinator = Coordinator(by_name(name), workers=range(world), predictor=Constant())

    class Followed(Hooks):
        def assigned(self, granted: Assigned, now_s: float) -> None:
            if granted.spans:
                numbers = [order[at] for start, end in granted.spans for at in range(start, end)]
                courses[granted.rank].batches.append((granted.global_step, numbers))
                courses[granted.rank].due_s.append(now_s + work_s(granted.rank, 0, now_s, len(numbers)))

    simulate(
        coordinator, work_s, workers=range(world), epochs=[[BATCH * (step + 1) for step in range(STEPS)]],
        hooks=Followed(),
    )  # fmt: skip
    return courses


@pytest.mark.parametrize("name", POLICIES)
def test_real_processes_train_in_the_simulators_order(name: str) -> None:
    """In one of some attempts: other programs may hold up a process for longer than two batches are apart."""
    courses = simulated(name, len(SAMPLE_S))
    ends_s = sorted(due_s for course in courses for due_s in course.due_s)
    assert min(after - before for before, after in pairwise(ends_s)) > 0.99 * APART_S
    expected = [course.batches for course in courses]
    assert (name == "bsp") == (len({len(batches) for batches in expected}) == 1)
    found = None
    for _ in range(ATTEMPTS):
        found = run_ranks(len(SAMPLE_S), job, name, [course.due_s for course in courses])
        if found == expected:
            return
    pytest.fail(f"simulated: {expected}\nin the last attempt: {found}")
