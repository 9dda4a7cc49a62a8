"""The scenarios, fixed in one place: who is how fast, what a step costs, how many steps are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from lightning_hetero.emulate import Scenario, SlowSpells
from lightning_hetero.emulate.scenario import as_changes

SPELLS = SlowSpells(probability=1 / 30, factor=6.0, steps=8)  # a quarter of the steps, as in `benchmarks.stale`
PATTERN = (1.0, 1.0, 0.5, 0.25)
STRONG = (1.0, 1.0, 0.5, 0.125)
LOOPS = ("no busy loop", "one busy loop", "two busy loops")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One emulated cluster.

    Attributes:
        name: as in the tables.
        world_size: ranks.
        scenario: speeds and costs.
        per_rank: the loader's batch size; the global batch is this times the ranks.
        steps: optimizer steps per run.
        swap_at: step at which the speeds are reversed, or ``None``.
        min_samples: the strategy's argument; ``None`` is its default, a quarter of the equal share.
    """

    name: str
    world_size: int
    scenario: Scenario
    per_rank: int = 32
    steps: int = 40
    swap_at: int | None = None
    min_samples: int | None = None

    @property
    def calm(self) -> bool:
        """Whether speeds do not vary at random, so that the goals apply."""
        return self.scenario.jitter == 0.0 and self.scenario.spells is None

    @property
    def equal(self) -> bool:
        """Whether the devices are equally fast but for chance: a fixed division has nothing to divide unevenly."""
        return len(set(self.scenario.speeds)) == 1 and self.swap_at is None

    @property
    def global_batch(self) -> int:
        return self.per_rank * self.world_size

    def quick(self) -> Case:
        """The same case with fewer steps."""
        if self.scenario.spells is not None:
            return replace(self, steps=30)
        if self.swap_at is None:
            return replace(self, steps=16)
        speeds = list(self.scenario.speeds)
        base = Scenario(speeds=speeds, sample_s=self.scenario.sample_s, step_s=self.scenario.step_s)
        return replace(self, steps=24, swap_at=10, scenario=base.change(speeds[::-1], at_step=10))


def best_static(scenario: Scenario, per_rank: int, steps: int, caps: Sequence[int]) -> tuple[int, ...]:
    """Returns the constant shares that make a whole run shortest, in hindsight: samples move until no move helps.

    Args:
        scenario: jitter and spells do not count.
        per_rank: samples of an equal share.
        steps: of the run.
        caps: the most samples of each rank.
    """
    ranks, scenario = range(len(caps)), replace(scenario, jitter=0.0, spells=None)
    fixed_s, sample_s = scenario.step_s, scenario.sample_s or 0.0
    changes = {0, *(change.step for change in as_changes("changes", scenario.changes) if change.step < steps), steps}
    spans = [(end - begin, [scenario.speed(r, begin) for r in ranks]) for begin, end in pairwise(sorted(changes))]

    def run_s(shares: Sequence[int]) -> float:
        """The time of the run; of equal ones the one with less work on the other slow ranks is better."""
        spent = [(n, [(fixed_s + x * sample_s) / v for x, v in zip(shares, now, strict=True)]) for n, now in spans]
        return sum(n * (max(times) + 1e-6 * sum(t * t for t in times)) for n, times in spent)

    shares = [min(per_rank, cap) for cap in caps]
    while sum(shares) < per_rank * len(caps):
        shares[min((r for r in ranks if shares[r] < caps[r]), key=lambda r: shares[r])] += 1
    better = True
    while better:
        better = False
        for size, giver, taker in product((8, 1), ranks, ranks):
            tried = list(shares)
            tried[giver] -= size
            tried[taker] += size
            fits = giver != taker and tried[giver] > 0 and tried[taker] <= caps[taker]
            if fits and run_s(tried) < run_s(shares) - 1e-12:
                shares, better = tried, True
    return tuple(shares)


