"""How fast each worker is: one predictor per rank, and the shares that follow; how fast all are together (layer P)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from lightning_hetero.predictors import Kalman, Predictor
from lightning_hetero.solvers import apportion, minimax
from lightning_hetero.types import AffineCost

_DEAD_BAND, _MIN_GAIN_S, _CHANCE = 0.02, 0.0005, 4.0  # parts are unequal only for more: of the time, s, deviations
_GOES_ON = 0.25  # of that, once they are
_SURE = 2  # chunks: one may have been a hiccup


class Speeds:
    """Learns from pushes what a chunk takes from its assignment to its push [s], transfers included.

    A rank that was never measured is taken to be as fast as the mean of those that were.

    Args:
        predictor: its settings are copied for every rank; None: `Kalman`.
    """

    def __init__(self, predictor: Predictor | None = None) -> None:
        self.prototype = Kalman() if predictor is None else predictor
        self._of: dict[int, Predictor] = {}
        self._unequal = False  # lately
        self._coarse: dict[int, AffineCost] = {}  # of those that are known

    def learn(self, rank: int, samples: int, seconds: float) -> None:
        """Takes in one chunk; a time that is not above 0 tells nothing."""
        if samples > 0 and 0.0 < seconds < math.inf:
            predictor = self._of.setdefault(rank, self.prototype.fresh())
            predictor.update(samples, seconds)
            if predictor.ready:
                self._coarse[rank] = _coarse(predictor.cost())

    def cost(self, rank: int) -> AffineCost | None:
        """Returns the model of a rank; None before the first measurement of any."""
        own = self._of.get(rank)
        if own is not None and own.ready:
            return own.cost()
        known = [p.cost() for p in self._of.values() if p.ready]
        if not known:
            return None
        return AffineCost(
            fixed_s=math.fsum(c.fixed_s for c in known) / len(known),
            per_sample_s=math.fsum(c.per_sample_s for c in known) / len(known),
        )

    def predict_s(self, rank: int, samples: int) -> float:
        """Returns the time a rank will take for a chunk [s]; NaN while nothing is known."""
        cost = self.cost(rank)
        return math.nan if cost is None else cost.seconds(samples)

    def split(self, ranks: Collection[int], total: int, *, equal: bool = False) -> Mapping[int, int]:
        """Returns samples per rank of ``total`` such that all ranks finish together; very slow ones get none.

        Equal, larger parts to lower ranks, if ``equal``, while nothing is known, and unless others are predicted to be
        faster by clearly more than chance explains.
        """
        order = sorted(ranks)
        shares = _equal_parts(len(order), total)
        if not equal and self._coarse and order:
            costs = tuple(self._coarse.get(r) or _coarse(cast("AffineCost", self.cost(r))) for r in order)
            others = _shares(costs, total)
            self._unequal = self._is_gain(order, costs, shares, others)
            shares = others if self._unequal else shares
        return dict(zip(order, shares, strict=True))

    def _is_gain(
        self, ranks: Sequence[int], costs: Sequence[AffineCost], equal: Sequence[int], others: Sequence[int]
    ) -> bool:
        """Whether to play other shares than equal ones; to go on with them takes less than to begin."""
        times = [cost.seconds(n) for cost, n in zip(costs, equal, strict=True)]
        took_s = max(times)
        gain_s = took_s - max(cost.seconds(n) for cost, n in zip(costs, others, strict=True))
        slowest = self._of.get(ranks[times.index(took_s)])
        if slowest is None or slowest.updates < _SURE:
            return False
        chance_s = slowest.std_s(equal[times.index(took_s)])
        least_s = max(_DEAD_BAND * took_s, _MIN_GAIN_S, _CHANCE * chance_s)
        return gain_s > (_GOES_ON if self._unequal else 1.0) * least_s

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types only: the kind of predictor, and its memory per rank."""
        return {
            "predictor": type(self.prototype).__name__,
            "ranks": [[rank, dict(p.state_dict())] for rank, p in sorted(self._of.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what another run learned; of another kind of predictor it is ignored."""
        if state.get("predictor") != type(self.prototype).__name__:
            return
        self._of = {int(rank): self.prototype.fresh() for rank, _ in state["ranks"]}
        for rank, memory in state["ranks"]:
            self._of[int(rank)].load_state_dict(memory)
        self._coarse = {rank: _coarse(one.cost()) for rank, one in self._of.items() if one.ready}


@lru_cache(maxsize=64)  # a batch is divided again with every message, and costs change seldom
def _shares(costs: tuple[AffineCost, ...], total: int) -> tuple[int, ...]:
    return minimax(costs, total).shares or _equal_parts(len(costs), total)


@lru_cache(maxsize=64)
def _equal_parts(ranks: int, total: int) -> tuple[int, ...]:
    return apportion([1.0] * ranks, total) if ranks else ()


def _coarse(cost: AffineCost) -> AffineCost:
    """Rounds to steps of about 1 %: ranks of equal speed shall be exactly equal, whatever the last bits measured."""
    return AffineCost(fixed_s=_round(cost.fixed_s), per_sample_s=_round(cost.per_sample_s))


def _round(value: float) -> float:
    if value <= 0.0:
        return 0.0
    # Steps of a logarithm, shifted: round numbers of seconds must not lie on the edge between two steps.
    return math.exp(0.01 * (math.floor(100.0 * math.log(value) + 0.3819) + 0.5))
