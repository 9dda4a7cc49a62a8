"""The scenarios as fixed in ``scenarios/*.yaml``: devices and links, how they change, who runs, what is expected.

*States* are the different speeds that the devices have; *phases* say from when on which state holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.pipeline.scenarios import Case
from benchmarks.pipeline.scenarios import read as read_cases
from lightning_hetero import Scenario
from lightning_hetero.emulate import Slowdown, SpeedChange

DDP, BALANCED, CHAIN, EVEN, STATIC, SHARES, OURS, ORACLE = CONTENDERS = (
    "stock DDP", "balanced engine", "even chain", "best even of 1, 2, 4 groups", "best static plan",
    "static plan + shares", "controller", "oracle",
)  # fmt: skip
REACTING = (BALANCED, SHARES, OURS)
"""Those that answer changes: they train every batch of a scenario. The others are the same whenever a state holds."""

FOLDER = Path(__file__).parent / "scenarios"
TICK_S = 0.1
"""A step of an emulated scenario whose changes come at times."""

Unit = Literal["batch", "second"]
Speeds = tuple[float, ...]

_CASE = ("name", "models", "global_batch", "sample_s", "fixed_s", "cluster")
_KEYS = (*_CASE, "batches", "changes", "contenders")
_OPTIONS = ("unit", "less_than", "above_oracle")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One device is slower for a while.

    Attributes:
        at: first slow batch, or second.
        rank: of the device.
        factor: how many times slower.
        until: first one that is not; None: for good.
    """

    at: int
    rank: int
    factor: float
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Course:
    """One model on one cluster that changes.

    Attributes:
        case: the model, and the cluster as it is at first.
        batches: to train.
        changes: in time.
        contenders: some of `CONTENDERS`.
        unit: of the changes.
        less_than: goals: so much less time than that contender [%].
        above_oracle: goal: at most so much more time than the oracle [%]; None: no goal.
    """

    case: Case
    batches: int
    changes: tuple[Change, ...]
    contenders: tuple[str, ...]
    unit: Unit = "batch"
    less_than: Mapping[str, float] = field(default_factory=dict[str, float])
    above_oracle: float | None = None

    @property
    def scenario(self) -> Scenario:
        """What is emulated; a step of it is a batch, or `TICK_S`."""
        slow = [
            Slowdown(
                step=self._step(c.at),
                rank=c.rank,
                factor=c.factor,
                steps=None if c.until is None else self._step(c.until - c.at),
            )
            for c in self.changes
        ]
        return replace(self._calm(tuple(device.speed for device in self.case.cluster.devices)), changes=slow)

    def steady(self, states: Sequence[Speeds], batches: int) -> Scenario:
        """Returns a scenario with one state after the other, each for so many batches."""
        later = [SpeedChange(step=i * batches, speeds=speeds) for i, speeds in enumerate(states) if i]
        return replace(self._calm(states[0]), changes=later)

    def _step(self, at: int) -> int:
        return at if self.unit == "batch" else round(at / TICK_S)

    def _calm(self, speeds: Speeds) -> Scenario:
        return Scenario(speeds=speeds, sample_s=self.case.sample_s, step_s=self.case.fixed_s)

    @property
    def phases(self) -> list[tuple[int, Speeds]]:
        """From which batch, or second, on which speeds hold."""
        ends = {c.at for c in self.changes} | {c.until for c in self.changes if c.until is not None}
        starts = sorted({0, *(end for end in ends if self.unit == "second" or end < self.batches)})
        scenario, ranks = self.scenario, range(self.case.world_size)
        return [(start, tuple(scenario.speed(rank, self._step(start)) for rank in ranks)) for start in starts]

    @property
    def states(self) -> list[Speeds]:
        """The different speeds, in the order of their first phase."""
        return list(dict.fromkeys(speeds for _, speeds in self.phases))

    @property
    def numbered(self) -> list[tuple[int, int]]:
        """The phases, with numbers of states."""
        states = self.states
        return [(start, states.index(speeds)) for start, speeds in self.phases]

    def case_in(self, speeds: Speeds) -> Case:
        """Returns the case with devices of these speeds."""
        cluster = self.case.cluster
        devices = tuple(replace(d, speed=speed) for d, speed in zip(cluster.devices, speeds, strict=True))
        return replace(self.case, cluster=replace(cluster, devices=devices))

    def quick(self) -> Course:
        """The same, shortened to a tenth, without those that take most time."""

        def short(change: Change) -> Change:
            until = None if change.until is None else change.until // 10
            return replace(change, at=change.at // 10, until=until)

        return replace(
            self,
            batches=self.batches // 10,
            changes=tuple(map(short, self.changes)),
            contenders=tuple(name for name in self.contenders if name not in (DDP, BALANCED, EVEN)),
        )


def played(
    phases: Sequence[tuple[float, int]], unit: Unit, batches: int, measured: Sequence[Sequence[float]]
) -> list[float]:
    """Returns the step times of somebody for whom only the state counts, over a whole scenario [s].

    Args:
        phases: starts and numbers of states.
        unit: of the starts.
        batches: to train.
        measured: step times by state, taken in turns.

    >>> played([(0, 0), (2, 1)], "batch", 5, [[1.0], [3.0, 4.0]])
    [1.0, 1.0, 3.0, 4.0, 3.0]
    >>> played([(0, 0), (2, 1)], "second", 3, [[1.5], [3.0]])
    [1.5, 1.5, 3.0]
    """
    turns = [cycle(times) for times in measured]
    steps: list[float] = []
    now_s = 0.0
    for batch in count():
        if batch == batches:
            break
        at = batch if unit == "batch" else now_s
        state = next(state for start, state in reversed(phases) if start <= at)
        steps.append(next(turns[state]))
        now_s += steps[-1]
    return steps


def read(plain: Mapping[str, Any]) -> Course:
    """Returns the scenario of one file.

    Raises:
        ValueError: a key is missing or unknown, or a value out of its range.
    """
    missing, unknown = set(_KEYS) - set(plain), set(plain) - {*_KEYS, *_OPTIONS}
    if missing or unknown:
        raise ValueError(f"a scenario lacks {sorted(missing)} and has the unknown keys {sorted(unknown)}")
    (case,) = read_cases({key: plain[key] for key in _CASE})
    goals, contenders = dict(plain.get("less_than", {})), tuple(plain["contenders"])
    if strange := {*contenders, *goals} - set(CONTENDERS):
        raise ValueError(f"contenders and goals {sorted(strange)} must be some of {', '.join(CONTENDERS)}")
    if absent := ({OURS, ORACLE, *goals}) - set(contenders):
        raise ValueError(f"contenders={list(contenders)} must have {sorted(absent)}, too")
    unit, batches = plain.get("unit", "batch"), plain["batches"]
    if unit not in ("batch", "second") or (unit == "second" and BALANCED in contenders):
        raise ValueError(f"unit={unit!r} must be batch or second; with seconds the {BALANCED} cannot run")
    changes = tuple(Change(**change) for change in plain["changes"])
    for change in changes:
        whole = all(type(at) is int for at in (change.at, change.until) if at is not None)
        if not whole or change.at < 0 or (change.until is not None and change.until <= change.at):
            raise ValueError(f"{change} must begin at a whole number >= 0, and end after it")
        if change.rank not in range(case.world_size) or not change.factor >= 1.0:
            raise ValueError(f"{change}: there are {case.world_size} ranks, and the factor must be >= 1")
    return Course(
        case=case,
        batches=int(batches),
        changes=changes,
        contenders=contenders,
        unit=unit,
        less_than={name: float(value) for name, value in goals.items()},
        above_oracle=plain.get("above_oracle"),
    )


ORDER = ("base", "slow", "fast", "clock", "memory_capped", "heavy", "equal")
QUICK = ("base",)


def courses(quick: bool = False) -> dict[str, Course]:
    """Returns all scenarios by file, in the order of the table; ``quick``: one of them, shortened."""
    files = {path.stem: path for path in FOLDER.glob("*.yaml")}
    if set(files) != set(ORDER):
        raise ValueError(f"scenarios/ holds {sorted(files)}, but ORDER names {sorted(ORDER)}")
    every = {stem: read(yaml.safe_load(files[stem].read_text(encoding="utf-8"))) for stem in ORDER}
    return {stem: every[stem].quick() for stem in QUICK} if quick else every
