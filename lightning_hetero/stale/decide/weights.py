"""What two parts of a grant count together, computed one after the other (layer P)."""

from __future__ import annotations

__all__ = ["joint"]


def joint(old: float, new: float, *, sums: bool) -> tuple[float, float, float]:
    """Returns the weight of both parts together, and the share of each part's gradient in theirs.

    Gradients of losses that are means over samples are averaged by what the samples count; both shares are 0 where
    nothing counts. Gradients of losses that are sums are added, and the sum counts 1.

    Args:
        old, new: what each part counts, >= 0, e.g. its samples.
        sums: losses are sums.

    >>> joint(1.0, 3.0, sums=False)
    (4.0, 0.25, 0.75)
    """
    if sums:
        return 1.0, 1.0, 1.0
    total = old + new
    return (total, old / total, new / total) if total else (0.0, 0.0, 0.0)
