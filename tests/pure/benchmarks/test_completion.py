"""The simulated learner completes means as the rule says: by hand, and equal to a mean over all where all is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.comparators.__main__ import CONTENDERS, DDP, row_of
from benchmarks.stale.learning import RECIPES, Learner

pytest.importorskip("sklearn")
EDGE = RECIPES["MLP at the edge, momentum"]


def given(learner: Learner, lease: int, samples: int, value: float) -> None:
    """A contribution whose mean gradient is ``value`` in the first entry, else 0."""
    gradient = np.zeros_like(learner.weights)
    gradient[0] = value
    fixed: Any = lambda weights, images, labels: (0.0, gradient)  # noqa: E731
    learner.gradient = fixed
    learner.give(lease, np.zeros((samples, 64), np.float32), np.zeros(samples, np.int64), 1.0)


@pytest.mark.parametrize(
    ("completes", "second"), [(True, 3.0 + 0.25 * (5.0 - 1.0)), (False, (48 * 3.0 + 16 * 5.0) / 64)]
)
def test_updates_by_hand(completes: bool, second: float) -> None:
    learner = Learner(EDGE, 0, completes=completes)
    learner.take(0)
    learner.take(1)
    given(learner, 0, 48, 1.0)
    learner.step(48, 1.0, True)
    assert float(learner.first[0]) == pytest.approx(1.0)
    learner.take(2)
    given(learner, 2, 48, 3.0)
    given(learner, 1, 16, 5.0)  # late: completes the first update, or joins the second
    learner.step(64, 1.0, True)
    assert float(learner.first[0]) == pytest.approx(0.9 * 1.0 + second)
    assert learner._means == {}, "nobody computes on these versions any more"
    learner.take(3)
    given(learner, 3, 64, 2.0)
    learner.step(64, 1.0, True)
    assert float(learner.first[0]) == pytest.approx(0.9 * (0.9 + second) + 2.0), "changes count once"


def run_of(final: float, target_s: float | None) -> dict[str, Any]:
    curve = {"losses": [2.0 * final, final], "t_s": [1.0, 2.0], "final": final, "target_s": target_s}
    return {"time_s": 2.0, "to_bound": 1.1, "staleness": 0.5, "curves": {"m": curve}}


def test_a_row_is_over_ddp_with_the_same_seed() -> None:
    mine = [run_of(0.2, 3.0), run_of(0.4, None), run_of(0.1, 1.0)]
    ddp = [run_of(0.1, 6.0), run_of(0.1, 2.0), run_of(0.1, 4.0)]
    row = row_of("spells", "asp", "m", mine, ddp)
    assert row["pairs"] == pytest.approx([2.0, 4.0, 1.0]) and row["loss_to_ddp"] == pytest.approx(2.0)
    assert (row["target_to_ddp"], row["reached"]) == (0.5, 2)
    assert row["losses"] == pytest.approx([0.4, 0.2]) and row["t_s"] == [1.0, 2.0]
    assert row_of("spells", "asp", "m", mine[1:2] * 3, ddp)["target_to_ddp"] is None
    assert {c.name for c in CONTENDERS} > {DDP, "flexible", "quorum", "dynsgd"}
