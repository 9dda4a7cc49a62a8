"""A full batch's shares, for batches of other sizes: an epoch's last one, and further loaders'."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.solvers.minimax import minimax_none_or_least, obeys_least
from lightning_hetero.types import AffineCost


def scale_shares(
    shares: Sequence[int], total: int, *, lower: int = 0, upper: Sequence[int] | None = None, least: int = 1
) -> tuple[int, ...]:
    """Returns ``shares`` scaled to sum to ``total``, by `apportion`; shares that sum to it already stay.

    Where that gives a rank fewer than ``least``, the split is the one whose slowest rank is fastest, for speeds in
    proportion to ``shares``. Where no split keeps ``least``, it is given up: the total or the bounds are too small.

    Args:
        shares: of a full batch [samples].
        total: samples of this one.
        lower: least share of each, where the total allows it [samples].
        upper: most of each where ``least`` decides; else no share exceeds its part of a full batch [samples].
        least: a rank gets none or at least this many [samples].

    >>> scale_shares([12, 4], 4)
    (3, 1)
    >>> scale_shares([12, 4], 4, least=2)
    (4, 0)
    >>> scale_shares([12, 4], 1, least=2)
    (1, 0)
    """
    if sum(shares) == total and obeys_least(shares, least):
        return tuple(shares)
    n = len(shares)
    lower = lower if max(lower, least if lower else 0) * n <= total else 0
    scaled = apportion([float(s) for s in shares], total, lower=lower)
    if obeys_least(scaled, least):
        return scaled
    # A rank without samples in a full batch stays without.
    most = [b if s or lower else 0 for s, b in zip(shares, [total] * n if upper is None else upper, strict=True)]
    costs = [AffineCost(fixed_s=0.0, per_sample_s=1.0 / max(1, s)) for s in shares]
    split = minimax_none_or_least(costs, total, lower=lower, upper=most, least=least)
    return split.shares if split.ok else scaled
