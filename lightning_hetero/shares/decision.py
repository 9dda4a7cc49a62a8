"""What a balancing policy has decided (layer P)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareDecision:
    """What was decided on the last records, and why.

    Attributes:
        shares: samples per rank from now on.
        changed: whether they are others than before.
        reason: in words.
        predicted_s: time of a batch that is expected of them [s].
        gain_s: time per batch that is won, or would have been [s].
    """

    shares: tuple[int, ...]
    changed: bool
    reason: str
    predicted_s: float = math.nan
    gain_s: float = 0.0

    @property
    def predicted_gain(self) -> float:
        """`gain_s` as a part of what a batch takes without the change; NaN where nothing was predicted."""
        before_s = self.predicted_s + self.gain_s
        return self.gain_s / before_s if before_s > 0.0 else math.nan
