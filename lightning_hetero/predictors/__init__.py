"""Predictors: one rank's compute time from a stream of (samples, seconds). Layer P.

| name | class | model | use |
|---|---|---|---|
| ``kalman`` | `Kalman` | fixed + per-sample cost, adaptive, ignores lone outliers | the default |
| ``narx`` | `Narx` | the same, corrected by a network that gets the host's load | hosts that others use, too |
| ``ewma`` | `Ewma` | smoothed seconds per sample | baseline |
| ``last`` | `LastValue` | last seconds per sample | baseline |

`Predictor` is the interface; any instance of it may be passed where a name is accepted.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from lightning_hetero.predictors.base import Ewma, LastValue, Predictor
from lightning_hetero.predictors.kalman import Kalman, Narx

__all__ = ["Ewma", "Kalman", "LastValue", "Narx", "Predictor", "PredictorName", "by_name"]

PredictorName: TypeAlias = Literal["kalman", "narx", "ewma", "last"]

_KNOWN: dict[str, type[Predictor]] = {"ewma": Ewma, "kalman": Kalman, "last": LastValue, "narx": Narx}


def by_name(name: str) -> Predictor:
    """Returns a new predictor with default settings: ``"kalman"``, ``"narx"``, ``"ewma"`` or ``"last"``.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _KNOWN:
        raise ValueError(
            f"unknown predictor {name!r}: choose one of {sorted(_KNOWN)}, or pass any Predictor instance "
            "(for example Ewma(weight=0.3))"
        )
    return _KNOWN[name]()
