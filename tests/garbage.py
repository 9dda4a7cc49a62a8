"""Searches for garbage in processes that run many tests: quick, and rare."""

from __future__ import annotations

import gc


def search_rarely() -> None:
    """What there is by now stays: no later search looks at it. Trainers come and go by thousands: rarer searches save
    a few hundredths of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
