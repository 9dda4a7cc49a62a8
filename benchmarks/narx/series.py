"""Generated series of one rank's speed on a host that others use, too, and of what the host's counters tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

_NOISE = 0.03  # of times, relative
_LOAD_NOISE = 0.03  # of the free part


class Step(NamedTuple):
    """One step.

    Attributes:
        slow: how many times longer it takes than on a free host: what is to be forecast.
        noise: what else its time is multiplied by.
        free_cpu, free_mem: told with its time.
    """

    slow: float
    noise: float
    free_cpu: float
    free_mem: float


def _walk(rng: Random, steps: int) -> list[float]:
    """Around 0, standard deviation 1, forgets in 33 steps."""
    values = [rng.gauss(0.0, 1.0)]
    for _ in range(steps - 1):
        values.append(0.97 * values[-1] + 0.243 * rng.gauss(0.0, 1.0))
    return values


def _others(rng: Random, steps: int, *, most: int = 2, change: float = 0.05) -> list[int]:
    """Competitors on the core."""
    values, now = [], 0
    for _ in range(steps):
        now = rng.randint(0, most) if rng.random() < change else now
        values.append(now)
    return values


def _spells(rng: Random, steps: int) -> list[float]:
    """Four times slower for 2 to 5 steps, now and then."""
    slow = [1.0] * (steps + 5)
    for step in range(steps):
        if rng.random() < 0.03:
            length = rng.randint(2, 5)
            slow[step : step + length] = [4.0] * length
    return slow[:steps]


class _Made(NamedTuple):
    """``slow`` by step; what is told, before noise; the noise of times."""

    slow: Sequence[float]
    free_cpu: Sequence[float]
    free_mem: Sequence[float] | None = None  # 0.6
    noise: float = _NOISE
    hiccup: float = 0.0  # part of the steps that take three times as long, at random


def _load(rng: Random, steps: int) -> _Made:
    slow = [1.0 + n for n in _others(rng, steps)]
    return _Made(slow, [1.0 / s for s in slow])


def _load_announced(rng: Random, steps: int) -> _Made:
    slow = [1.0 + n for n in _others(rng, steps + 1)]
    return _Made(slow[:-1], [1.0 / s for s in slow[1:]])


def _short_load(rng: Random, steps: int) -> _Made:
    slow = [1.0 + n for n in _others(rng, steps, most=1, change=0.2)]
    return _Made(slow, [1.0 / s for s in slow])


def _not_told(rng: Random, steps: int) -> _Made:
    return _Made(_short_load(rng, steps).slow, [math.nan] * steps, [math.nan] * steps)


def _spells_announced(rng: Random, steps: int) -> _Made:
    slow = _spells(rng, steps + 1)
    return _Made(slow[:-1], [1.0 / s for s in slow[1:]])


def _spells_by_surprise(rng: Random, steps: int) -> _Made:
    return _Made(_spells(rng, steps), [1.0] * steps)


def _wandering(rng: Random, steps: int) -> _Made:
    free = [1.0 / (1.0 + math.exp(-1.0 - 2.0 * v)) for v in _walk(rng, steps)]
    return _Made([1.0 / f for f in free], free)


def _paging(rng: Random, steps: int) -> _Made:
    """Three times slower while less than 15 % of the memory is free."""
    free = [min(max(0.3 + 0.2 * v, 0.02), 1.0) for v in _walk(rng, steps)]
    return _Made([3.0 if f < 0.15 else 1.0 for f in free], [1.0] * steps, free)


def _rhythm(rng: Random, steps: int) -> _Made:
    return _Made([1.5 if step % 3 == 0 else 1.0 for step in range(steps)], [1.0] * steps)


def _idle_talk(rng: Random, steps: int) -> list[float]:
    return [1.0 / (1.0 + n) for n in _others(rng, steps)]


def _unrelated(rng: Random, steps: int) -> _Made:
    return _Made([1.0] * steps, _idle_talk(rng, steps), noise=0.1)


def _hiccups(rng: Random, steps: int) -> _Made:
    return _Made([1.0] * steps, _idle_talk(rng, steps), hiccup=0.05)


def _drift(rng: Random, steps: int) -> _Made:
    return _Made([math.exp(0.5 * v) for v in _walk(rng, steps)], _idle_talk(rng, steps))


def _swap(rng: Random, steps: int) -> _Made:
    return _Made([1.0 if step // 150 % 2 else 3.0 for step in range(steps)], [1.0] * steps)


RELATED: Mapping[str, Callable[[Random, int], _Made]] = {
    "load": _load,
    "load, announced": _load_announced,
    "short load": _short_load,
    "short load, not told": _not_told,
    "spells, announced": _spells_announced,
    "load that wanders": _wandering,
    "paging": _paging,
    "rhythm": _rhythm,
}
"""Where something told, or the times themselves, says what is next."""

SERIES: Mapping[str, Callable[[Random, int], _Made]] = {
    **RELATED,
    "unrelated": _unrelated,
    "hiccups": _hiccups,
    "drift": _drift,
    "swap": _swap,
    "spells": _spells_by_surprise,
}


def series(name: str, seed: int, steps: int) -> list[Step]:
    """Makes a series; the same for the same arguments.

    Raises:
        KeyError: there is none of this name.
    """
    rng = Random(f"{name} {seed}")
    made = SERIES[name](rng, steps)
    noise = [math.exp(made.noise * rng.gauss(0.0, 1.0)) for _ in range(steps)]
    noise = [3.0 * n if rng.random() < made.hiccup else n for n in noise]
    cpu = [_told(rng, free, _LOAD_NOISE) for free in made.free_cpu]
    memory = [_told(rng, free, 0.01) for free in made.free_mem or [0.6] * steps]
    return [Step(*step) for step in zip(made.slow, noise, cpu, memory, strict=True)]


def _told(rng: Random, free: float, noise: float) -> float:
    return free if math.isnan(free) else min(max(free + noise * rng.gauss(0.0, 1.0), 0.0), 1.0)
