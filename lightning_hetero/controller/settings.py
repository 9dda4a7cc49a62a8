"""What a user says to the online controller, checked and plain (layer P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from lightning_hetero.checked import check_fields, is_list, mapping, optional, real

Resource = Literal["money", "energy", "traffic"]

HOUR_S = 3600.0
_RESOURCES: tuple[Resource, ...] = ("money", "energy", "traffic")
_BUDGETS = tuple(f"{resource}_per_{per}" for per in ("sample", "hour") for resource in _RESOURCES)


class Budget(NamedTuple):
    """One constraint on a long-term mean: of ``resource``, ``limit`` per sample, or per hour."""

    name: str
    resource: Resource
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
    power_w: float | Sequence[float] = 1.0
    idle_power_w: float | Sequence[float] = 0.0
    rest_cost: float = 0.0
    structure: bool = True
    dead_band: float = 0.03

    def __post_init__(self) -> None:
        check_fields(self, v=optional(partial(real, above=True)), budget=optional(_budget), bank=optional(real))
        check_fields(self, prices=_one_or_each, power_w=_one_or_each, idle_power_w=_one_or_each)
        check_fields(self, **dict.fromkeys(("rest_cost", "dead_band"), partial(real, most=1.0)))
        if type(self.structure) is not bool:
            raise TypeError(f"LyapunovController.structure={self.structure!r} must be true or false")

    def budgets(self) -> tuple[Budget, ...]:
        """Returns the constraints, sorted by name."""
        found: list[Budget] = []
        for name, limit in (self.budget or {}).items():
            assert limit is not None  # `__post_init__` leaves these out
            resource, _, per = name.partition("_per_")
            found.append(Budget(name, cast("Resource", resource), per == "hour", limit))
        return tuple(found)

    def each(self, name: Literal["prices", "power_w", "idle_power_w"], ranks: int) -> list[float]:
        """Returns one number per rank of what may be given as one for all.

        Raises:
            ValueError: a list of another length.
        """
        value: float | tuple[float, ...] = getattr(self, name)
        if not isinstance(value, tuple):
            return [value] * ranks
        if len(value) != ranks:
            raise ValueError(
                f"LyapunovController({name}=...) lists {len(value)} ranks, but there are {ranks}: give one number for"
                " all, or one per rank"
            )
        return list(value)


def _one_or_each(name: str, value: Any) -> float | tuple[float, ...]:
    if not is_list(value):
        return real(name, value)
    if not value:
        raise ValueError(f"{name}=[] must be a number, or one per rank")
    return tuple(real(f"{name}[{i}]", v) for i, v in enumerate(value))


def _budget(name: str, budget: Any) -> dict[str, float] | None:
    given = sorted(mapping(name, budget, _BUDGETS).items())
    return {key: real(f"{name}.{key}", limit, above=True) for key, limit in given if limit is not None} or None
