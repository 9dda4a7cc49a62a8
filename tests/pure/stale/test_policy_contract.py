"""The contract that every policy keeps, the engine's and those of the benchmarks: over random schedules and faults.

Each sample once, no contribution older than the bound, one end of each global step, no wait that the policy does not
claim: asserted in `tests.pure.stale.random_workers`, event by event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stale.policies import WRITTEN, Backup, Drop, Quorum
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import _KNOWN, Bsp, Flexible, Policy, Pooled, Saps, Ssp, by_name
from tests.pure.stale.random_workers import Books, Case, run

RATES = st.sampled_from([0.05, 0.1, 0.1, 0.1, 0.2, 0.8, 2.0])
CHANCE = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.4])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(1, 5))
    epochs = []
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            sizes = [draw(st.integers(1, 40))] * draw(st.integers(1, 6))
            sizes[-1] = draw(st.integers(1, sizes[-1]))
        else:
            sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        epochs.append(tuple(accumulate(sizes)))
    when = st.tuples(st.floats(0.0, 40.0), st.integers(0, workers - 1))
    return Case(
        ends=tuple(epochs),
        rates_s=tuple(draw(st.lists(RATES, min_size=workers, max_size=workers))),
        launch_s=draw(st.sampled_from([0.01, 0.5])),
        jitter=draw(st.sampled_from([0.0, 0.0, 0.2, 0.6])),
        nonfinite=draw(CHANCE),
        early=draw(CHANCE),
        give_back=draw(CHANCE),
        stall=draw(CHANCE),
        late=draw(CHANCE),
        deaths=tuple(draw(st.lists(when, max_size=3))),
        joins=tuple(draw(st.lists(when, max_size=3))),
        seed=draw(st.integers(0, 2**32 - 1)),
        ahead=draw(st.integers(0, 2)),
    )


POLICIES: dict[str, Callable[[], Policy]] = {
    **{name: partial(by_name, name) for name in _KNOWN},
    **WRITTEN,
    "flexible, never held": partial(Flexible, grace=0.0, bound=0),
    "flexible, grace 0.5": partial(Flexible, grace=0.5, bound=1),
    "flexible, a barrier": partial(Flexible, grace=math.inf),
    "ssp, lead 1": partial(Ssp, bound=1),
    "saps, early": partial(Saps, threshold=1, bound=2, micro=1),
    "drop, bound 2": partial(Drop, bound=2),
    "backup, no spare": partial(Backup, spares=0),
    "quorum of one": partial(Quorum, quorum=1, bound=1),
    "quorum, none late": partial(Quorum, bound=0),
}


def check(policy: Policy, case: Case) -> Books:
    return run(
        Coordinator(policy, workers=range(len(case.rates_s)), ahead=case.ahead, liveness_s=20.0), case
    )


@pytest.mark.parametrize("name", POLICIES)
@given(case=cases())
@settings(max_examples=30)
def test_every_policy_keeps_the_contract(name: str, case: Case) -> None:
    policy = POLICIES[name]()
    books = check(policy, case)
    bound = policy.bound_for(len(case.rates_s))
    assert bound is None or max(books.staleness, default=0) <= bound
    if isinstance(policy, Pooled):
        assert all(u.worth == 1.0 and u.ends_step for epoch in books.updates for u in epoch)


@pytest.mark.parametrize("name", ["flexible", "bsp"])
@given(
    workers=st.integers(1, 5),
    chunk=st.integers(1, 20),
    global_steps=st.integers(1, 6),
    last=st.floats(0.0, 1.0),
    rate_s=st.floats(0.01, 0.1),
    launch=st.floats(0.0, 20.0),
    ahead=st.integers(0, 3),
)
@settings(max_examples=50)
def test_with_equal_constant_speeds_every_update_is_exactly_its_batch(
    name: str, workers: int, chunk: int, global_steps: int, last: float, rate_s: float, launch: float, ahead: int
) -> None:
    sizes = [workers * chunk] * global_steps
    if global_steps > 1:
        sizes[-1] = max(1, round(sizes[-1] * last))
    ends = tuple(accumulate(sizes))
    case = Case(ends=(ends,) * 3, rates_s=(rate_s,) * workers, launch_s=launch * rate_s, ahead=ahead)
    books = check(by_name(name), case)
    assert set(books.staleness) == {0}
    assert sum(books.refused.values()) == books.second_issues  # of an epoch's last, short batch, to idle workers
    for epoch in books.positions:
        assert epoch == [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def test_flexible_waits_for_no_straggler() -> None:
    """Three equal workers and one 8 times slower: close to the speed of all hands, no wait beyond the grace."""
    ends = tuple(range(64, 64 * 40 + 1, 64))
    case = Case(ends=(ends, ends), rates_s=(0.1, 0.1, 0.1, 0.8), launch_s=0.1)
    books = check(Flexible(), case)
    ideal_s = 2 * ends[-1] / (3 / 0.1 + 1 / 0.8)
    assert books.now_s <= 1.15 * ideal_s
    assert books.longest_wait_s <= 0.1 * 1.2 * ideal_s / 80
    assert set(books.staleness) <= {0, 1, 2}
    assert sum(n for s, n in books.staleness.items() if s) <= 0.1 * 2 * ends[-1]
    slow = check(Bsp(), case)
    assert slow.now_s > 3.5 * books.now_s


def test_a_straggler_whose_speed_was_not_known_is_left_behind() -> None:
    """Its first chunk is as large as everybody's: the others fill in, and it comes late by no more than the bound."""
    case = Case(ends=((64, 128, 192, 256),), rates_s=(0.1, 0.1, 0.1, 0.8))
    books = check(Flexible(), case)
    assert books.longest_wait_s <= 0.1 * 0.1 * 20 + 1e-9
    assert max(books.staleness) >= 1 or books.reissued["stale"] == 1
    assert books.now_s < 16 * 0.8 + 8.0
