"""Random faults against the stale engine on a virtual clock, by `tests.ranks.stale.simulated`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Bsp
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.transport.membership import Membership
from tests.ranks.stale.simulated.cases import Case, Fault, Point, case_of
from tests.ranks.stale.simulated.simulation import Outcome, simulate

SEEDS = range(56, 120)  # these have every kind of fault, and within them a bug must be found
MORE = range(56)


def of_seed(seed: int) -> Outcome:
    return simulate(case_of(seed))


once = cache(of_seed)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_random_faults_break_no_promise(seeds: range) -> None:
    outcomes = [once(seed) for seed in seeds]
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    faults, ended = Counter[str](), Counter[str]()
    for outcome in outcomes:
        faults += outcome.faults
        ended += outcome.ended
    kinds = {"kill", "stop", "cut", "slow", "raise", "start again", "kill the server", "stop the server"}
    assert seeds is MORE or faults.keys() >= kinds
    assert ended["done"] > len(seeds) and ended["killed"] > 0 and ended["with a cause"] > 0
    assert sum(outcome.stale for outcome in outcomes) > 0


def test_a_seed_is_all_there_is_to_a_schedule() -> None:
    for seed in SEEDS[::10]:
        first, again = once(seed), of_seed(seed)
        assert first.trace == again.trace
        assert first == again
    assert len({once(seed).digest for seed in SEEDS[:10]}) == 10


CALM = Case(
    seed=0, policy=Bsp, ends=((6, 12),) * 4, sample_s=(0.1, 0.1, 0.1), start_s=0.01, noise=0.0, slow_messages=0.0,
    long_s=0.0, lag_s=0.0, validate_every=0, save_every=0, substeps=0, ahead=0, faults=(),
)  # fmt: skip

FOUND = {
    "no rank was waited for that was still on its way to the server when another died": (
        Fault("stop", (0, 2), 0.001, 8.0), Fault("kill", (1,), Point(1, "behind PUSH", 1)),
    ),
    "a barrier waited for a rank that fell silent between two batches": (
        Fault("silence", (1,), Point(1, "before CLAIM", 2)),
    ),
    "a rank was taken for met that had died with another": (
        Fault("kill", (1, 2), Point(2, "behind MEET", 1)),
    ),
    "a joining rank was invited with a checkpoint whose writer had died": (
        Fault("kill", (1,), Point(1, "answered CLAIM", 1), 0.1), Fault("kill", (0,), Point(0, "behind STATE", 1)),
    ),
    "a rank was waited for in a collective that had died behind the meeting before it": (
        Fault("kill", (1,), Point(1, "answered MEET", 2)),
    ),
    "a rank was waited for in a collective that had fallen silent behind the meeting before it": (
        Fault("silence", (1,), Point(1, "answered MEET", 2)),
    ),
    "rank 0, which had lost its server, ended it under the others": (
        Fault("cut", (0,), Point(0, "before CLAIM", 2)),
    ),
    "of two that came again at once one fell silent, and all others waited with it": (
        Fault("kill", (1, 2), Point(1, "behind PUSH", 1), 0.1), Fault("silence", (2,), Point(2, "ready", 1)),
    ),
    "of two that came again at once one fell silent while it loaded, and all others waited with it": (
        Fault("kill", (1, 2), Point(1, "behind PUSH", 1), 0.1), Fault("silence", (1,), Point(1, "connect", 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_once_stays_mended(what: str) -> None:
    for seed in range(8):  # other times of messages
        outcome = simulate(replace(CALM, seed=seed, faults=FOUND[what]))
        assert outcome.violations == ()
        assert not outcome.excused
        ends = {"done", "killed", "silent", *(["with a cause"] if "lost its server" in what else [])}
        assert outcome.ended["done"] > 0 and set(outcome.ended) <= ends


def twice(accept: Callable[..., None]) -> Callable[..., None]:
    def broken(self: OpenBatch, *args: Any) -> None:
        accept(self, *args)
        accept(self, *args)

    return broken


def whatever_became_of_it(receive: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Coordinator, worker: Any, held: Any, *args: Any, **said: Any) -> Any:
        held.void = ""
        return receive(self, worker, held, *args, **said)

    return broken


BUGS: dict[str, tuple[type, str, Callable[[Any], Any], str]] = {
    "a contribution counts twice": (OpenBatch, "accept", twice, "2 times"),
    "a meeting waits for the dead": (
        Membership,
        "gone",
        lambda _: lambda self, rank, reason, **_: self.connected.discard(rank),
        "no answer",
    ),
    "samples that were issued again are accepted from both": (Coordinator, "_receive", whatever_became_of_it, ""),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_and_its_seed_shows_it_again(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, broken, sign = BUGS[bug]
    with monkeypatch.context() as planted:
        planted.setattr(place, name, broken(getattr(place, name)))
        found = next((outcome for outcome in map(of_seed, SEEDS) if outcome.violations), None)
        assert found is not None
        assert any(sign in violation for violation in found.violations)
        assert of_seed(found.seed) == found
    assert once(found.seed).violations == ()
