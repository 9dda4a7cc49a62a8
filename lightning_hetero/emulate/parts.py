"""The parts of a scenario: slow spells, changes of speed, faults; each checks its own values (layer P)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, TypeVar, cast

from lightning_hetero.checked import check_fields, count, is_list, mapping, optional, real, whole

T = TypeVar("T")

_KINDS = ("kill", "stall", "exception")


def as_speeds(name: str, values: Any) -> tuple[float, ...]:
    """Returns positive speeds; at least one."""
    if not is_list(values) or not values:
        raise ValueError(f"{name}={values!r} must be a list of one or more speeds > 0, e.g. [1.0, 0.5]")
    return tuple(real(f"{name}[{i}]", v, above=True) for i, v in enumerate(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowSpells:
    """Random slow spells, as neighbours on a shared machine cause them; spells that overlap do not multiply.

    Args:
        probability: probability that a spell starts at a step, per rank; in [0, 1].
        factor: how many times slower a rank is during a spell; >= 1.
        steps: length of a spell [steps]; >= 1.

    Raises:
        ValueError: an argument outside its range.
    """

    probability: float
    factor: float
    steps: int

    def __post_init__(self) -> None:
        check_fields(self, probability=partial(real, most=1.0), factor=partial(real, least=1.0), steps=count)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedChange:
    """From ``step`` on, these are the speeds of all ranks (repeated cyclically).

    Raises:
        ValueError: a negative step, or a speed that is not positive.
    """

    step: int
    speeds: Sequence[float]

    def __post_init__(self) -> None:
        check_fields(self, step=whole, speeds=as_speeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """From ``step`` on, ``rank`` is ``factor`` times slower, on top of any `SpeedChange`; factors multiply.

    Args:
        step: first slow step.
        rank: the rank that gets slower.
        factor: how many times slower; >= 1.
        steps: length [steps]; ``None``: for good.

    Raises:
        ValueError: an argument outside its range.
    """

    step: int
    rank: int
    factor: float
    steps: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, step=whole, rank=whole, factor=partial(real, least=1.0), steps=optional(count))

    def holds(self, rank: int, step: int) -> bool:
        """Returns whether ``rank`` is slowed down at ``step``."""
        return rank == self.rank and 0 <= step - self.step < (math.inf if self.steps is None else self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to ``rank`` when it begins ``step``.

    Args:
        step: training step, counted over batches from 0.
        rank: the rank it happens to.
        kind: ``kill`` (SIGKILL to the process), ``stall`` (hangs for ``stall_s``), ``exception``
            (RuntimeError).
        stall_s: length of a stall [s]; > 0 for ``stall``, 0 for the others.

    Raises:
        ValueError: an unknown kind, or an argument outside its range.
    """

    step: int
    rank: int
    kind: Literal["kill", "stall", "exception"]
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, step=whole, rank=whole, stall_s=real)
        if self.kind not in _KINDS:
            raise ValueError(f"Fault.kind={self.kind!r} must be one of {', '.join(_KINDS)}")
        if (self.stall_s > 0.0) != (self.kind == "stall"):
            raise ValueError(
                f"Fault.stall_s={self.stall_s!r} does not fit kind={self.kind!r}: a stall needs stall_s > 0"
                " (seconds), the other kinds take none"
            )


def _build(kind: Callable[..., T], value: Any, what: str) -> T:
    """Returns ``value`` if it is a ``kind``, else makes one of a mapping of its arguments."""
    cls = cast(type, kind)
    if isinstance(value, cls):
        return cast(T, value)
    given = mapping(what, value, [f.name for f in fields(cls)])
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{what}={given!r} is incomplete: {error}") from None


def _build_all(values: Any, what: str, choose: Callable[[Any], Callable[..., T]]) -> tuple[T, ...]:
    if not is_list(values):
        raise TypeError(f"{what}={values!r} must be a list")
    return tuple(_build(choose(v), v, f"{what}[{i}]") for i, v in enumerate(values))


def _choose_change(value: Any) -> Callable[..., SpeedChange | Slowdown]:
    if isinstance(value, Slowdown) or (isinstance(value, Mapping) and "rank" in value):
        return Slowdown
    return SpeedChange


def as_caps(name: str, value: Any) -> tuple[int | None, ...] | None:
    """Returns caps by rank from a list, a mapping {rank: samples} or None."""
    if isinstance(value, Mapping):
        by_rank = {whole(f"{name} rank", r): v for r, v in cast("Mapping[Any, Any]", value).items()}
        value = [by_rank.get(r) for r in range(max(by_rank, default=-1) + 1)]
    if value is not None and not is_list(value):
        raise TypeError(f"{name}={value!r} must be a list by rank, a mapping {{rank: samples}} or None")
    if not value or all(v is None for v in value):
        return None
    return tuple(optional(count)(f"{name}[{i}]", v) for i, v in enumerate(value))


def as_spells(name: str, value: Any) -> SlowSpells:
    """Returns slow spells from a `SlowSpells`, or a mapping of its arguments."""
    return _build(SlowSpells, value, name)


def as_changes(name: str, values: Any) -> tuple[SpeedChange | Slowdown, ...]:
    """Returns changes in order of their step; those of one step stay in the order given."""
    return tuple(sorted(_build_all(values, name, _choose_change), key=lambda c: c.step))


def as_faults(name: str, values: Any) -> tuple[Fault, ...]:
    """Returns faults in order of step and rank.

    Raises:
        ValueError: two faults of one rank at one step.
    """
    faults = sorted(_build_all(values, name, lambda _: Fault), key=lambda f: (f.step, f.rank))
    if len({(f.step, f.rank) for f in faults}) < len(faults):
        raise ValueError(f"{name}={faults} holds two faults of one rank at one step: keep one of them")
    return tuple(faults)
