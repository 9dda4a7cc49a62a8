"""What a user says to the online controller, checked and plain (layer P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from lightning_hetero.checked import is_list, mapping, real, whole

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
        self._put("v", None if self.v is None else _number("v", self.v, above=True))
        self._put("bank", None if self.bank is None else _number("bank", self.bank))
        for name in ("prices", "power_w", "idle_power_w"):
            self._put(name, _one_or_each(name, getattr(self, name)))
        for name in ("rest_cost", "dead_band", "share_band"):
            self._put(name, _number(name, getattr(self, name), most=1.0))
        for name in ("look_every", "recheck"):
            if (value := getattr(self, name)) is not None or name != "recheck":
                whole(f"LyapunovController.{name}", value, least=1)
        if type(self.structure) is not bool:
            raise TypeError(f"LyapunovController.structure={self.structure!r} must be true or false")
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


def _number(name: str, value: Any, **limits: Any) -> float:
    return real(f"LyapunovController.{name}", value, **limits)


def _one_or_each(name: str, value: Any) -> float | tuple[float, ...]:
    if not is_list(value):
        return _number(name, value)
    if not value:
        raise ValueError(f"LyapunovController.{name}=[] must be a number, or one per rank")
    return tuple(_number(f"{name}[{i}]", v) for i, v in enumerate(value))


def _checked_budget(budget: Any) -> dict[str, float] | None:
    if budget is None:
        return None
    given = sorted(mapping("LyapunovController.budget", budget, _BUDGETS).items())
    return {name: _number(f"budget.{name}", limit, above=True) for name, limit in given if limit is not None} or None
