"""What unequal hardware looks like, as one object: speeds, noise, changes, faults, memory caps (layer P).

A `Scenario` drives tests, examples, benchmarks and simulation, so that they mean the same by "rank 3 is
four times slower from step 60 on". It is pure: the same (seed, rank, step) gives the same numbers in every
process and in any order of calls, because each number comes from its own position of a counter-based
generator (Philox; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and never from a state
that advances. The idea to script faults in one place is that of torchft's ``EventInjector``; the rest is
ours.

    time of a rank's step = (step_s + sample_s * samples) / speed(rank, step) * jitter,   E[jitter] = 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np

from lightning_hetero.checked import check_fields, count, is_list, mapping, optional, real, whole

T = TypeVar("T")

_KINDS = ("kill", "stall", "exception")
_SPELLS, _JITTER = 0, 1  # independent streams of random numbers


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Unequal, changing and failing devices, described independently of any hardware.

    Lists and mappings of plain values are accepted everywhere, so a scenario can be written in YAML. All
    methods are pure. ``step`` is the training step counted over batches and epochs, from 0.

    Args:
        speeds: relative speed by rank; 1 is the reference, 0.25 is four times slower. Ranks beyond the list
            repeat it cyclically.
        sample_s: emulated time per sample on a device of speed 1 [s]. If neither it nor ``step_s`` is given,
            real work is stretched instead, see `stretch`.
        step_s: emulated fixed time per step on a device of speed 1 [s]; a rank without samples pays it as
            well.
        jitter: relative standard deviation of each step's time, log-normal with mean 1.
        spells: random slow spells, a `SlowSpells`.
        changes: `SpeedChange` (``step, speeds``) or `Slowdown` (``step, rank, factor, steps``), in any order;
            of two speed changes at one step the later in the list holds.
        faults: `Fault` (``step, rank, kind, stall_s``); at most one per rank and step.
        mem_samples: most samples a rank's memory holds in one forward pass, by rank: a list (``None``: no
            cap; ranks beyond the list have no cap) or a mapping {rank: samples}. Throttled ranks raise
            `torch.OutOfMemoryError` if their batch is larger, without touching real memory.
        seed: of jitter and spells; in [0, 2**64).

    Raises:
        ValueError: a value outside its range, unknown keys, or two faults of one rank at one step.
        TypeError: a list is expected and something else was given.

    >>> swap = Scenario(speeds=[1, 0.25], sample_s=0.01).slow(rank=0, factor=2, at_step=10)
    >>> swap.work_s(0, 9, 8), swap.work_s(0, 10, 8), swap.work_s(1, 0, 8)
    (0.08, 0.16, 0.32)
    """

    speeds: Sequence[float] = (1.0,)
    sample_s: float | None = None
    step_s: float = 0.0
    jitter: float = 0.0
    spells: SlowSpells | Mapping[str, Any] | None = None
    changes: Sequence[SpeedChange | Slowdown | Mapping[str, Any]] = ()
    faults: Sequence[Fault | Mapping[str, Any]] = ()
    mem_samples: Sequence[int | None] | Mapping[int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, speeds=as_speeds, sample_s=optional(real), step_s=real, jitter=real, seed=whole)
        check_fields(self, spells=optional(as_spells), changes=as_changes, faults=as_faults, mem_samples=as_caps)
        if self.seed >= 2**64:
            raise ValueError(f"seed={self.seed} must be in [0, 2**64)")

    def slow(self, rank: int, factor: float, at_step: int = 0, steps: int | None = None) -> Scenario:
        """Returns this scenario with ``rank`` ``factor`` times slower from ``at_step`` on (for ``steps``)."""
        slowdown = Slowdown(step=at_step, rank=rank, factor=factor, steps=steps)
        return replace(self, changes=(*self.changes, slowdown))

    def change(self, speeds: Sequence[float], at_step: int) -> Scenario:
        """Returns this scenario with other speeds of all ranks from ``at_step`` on."""
        return replace(self, changes=(*self.changes, SpeedChange(step=at_step, speeds=speeds)))

    def jittered(self, jitter: float) -> Scenario:
        """Returns this scenario with this relative standard deviation of the step times."""
        return replace(self, jitter=jitter)

    def kill(self, rank: int, at_step: int) -> Scenario:
        """Returns this scenario with the process of ``rank`` killed as it begins ``at_step``."""
        return replace(self, faults=(*self.faults, Fault(step=at_step, rank=rank, kind="kill")))

    @property
    def emulated(self) -> bool:
        """Whether step times are given (``sample_s`` or ``step_s``); otherwise real work is stretched."""
        return self.sample_s is not None or self.step_s > 0.0

    @property
    def top_speed(self) -> float:
        """The highest speed of any rank at any step."""
        changed = [v for c in self.changes if isinstance(c, SpeedChange) for v in c.speeds]
        return max([*self.speeds, *changed])

    def speed(self, rank: int, step: int) -> float:
        """Returns the relative speed of ``rank`` at ``step``: with changes and spells, without jitter.

        Raises:
            ValueError: a negative or fractional rank or step.
        """
        rank, step = whole("rank", rank), whole("step", step)
        speeds, slower = self.speeds, 1.0
        for change in self.changes:
            if isinstance(change, SpeedChange) and change.step <= step:
                speeds = change.speeds
            elif isinstance(change, Slowdown) and change.holds(rank, step):
                slower *= change.factor
        spells = cast("SlowSpells | None", self.spells)
        if spells is not None and self._in_spell(spells, rank, step):
            slower *= spells.factor
        return speeds[rank % len(speeds)] / slower

    def stretch(self, rank: int, step: int) -> float:
        """Returns how many times longer than on a calm device of speed 1 the step takes: jitter / speed."""
        slower = 1.0 / self.speed(rank, step)
        if self.jitter == 0.0:
            return slower
        sigma = math.sqrt(math.log1p(self.jitter**2))  # log-normal: variance exp(sigma^2) - 1, mean 1
        normal = float(self._generator(_JITTER, rank, [0, step, 0, 0]).standard_normal())
        return slower * math.exp(sigma * normal - sigma**2 / 2)

    def work_s(self, rank: int, step: int, samples: int) -> float:
        """Returns the emulated time of the step's compute [s], jitter included.

        Raises:
            ValueError: negative samples, or no emulated time is given.
        """
        return self._reference_s(whole("samples", samples)) * self.stretch(rank, step)

    def fault(self, rank: int, step: int) -> Fault | None:
        """Returns what happens to ``rank`` as it begins ``step``, if anything."""
        faults = cast("tuple[Fault, ...]", self.faults)
        return next((f for f in faults if f.rank == rank and f.step == step), None)

    def mem_cap(self, rank: int) -> int | None:
        """Returns the most samples ``rank`` can hold in one forward pass; ``None``: no cap."""
        caps = cast("tuple[int | None, ...]", self.mem_samples or ())
        return caps[rank] if rank < len(caps) else None

    def unused(self, world_size: int) -> tuple[str, ...]:
        """Returns what is said of ranks that there are not, as words; empty if all of it applies."""
        lists: list[tuple[str, Sequence[float]]] = [("speeds", self.speeds)]
        single = [(f"a fault ({f.kind})", f.rank) for f in cast("tuple[Fault, ...]", self.faults)]
        for change in self.changes:
            if isinstance(change, SpeedChange):
                lists.append((f"speeds from step {change.step} on", change.speeds))
            elif isinstance(change, Slowdown):
                single.append(("a slowdown", change.rank))
        caps = cast("tuple[int | None, ...]", self.mem_samples or ())
        single += [("a cap of memory", rank) for rank, cap in enumerate(caps) if cap is not None]
        beyond = [(what, values[world_size:]) for what, values in lists]
        return (
            *(f"{what} beyond the first {world_size}: {list(rest)}" for what, rest in beyond if rest),
            *(f"{what} of rank {rank}" for what, rank in single if rank >= world_size),
        )

    def _reference_s(self, samples: float) -> float:
        if not self.emulated:
            raise ValueError(
                "this scenario has no emulated time, it stretches real work: to ask for seconds, give"
                " sample_s (seconds per sample) or step_s (seconds per step)"
            )
        return self.step_s + (self.sample_s or 0.0) * samples

    def _generator(self, stream: int, rank: int, counter: Sequence[int]) -> np.random.Generator:
        # Seed, rank and stream make the key, the step lies in the counter: no two draws share a position.
        key = np.array([self.seed, 2 * rank + stream], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)))

    def _in_spell(self, spells: SlowSpells, rank: int, step: int) -> bool:
        # Philox yields four numbers per count, so step s reads number s whatever the window starts at.
        first = max(0, step - spells.steps + 1)
        block = first // 4
        draws = self._generator(_SPELLS, rank, [block, 0, 0, 0]).random(step + 1 - 4 * block)
        return bool((draws[first - 4 * block :] < spells.probability).any())
