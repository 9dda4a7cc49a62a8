"""Costs of ranks, as Hypothesis draws them: lines, and stairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from lightning_hetero.types import AffineCost

SECONDS = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 0.1, 5e-324, 1e-17, 1e17, 1e308]),
    st.floats(0.0, 10.0),
    st.integers(-18, 18).map(lambda e: 10.0**e),
)
EVERYDAY = st.builds(
    AffineCost,
    fixed_s=st.integers(0, 50).map(lambda v: v / 1000),
    per_sample_s=st.integers(1, 50).map(lambda v: v / 1000),
)
AFFINE = st.builds(AffineCost, fixed_s=SECONDS, per_sample_s=SECONDS)


class Stairs:
    """Jumps, flats, and an inverse that lies: only `seconds` may decide."""

    def __init__(self, times: Sequence[float], lie: float) -> None:
        self.times, self.lie = sorted(times), lie

    def seconds(self, samples: float) -> float:
        return self.times[min(int(samples), len(self.times) - 1)]

    def most_samples(self, deadline_s: float) -> float:
        in_time = sum(t <= deadline_s for t in self.times)
        if in_time == 0:
            return -math.inf
        return math.inf if in_time == len(self.times) else in_time - 1 + self.lie


STAIRS = st.builds(
    Stairs,
    st.lists(st.integers(0, 4).map(float), min_size=2, max_size=12),
    st.sampled_from([0.0, 0.5, -3.0, 2.0]),
)
