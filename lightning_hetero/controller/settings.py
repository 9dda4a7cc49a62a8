"""What a user says to the online controller, checked and plain (layer P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from lightning_hetero.checked import check_fields, is_list, mapping, optional, real

HOUR_S = 3600.0
_BUDGETS = ("money_per_sample", "money_per_hour")


class Budget(NamedTuple):
    """One constraint on a long-term mean: money, ``limit`` per sample, or per hour."""

    name: str
    per_hour: bool
    limit: float

    def part(self, amount: float, samples: int, seconds: float) -> float:
        """Returns an amount as a part of what a batch of so many samples, so long, may take."""
        return amount / (self.limit * (seconds / HOUR_S if self.per_hour else samples))




@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    """The arguments of `LyapunovController`, which documents them."""

    v: float | None = None
    budget: Mapping[str, float | None] | None = None
    bank: float | None = None
    prices: float | Sequence[float] = 1.0
    rest_cost: float = 0.0
    structure: bool = True
    dead_band: float = 0.03

    def __post_init__(self) -> None:
        check_fields(self, v=optional(partial(real, above=True)), budget=optional(_budget), bank=optional(real))
        check_fields(self, prices=_one_or_each, **dict.fromkeys(("rest_cost", "dead_band"), partial(real, most=1.0)))
        if type(self.structure) is not bool:
            raise TypeError(f"LyapunovController.structure={self.structure!r} must be true or false")

    def budgets(self) -> tuple[Budget, ...]:
        """Returns the constraints, sorted by name."""
        found: list[Budget] = []
        for name, limit in (self.budget or {}).items():
            assert limit is not None  # `__post_init__` leaves these out
            found.append(Budget(name, name == "money_per_hour", limit))
        return tuple(found)

    def prices_of(self, ranks: int) -> list[float]:
        """Returns money per hour by rank.

        Raises:
            ValueError: a list of another length.
        """
        if not isinstance(self.prices, tuple):
            return [cast("float", self.prices)] * ranks
        if len(self.prices) != ranks:
            raise ValueError(
                f"LyapunovController(prices=...) lists {len(self.prices)} ranks, but there are {ranks}: give one number"
                " for all, or one per rank"
            )
        return list(self.prices)


def _one_or_each(name: str, value: Any) -> float | tuple[float, ...]:
    if not is_list(value):
        return real(name, value)
    if not value:
        raise ValueError(f"{name}=[] must be a number, or one per rank")
    return tuple(real(f"{name}[{i}]", v) for i, v in enumerate(value))


def _budget(name: str, budget: Any) -> dict[str, float] | None:
    given = sorted(mapping(name, budget, _BUDGETS).items())
    return {key: real(f"{name}.{key}", limit, above=True) for key, limit in given if limit is not None} or None
