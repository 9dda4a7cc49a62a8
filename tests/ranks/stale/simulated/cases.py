"""What is simulated, drawn from a seed: a cluster, a training, and what goes wrong when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

from benchmarks.stale.policies import Backup, Buffered, Drop
from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Policy, Saps, Ssp

SERVER = -1
"""The server, among the victims of a fault."""

LIVENESS_S = 5.0

PATIENCE_S = 50.0
"""A rank that is stopped for so long may be left behind."""

Kind = Literal["kill", "stop", "silence", "cut", "slow", "raise"]


@dataclass(frozen=True, slots=True)
class Point:
    """The ``count``-th time that ``rank`` is at a place that begins so: "slot", "behind PUSH", "answered MEET", ..."""

    rank: int
    place: str
    count: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: ``kill`` is SIGKILL, and perhaps the rank is started again; ``stop`` SIGSTOP for some seconds; ``silence``
            for ever, e.g. a power cut: connections stay; ``cut`` ends the connection to the server; ``slow``: computes
            ten times slower for some seconds; ``raise``: an error in the user's code.
        victims: ranks, all at once; `SERVER` is the server.
        when: time [s], or when some rank, perhaps another, is at a point.
        seconds: how long; of ``kill``: until it is started again, 0: it is not.
    """

    kind: Kind
    victims: tuple[int, ...]
    when: float | Point
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """A run.

    Attributes:
        seed: of it all.
        policy: makes a policy.
        ends: of the global steps of each epoch, cumulative samples.
        sample_s, start_s: per rank, time of a sample, and of a chunk besides [s].
        noise: spread of these times.
        slow_messages, long_s: see `Delays`.
        lag_s: longest time the server takes to look at what has come [s].
        validate_every: global steps between two validations; 0: none.
        save_every: global steps between two checkpoints of the lowest rank, while others train; 0: none.
        substeps: optimizer steps per batch (manual optimization); 0: automatic optimization.
        ahead: see `Coordinator`.
        faults: what goes wrong.
    """

    seed: int
    policy: Callable[[], Policy]
    ends: tuple[tuple[int, ...], ...]
    sample_s: tuple[float, ...]
    start_s: float
    noise: float
    slow_messages: float
    long_s: float
    lag_s: float
    validate_every: int
    save_every: int
    substeps: int
    ahead: int
    faults: tuple[Fault, ...]

    @property
    def ranks(self) -> int:
        return len(self.sample_s)

    @property
    def limit_s(self) -> float:
        """Time by which every rank that lives must have an answer [s]; a stopped one a while after it goes on.

        All the work done by the slowest rank, and the longest waits there are: torch's timeout of half an hour for a
        collective whose member is silent, a minute for ranks that look for one another, the limit after which samples
        are issued again; each of these once per fault.
        """
        samples, ticks = sum(ends[-1] for ends in self.ends), sum(map(len, self.ends))
        work_s = 4.0 * (samples * max(self.sample_s) + 3 * ticks * self.start_s)
        return 2400.0 + 2.0 * work_s + sum(150.0 + 2.0 * fault.seconds for fault in self.faults)


POLICIES: tuple[tuple[int, Callable[[random.Random], Callable[[], Policy]]], ...] = (
    (6, lambda draw: _flexible(draw)),
    (2, lambda draw: Bsp),
    (1, lambda draw: Asp),
    (1, lambda draw: partial(Ssp, bound=draw.randint(0, 3))),
    (1, lambda draw: partial(Drop, bound=draw.randint(0, 4))),
    (1, lambda draw: Saps),
    (1, lambda draw: partial(Saps, threshold=1, bound=draw.randint(2, 4), micro=2)),
    (1, lambda draw: Buffered),
    (1, lambda draw: partial(Backup, spares=draw.randint(0, 2))),
)
"""Weights, and how a policy is drawn."""

KINDS: tuple[Kind, ...] = (*("kill",) * 5, *("stop",) * 3, *("cut",) * 2, "silence", "slow", "raise")

PLACES = (
    "", "slot", "before PUSH", "behind PUSH", "answered PUSH", "behind CLAIM", "answered CLAIM", "behind EPOCH",
    "answered EPOCH", "behind MEET", "answered MEET", "collective", "look", "rebuilt", "behind STATE", "before LEAVE",
    "connect",
)  # fmt: skip


def _flexible(draw: random.Random) -> Callable[[], Policy]:
    bound, grace = draw.randint(0, 3), draw.choice((0.0, 0.1, 0.1, 0.5))
    return partial(Flexible, bound=bound, grace=grace)


def case_of(seed: int) -> Case:
    """Returns the run of a seed."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
    epochs: list[tuple[int, ...]] = []
    for _ in range(draw.choice((1, 2, 3, 4))):
        batch = draw.randint(1, 3 * ranks)
        sizes = [batch] * draw.randint(1, 4)
        sizes[-1] = draw.randint(1, batch)
        epochs.append(tuple(accumulate(sizes)))
    weights = [weight for weight, _ in POLICIES]
    make = draw.choices([make for _, make in POLICIES], weights)[0](draw)
    ticks = sum(map(len, epochs))
    sample_s = tuple(draw.choice((0.05, 0.1, 0.1, 0.2, 0.8)) for _ in range(ranks))
    # By when all is done, roughly: where faults fall.
    about_s = 0.2 + sum(ends[-1] for ends in epochs) / sum(1 / s for s in sample_s) + 0.02 * ticks
    return Case(
        seed=seed,
        policy=make,
        ends=tuple(epochs),
        sample_s=sample_s,
        start_s=draw.choice((0.0, 0.01, 0.2)),
        noise=draw.choice((0.0, 0.1, 0.5)),
        slow_messages=draw.choice((0.0, 0.0, 0.05, 0.3)),
        long_s=draw.choice((0.05, 0.5, 3.0)),
        lag_s=draw.choice((0.0, 0.0, 0.02, 0.3)),
        validate_every=draw.choice((0, 0, 1, 2, 3)),
        save_every=draw.choice((0, 0, 0, 1, 3)),
        substeps=draw.choice((0, 0, 0, 2)),
        ahead=draw.randint(0, 2),
        faults=_faults(draw, ranks, about_s, ticks),
    )


def _faults(draw: random.Random, ranks: int, about_s: float, ticks: int) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4))):
        kind = draw.choice(KINDS)
        many = 2 if kind in ("kill", "stop") and ranks > 2 and draw.random() < 0.4 else 1
        victims = tuple(draw.sample(range(ranks), many))
        if kind in ("kill", "stop") and draw.random() < 0.04:
            victims = (SERVER,)
        seconds = draw.choice((0.0, 0.1, 1.0, 5.0) if kind == "kill" else (0.05, 1.0, 8.0, 90.0))
        faults.append(Fault(kind, victims, _when(draw, ranks, about_s, ticks), seconds))
    return tuple(faults)


def _when(draw: random.Random, ranks: int, about_s: float, ticks: int) -> float | Point:
    if draw.random() < 0.4:
        return draw.random() * about_s
    place = draw.choice(PLACES)
    most = 10 * ticks if place == "" else 2 if place in ("before LEAVE", "connect") else 2 * ticks
    return Point(draw.randrange(ranks), place, draw.randint(1, most))
