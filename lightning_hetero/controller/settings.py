"""What a user says to the online controller, checked and plain (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

Resource = Literal["money", "energy", "traffic"]

_RESOURCES: tuple[Resource, ...] = ("money", "energy", "traffic")
_BUDGETS = tuple(f"{resource}_per_{per}" for per in ("sample", "hour") for resource in _RESOURCES)


class Budget(NamedTuple):
    """One constraint on a long-term mean: of ``resource``, ``limit`` per sample, or per hour."""

    name: str
    resource: Resource
    per_hour: bool
    limit: float




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
    share_band: float = 0.01
    look_every: int = 50
    recheck: int | None = 200

    def __post_init__(self) -> None:
        self._put("v", None if self.v is None else _real("v", self.v, above=True))
        self._put("bank", None if self.bank is None else _real("bank", self.bank))
        for name in ("prices", "power_w", "idle_power_w"):
            self._put(name, _one_or_each(name, getattr(self, name)))
        for name in ("rest_cost", "dead_band", "share_band"):
            self._put(name, _real(name, getattr(self, name), most=1.0))
        for name in ("look_every", "recheck"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (value is None and name == "recheck"):
                raise ValueError(f"LyapunovController({name}={value!r}) must be a whole number >= 1")
        if type(self.structure) is not bool:
            raise TypeError(f"LyapunovController(structure={self.structure!r}) must be true or false")
        self._put("budget", _checked_budget(self.budget))

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen

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


def _real(name: str, value: Any, *, above: bool = False, most: float = math.inf) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0.0 or number > most or (above and number == 0.0):
        limits = f"a finite number {'>' if above else '>='} 0" + (f" and <= {most:g}" if most < math.inf else "")
        raise ValueError(f"LyapunovController({name}={value!r}) must be {limits}")
    return number


def _one_or_each(name: str, value: Any) -> float | tuple[float, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        listed = cast("Sequence[Any]", value)
        if not listed:
            raise ValueError(f"LyapunovController({name}=[]) must be a number, or one per rank")
        return tuple(_real(f"{name}[{i}]", v) for i, v in enumerate(listed))
    return _real(name, value)


def _checked_budget(budget: Any) -> dict[str, float] | None:
    if budget is None:
        return None
    if not isinstance(budget, Mapping):
        raise TypeError(
            f"LyapunovController(budget={budget!r}) must be a mapping, e.g. {{'money_per_sample': 1e-6}}"
        )
    given = cast("Mapping[Any, Any]", budget)
    if unknown := sorted(str(name) for name in given if name not in _BUDGETS):
        raise ValueError(f"LyapunovController(budget=...) has unknown keys {unknown}; known: {', '.join(_BUDGETS)}")
    limits = {str(name): limit for name, limit in sorted(given.items()) if limit is not None}
    return {name: _real(f"budget.{name}", limit, above=True) for name, limit in limits.items()} or None
