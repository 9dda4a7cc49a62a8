"""Virtual queues: the bound on the mean is exact, whatever the bank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.controller.spending import queued

RATIOS = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60)


@given(ratios=RATIOS, bank=st.floats(0.0, 30.0))
def test_the_mean_exceeds_the_budget_by_the_queue_at_most(ratios: list[float], bank: float) -> None:
    queue = 0.0
    for ratio in ratios:
        queue = queued(queue, ratio, bank=bank)
        assert queue >= -bank
    n = len(ratios)
    assert sum(ratios) / n <= 1.0 + queue / n + 1e-9


@given(ratios=RATIOS, batches=st.integers(1, 5))
def test_a_period_counts_by_its_batches(ratios: list[float], batches: int) -> None:
    # Equal spending in one long period, or batch by batch: the same queue, as long as the bank is not touched.
    one = many = 0.0
    for ratio in ratios:
        one = queued(one, ratio, batches, bank=1e6)
        for _ in range(batches):
            many = queued(many, ratio, bank=1e6)
    assert one == pytest.approx(many, abs=1e-9)
