"""What a user, a command line or YAML gives, checked and made plain; and what JSON is given (layer P)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, cast


def real(name: str, value: Any, *, least: float = 0.0, above: bool = False, most: float = math.inf) -> float:
    """Returns a finite float from ``least`` (above it, if ``above``) to ``most``.

    Raises:
        ValueError: anything else.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most) or (above and number == least):
        limits = f"{'>' if above else '>='} {least:g}" + (f" and <= {most:g}" if most < math.inf else "")
        raise ValueError(f"{name}={value!r} must be a finite number {limits}")
    return number


def whole(name: str, value: Any, *, least: int = 0) -> int:
    """Returns an int >= ``least``.

    Raises:
        ValueError: anything else.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
    return number


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a list, a tuple or Hydra's list; a text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def mapping(name: str, value: Any, known: Collection[str], *, needed: Collection[str] = ()) -> dict[str, Any]:
    """Returns a mapping, e.g. Hydra's, as a dict.

    Raises:
        TypeError: it is none.
        ValueError: a key is not ``known``, or one is missing that is ``needed``.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r} must be a mapping with some of the keys {', '.join(known)}")
    given = {str(key): item for key, item in cast("Mapping[Any, Any]", value).items()}
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"{name} has unknown keys {unknown}: it takes {', '.join(known)}")
    if missing := [key for key in needed if key not in given]:
        raise ValueError(f"{name} lacks {missing}")
    return given


def finite_or_none(value: float) -> float | None:
    """Returns the number, None for those that JSON does not know: no limit, or not known."""
    return value if math.isfinite(value) else None


def check_fields(target: object, **checks: Callable[[str, Any], Any]) -> None:
    """Makes fields of a frozen dataclass what their checks return; a check gets the field's name and value."""
    for name, check in checks.items():
        object.__setattr__(target, name, check(f"{type(target).__name__}.{name}", getattr(target, name)))


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Returns the check of a field that may be None."""
    return lambda name, value: None if value is None else check(name, value)


count = partial(whole, least=1)
"""The check of a field that is a number of things: >= 1."""
