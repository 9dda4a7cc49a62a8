"""The last time per sample, as it is (layer P)."""

from __future__ import annotations

from lightning_hetero.predictors.ewma import Ewma

__all__ = ["LastValue"]


class LastValue(Ewma):
    """Seconds per sample of the last measurement: ``T(b) = b * T_last / b_last``.

    Fastest to follow a change and the noisiest: the limit ``weight=1`` of `Ewma`, with the same
    treatment of steps without samples. A single slow step moves samples away for one decision.
    """

    def __init__(self) -> None:
        super().__init__(weight=1.0)
