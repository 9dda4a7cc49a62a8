"""How much of a device's free memory a plan may count with (layer P)."""

from __future__ import annotations

__all__ = ["budget_bytes"]

_PART = 0.9  # of what is free: pieces between tensors that are of no use
_WORKSPACE_BYTES = 0.5 * 2.0**30  # of cuBLAS, cuDNN and the like, and what a step needs for a moment


def budget_bytes(free_bytes: float, *, ranks: int = 1, communicators_bytes: float = 0.0) -> float:
    """Returns what the plan may count with on one of the ranks that share a device [bytes].

    Args:
        free_bytes: on the device; ``inf``, as on hosts, stays.
        ranks: that share it.
        communicators_bytes: what the backend of process groups will take for this rank.

    >>> budget_bytes(10 * 2.0**30, ranks=2, communicators_bytes=2.0**30) / 2.0**30
    3.0
    """
    return max(1.0, _PART * free_bytes / ranks - _WORKSPACE_BYTES - communicators_bytes)