@dataclass(frozen=True, kw_only=True)
class EqualCase:
    """Equal devices: what the strategy costs when it cannot help.

    Attributes:
        world_size: ranks.
        ddp_step_s: what a step of stock DDP is to take, all in all [s]; the emulated work is made to fit.
        steps: optimizer steps per run.
    """

    world_size: int
    ddp_step_s: float
    steps: int

    @property
    def name(self) -> str:
        return f"{self.world_size} equal ranks, {self.ddp_step_s * 1e3:.0f} ms steps of stock DDP"

    def quick(self) -> EqualCase:
        """The same case with fewer steps."""
        return replace(self, steps=40)


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Real work of two ranks beside busy loops on the second one's core.

    Attributes:
        model: ``"GPT"`` or ``"CNN"``, see `benchmarks.balanced.busy`.
        loops: how many.
        phase: steps with the loops, and without, in turn; 0: they run all the time.
        steps: optimizer steps per run.
        per_rank: samples of an equal share.
    """

    model: str
    loops: int
    per_rank: int
    phase: int = 0
    steps: int = 40
    world_size: int = 2

    @property
    def name(self) -> str:
        return f"{self.model}, {LOOPS[self.loops]}, {'coming and going' if self.phase else 'all the time'}"

    @property
    def shares(self) -> tuple[int, int]:
        """The best fixed shares in hindsight: a core is divided equally among the programs on it.

        Where the loops come and go these are the best ones for the time with them, too: from there on each sample that
        moves to the second rank costs three in one half of the steps and saves one in the other half.
        """
        slow = round(2 * self.per_rank / (2 + self.loops))
        return 2 * self.per_rank - slow, slow

    @property
    def left_out(self) -> str:
        """The contender that is not asked here: the noise is shown without loops, NARX where they come and go."""
        return "DDP again" if self.phase else "balanced, narx"

    def is_loaded(self, step: int) -> bool:
        """Whether the loops run in a step."""
        return not self.phase or step // self.phase % 2 == 1

    def quick(self) -> Contention:
        """The same case with fewer steps."""
        return replace(self, steps=24)


def contended() -> list[Contention]:
    """None, one or two loops all the time, and two that come and go."""
    gpt, cnn = [[Contention(model=m, loops=n, per_rank=k) for n in (0, 1, 2)] for m, k in (("GPT", 16), ("CNN", 32))]
    return [*gpt, Contention(model="GPT", loops=2, per_rank=16, phase=30, steps=120), *cnn]


def unequal_cases() -> list[Case]:
    """The unequal clusters, from two to eight ranks."""

    def scenario(speeds: Sequence[float], world_size: int, **more: object) -> Scenario:
        every = [speeds[r % len(speeds)] for r in range(world_size)]
        return Scenario(speeds=every, sample_s=0.0015, step_s=0.006, **more)  # type: ignore[arg-type]

    two = scenario((1.0, 0.25), 2)
    four, equal = scenario(PATTERN, 4), scenario((1.0,), 4)
    return [
        Case(name="2 ranks 1:1/4", world_size=2, scenario=two),
        Case(name="2 ranks 1:1/2", world_size=2, scenario=scenario((1.0, 0.5), 2)),
        Case(name="4 ranks 1:1:1/2:1/4", world_size=4, scenario=four),
        Case(name="4 ranks 1:1:1/2:1/4, 10% jitter", world_size=4, scenario=four.jittered(0.1)),
        Case(name="4 ranks 1:1:1/2:1/8", world_size=4, scenario=scenario(STRONG, 4), min_samples=1),
        Case(name="4 ranks 1:1:1:1/8", world_size=4, scenario=scenario((1.0, 1.0, 1.0, 0.125), 4), min_samples=1),
        Case(
            name="4 ranks, speeds reversed at step 30",
            world_size=4,
            scenario=four.change(PATTERN[::-1], at_step=30),
            steps=60,
            swap_at=30,
        ),
        Case(name="4 equal ranks", world_size=4, scenario=equal),
        Case(name="4 equal ranks, 10% jitter", world_size=4, scenario=equal.jittered(0.1)),
        Case(name="4 equal ranks, slow spells", world_size=4, scenario=replace(equal, spells=SPELLS), steps=60),
        Case(
            name="4 ranks 1:1:1/2:1/4, slow spells",
            world_size=4,
            scenario=replace(four, spells=SPELLS),
            steps=60,
        ),
        Case(name="8 ranks 1:1:1/2:1/4 twice", world_size=8, scenario=scenario(PATTERN, 8)),
    ]


def equal_cases() -> list[EqualCase]:
    """Equal devices with short and ordinary steps."""
    return [
        EqualCase(world_size=world_size, ddp_step_s=step_s, steps=steps)
        for world_size in (2, 4)
        for step_s, steps in ((0.003, 300), (0.010, 200), (0.030, 60))
    ]
