"""`TuningPolicy`: samples move from the straggler to the leader until neither stands out, and then nothing moves."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.balanced.decide.tuning import TuningPolicy
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy, Decision
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost, Cost, SaturatingCost, SpeedSample
from tests.pure.balanced.kit import FIXED_S, PER_SAMPLE_S, Mail, Rank

SLOW, SWAPPED = (1.0, 1.0, 2.0, 4.0), (4.0, 2.0, 1.0, 1.0)


def lines(slow: Sequence[float]) -> list[Cost]:
    return [AffineCost(fixed_s=k * FIXED_S, per_sample_s=k * PER_SAMPLE_S) for k in slow]


def cards(slow: Sequence[float], saturated: int = 16) -> list[Cost]:
    return [
        SaturatingCost(
            floor_s=k * (FIXED_S + PER_SAMPLE_S * saturated), fixed_s=k * FIXED_S, per_sample_s=k * PER_SAMPLE_S
        )
        for k in slow
    ]


def started(
    total: int = 64, world: int = 4, quantum: int = 1, bounds: ShareBounds | None = None, **kw: Any
) -> TuningPolicy:
    policy = TuningPolicy(**{"warmup": 0, **kw})
    policy.start(world_size=world, total=total, bounds=bounds or ShareBounds(), quantum=quantum)
    return policy


def times_s(costs: Sequence[Cost], shares: Sequence[int]) -> list[float]:
    return [cost.seconds(max(1, b)) for cost, b in zip(costs, shares, strict=True)]  # none is a dummy


def records(times: Sequence[float], shares: Sequence[int]) -> list[SpeedSample]:
    pairs = enumerate(zip(times, shares, strict=True))
    return [SpeedSample(rank=r, step=0, samples=max(1, b), compute_s=t) for r, (t, b) in pairs]


def feed(
    policy: TuningPolicy, costs: Sequence[Cost], times: int, noise: Callable[[], float] = lambda: 1.0
) -> list[Decision]:
    """``times`` records of the shares then in force."""
    said = []
    for _ in range(times):
        measured = [t * noise() for t in times_s(costs, policy.shares)]
        said.append(policy.observe(records(measured, policy.shares)))
    return said


def log_normal(rng: np.random.Generator, noise: float) -> Callable[[], float]:
    return lambda: math.exp(noise * float(rng.standard_normal()) - noise**2 / 2)


def best_s(costs: Sequence[Cost], total: int, low: Sequence[int], up: Sequence[int], quantum: int = 1) -> float:
    """Brute force, of few ranks."""
    choices = [range(a, b + 1, quantum) for a, b in zip(low[:-1], up[:-1], strict=True)]
    splits = ((*head, total - sum(head)) for head in itertools.product(*choices))
    return min(max(times_s(costs, s)) for s in splits if low[-1] <= s[-1] <= up[-1])


def ideal_s(costs: Sequence[Cost], total: int = 64) -> float:
    """Of the default bounds, by the exact solver."""
    low, up = ShareBounds().resolve(len(costs), total)
    return minimax(costs, total, lower=low, upper=up).makespan_s


# ---- a move ------------------------------------------------------------------------------------------------


def test_after_a_window_samples_move_from_the_slowest_to_the_fastest() -> None:
    policy = started(window=3, first_step=0.25)
    said = feed(policy, lines((1.0, 0.5, 2.0, 4.0)), 3)
    assert [d.changed for d in said] == [False, False, True]
    assert policy.shares == (16, 20, 16, 12)
    assert said[-1].reason == "4 samples from rank 3 to rank 1"
    assert said[-1].predicted_s == max(policy.predict_s(policy.shares))


def test_the_first_records_are_ignored() -> None:
    policy = started(window=2, warmup=3)
    assert [d.reason for d in feed(policy, lines(SLOW), 3)] == ["warm-up"] * 3
    assert [d.changed for d in feed(policy, lines(SLOW), 2)] == [False, True]


def test_only_records_of_the_shares_in_force_count() -> None:
    """Of batches drawn before a move, and of last batches, which are smaller."""
    policy = started(window=2)
    costs = lines(SLOW)
    old = policy.shares
    assert feed(policy, costs, 2)[-1].changed
    for shares in [old, old, (8, 8, 8, 8), old]:
        decision = policy.observe(records(times_s(costs, shares), shares))
        assert (decision.changed, decision.reason) == (False, "a batch on other shares")
    assert [d.changed for d in feed(policy, costs, 2)] == [False, True]


def test_a_move_that_makes_the_leader_slower_than_the_straggler_was_is_taken_back() -> None:
    policy = started(world=2, window=1, first_step=0.75)
    costs = lines((1.0, 1.2))
    taken, back, smaller = feed(policy, costs, 3)
    assert taken.shares == (56, 8)  # 24 of 32
    assert back.shares == (32, 32) and "taken back" in back.reason
    assert smaller.shares == (44, 20)
    feed(policy, costs, 30)
    assert max(times_s(costs, policy.shares)) <= ideal_s(costs) + 1.2 * PER_SAMPLE_S


def test_a_step_shrinks_when_samples_would_go_back_the_way_they_came() -> None:
    """Better than before, but straggler and leader have changed roles."""
    policy = started(world=2, window=1, first_step=0.75)
    moves = [d.reason for d in feed(policy, lines((1.0, 2.0)), 40) if d.changed]
    assert moves == ["24 samples from rank 1 to rank 0", "12 samples from rank 0 to rank 1"]
    assert policy.shares == (44, 20)  # 141 and 138 ms


def test_a_rank_that_gave_long_steps_may_take_shorter_ones() -> None:
    """The way back counts from the latest halving."""
    costs: list[Cost] = [
        AffineCost(fixed_s=fixed, per_sample_s=slope) for fixed, slope in ((20.0, 0.3), (0.0, 0.9), (0.0, 3.9))
    ]
    policy = started(total=96, world=3, window=1, first_step=0.75)
    assert [d.reason for d in feed(policy, costs, 3)] == [
        "24 samples from rank 2 to rank 1",
        "12 samples from rank 1 to rank 0",
        "12 samples from rank 1 to rank 2",
    ]


def test_among_equally_slow_ranks_the_step_does_not_shrink() -> None:
    """A move from one of them leaves the other as slow as both were: nothing has gone wrong."""
    policy = started(total=512, window=1, first_step=0.25, tolerance=0.0)
    rng = np.random.default_rng(0)
    said = feed(policy, lines((1.0, 1.0, 9.0, 9.0)), 4, log_normal(rng, 0.001))
    assert [d.reason.split()[0] for d in said] == ["32"] * 4


# ---- where it ends -----------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Cost], int, ShareBounds, int, float, float]:
    world, quantum = draw(st.integers(2, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    units = draw(st.lists(st.integers(1, 12), min_size=world, max_size=world))
    low = [draw(st.integers(0, u)) * quantum for u in units]
    up = [draw(st.integers(u, 24)) * quantum for u in units]
    ms = st.integers(0, 40).map(lambda n: n / 1000)
    affine = st.builds(AffineCost, fixed_s=ms, per_sample_s=ms)
    saturating = st.builds(SaturatingCost, floor_s=ms, fixed_s=ms, per_sample_s=ms)
    costs = draw(st.lists(affine | saturating, min_size=world, max_size=world))
    shifted = [  # a time of 0 is none
        AffineCost(fixed_s=c.fixed_s + 0.001, per_sample_s=c.per_sample_s)
        if isinstance(c, AffineCost)
        else SaturatingCost(floor_s=c.floor_s + 0.001, fixed_s=c.fixed_s, per_sample_s=c.per_sample_s)
        for c in costs
    ]
    first, shrink = draw(st.sampled_from([0.01, 0.35, 1.0])), draw(st.sampled_from([0.3, 0.5, 0.9]))
    return list[Cost](shifted), sum(units) * quantum, ShareBounds(lower=low, upper=up), quantum, first, shrink


def most_moves(policy: TuningPolicy, quanta: int) -> int:
    """Between two halvings shares move one way; each halving may take one move back."""
    step, halvings = policy._quanta, 1
    while step > 1:
        step, halvings = max(1, int(step * policy.shrink)), halvings + 1
    return halvings * (quanta + 1)


@given(case=problems())
@example(case=(lines((1.0, 1.0, 9.0)), 36, ShareBounds(lower=0), 1, 1.0, 0.5))
@example(case=(cards((1.0, 4.0), 4), 24, ShareBounds(), 4, 0.35, 0.5))
def test_with_steady_speeds_it_ends_near_the_best_of_all_splits(
    case: tuple[list[Cost], int, ShareBounds, int, float, float],
) -> None:
    costs, total, bounds, quantum, first_step, shrink = case
    world = len(costs)
    policy = started(total, world, quantum, bounds, window=1, first_step=first_step, shrink=shrink)
    low, up = bounds.resolve(world, total, quantum)
    most = most_moves(policy, total // quantum)
    moves = 0
    for _ in range(most + 2):
        moves += feed(policy, costs, 1)[0].changed
        assert sum(policy.shares) == total
        for share, a, b in zip(policy.shares, low, up, strict=True):
            assert a <= share <= b and share % quantum == 0
    assert moves <= most
    assert not any(d.changed for d in feed(policy, costs, 20))
    best = best_s(costs, total, low, up, quantum)
    spans = zip(costs, low, up, strict=True)
    quanta = [(c, x, x + quantum) for c, a, b in spans for x in range(a, b, quantum)]
    one = max([c.seconds(max(1, y)) - c.seconds(max(1, x)) for c, x, y in quanta], default=0.0)
    assert max(times_s(costs, policy.shares)) <= max(best / (1.0 - policy.tolerance), best + one) * (1.0 + 1e-9)


@pytest.mark.parametrize("least", [2, 3])
@given(
    total=st.integers(4, 40), world=st.integers(2, 4), slow=st.lists(st.floats(0.2, 9.0), min_size=4, max_size=4)
)
def test_no_rank_gets_fewer_than_batch_norm_needs(least: int, total: int, world: int, slow: list[float]) -> None:
    policy = started(total, world, 1, ShareBounds(least=least), window=1)
    for _ in range(30):
        feed(policy, lines(slow[:world]), 1)
        assert sum(policy.shares) == total
        assert all(share == 0 or share >= least for share in policy.shares)


def test_stairs_of_tiles_are_no_change_of_speed() -> None:
    """One sample more may take twice as long: 32 per tile."""

    class Tiles:
        def seconds(self, samples: float) -> float:
            return 0.01 * -(-samples // 32)

        def most_samples(self, deadline_s: float) -> float:
            raise AssertionError("tuning asks for no model")

    class Slower(Tiles):
        def seconds(self, samples: float) -> float:
            return 0.03 * -(-samples // 32)

    costs: list[Cost] = [Tiles(), Slower()]
    policy = started(total=256, world=2, window=2)
    moves = sum(d.changed for d in feed(policy, costs, 300))
    assert moves < 20
    assert not any(d.changed for d in feed(policy, costs, 50))
    assert max(times_s(costs, policy.shares)) <= 0.061  # 192 and 64 samples: the best there is


# ---- noise, hiccups, other speeds --------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_equal_ranks_with_noise_do_not_wander(noise: float) -> None:
    costs = lines((1.0,) * 4)
    over, moves = [], 0
    for seed in range(6):
        policy = started()
        draw = log_normal(np.random.default_rng(seed), noise)
        for _ in range(400):
            over.append(max(times_s(costs, policy.shares)) / costs[0].seconds(16))
            moves += feed(policy, costs, 1, draw)[0].changed
    assert float(np.mean(over)) <= 1.01
    assert moves <= 6 * 4


@pytest.mark.parametrize("costs", [lines(SLOW), cards(SLOW)], ids=["lines", "cards"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_unequal_ranks_end_near_the_best(costs: list[Cost], noise: float) -> None:
    for seed in range(3):
        policy = started(tolerance=0.02)
        feed(policy, costs, 100, log_normal(np.random.default_rng(seed), noise))
        assert max(times_s(costs, policy.shares)) <= 1.1 * ideal_s(costs)


@pytest.mark.parametrize("make", [lines, cards])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_it_begins_anew_when_speeds_change(make: Callable[..., list[Cost]], noise: float) -> None:
    policy = started()
    draw = log_normal(np.random.default_rng(1), noise)
    feed(policy, make(SLOW), 100, draw)
    assert not any(d.changed for d in feed(policy, make(SLOW), 20, draw))
    before = max(times_s(make(SWAPPED), policy.shares))
    soon = feed(policy, make(SWAPPED), 2 * policy.window, draw)
    assert any(d.changed for d in soon)
    assert int(next(d.reason for d in soon if d.changed).split()[0]) > 1  # by the first step's length
    feed(policy, make(SWAPPED), 100, draw)
    after = max(times_s(make(SWAPPED), policy.shares))
    assert after <= 1.1 * ideal_s(make(SWAPPED)) and after <= before


@pytest.mark.parametrize(
    ("slow", "total", "start", "swap"),
    [(SLOW, 64, 25, 32), ((1.0,) * 16 + (4.0,) * 16, 2048, 130, 330)],
    ids=["4 ranks", "32 ranks"],
)
def test_how_many_records_it_takes(slow: tuple[float, ...], total: int, start: int, swap: int) -> None:
    """One pair of ranks at a time: the more there are, the longer."""
    policy = started(total, len(slow))
    for speeds, most in ((slow, start), (slow[::-1], swap)):
        unit = 64 / total * len(slow) / 4  # a rank of speed 1 needs the same for an equal share, however many there are
        costs: list[Cost] = [
            AffineCost(fixed_s=k * FIXED_S, per_sample_s=k * PER_SAMPLE_S * unit) for k in speeds
        ]
        feed(policy, costs, most)
        assert max(times_s(costs, policy.shares)) <= 1.06 * ideal_s(costs, total)
        feed(policy, costs, 400)  # until it has settled, so that the next speeds are a change


def test_a_change_that_is_seen_while_tuning_lengthens_the_step_again() -> None:
    policy = started(world=2, total=128, window=2, tolerance=0.0, first_step=0.5)
    while policy._quanta > 1:
        feed(policy, lines((1.0, 1.5)), 1)
    assert not policy._settled
    said = [d for d in feed(policy, lines((5.0, 1.0)), 12) if d.changed]
    assert max(int(d.reason.split()[0]) for d in said if d.reason[0].isdigit()) >= 16


@pytest.mark.parametrize("factor", [8.0, 0.2])
def test_a_hiccup_now_and_then_moves_nothing(factor: float) -> None:
    policy = started()
    costs = lines((1.0,) * 4)
    for t in range(120):
        times = times_s(costs, policy.shares)
        times[t // 6 % 4] *= factor if t % 6 == 0 else 1.0
        assert not policy.observe(records(times, policy.shares)).changed


def test_a_slow_drift_is_noticed_in_the_end() -> None:
    """Each record is close to the one before; together they are not."""
    policy = started(world=2)
    feed(policy, lines((1.0, 1.0)), 8)
    said = []
    for t in range(100):
        said += feed(policy, lines((1.0, 1.0 + 0.01 * t)), 1)
    assert any(d.changed for d in said)
    costs = lines((1.0, 2.0))
    feed(policy, costs, 60)
    assert max(times_s(costs, policy.shares)) <= 1.06 * ideal_s(costs)


def test_bounds_and_shares_that_somebody_else_changes_are_respected() -> None:
    """Memory may turn out to be smaller than thought, in the middle of a run."""
    policy = started(world=2, window=2)
    costs = lines((1.0, 3.0))
    feed(policy, costs, 5)
    policy.limits.upper[0], policy._shares = 40, (40, 24)
    for _ in range(60):
        feed(policy, costs, 1)
        assert policy.shares[0] <= 40 and sum(policy.shares) == 64
    assert policy.shares == (40, 24)  # the best of those
    again = started(world=2, window=1, first_step=0.75)
    assert feed(again, lines((1.0, 1.2)), 1)[0].shares == (56, 8)
    again.limits.upper[1] = 30  # the move cannot be taken back
    feed(again, lines((1.0, 1.2)), 30)
    assert again.shares == (35, 29)


def test_no_record_is_urgent() -> None:
    policy = started()
    feed(policy, lines(SLOW), 9)
    assert policy.urgent(policy.shares, [9.0] * 4) is False


# ---- all ranks, loaders that read ahead --------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 3])
def test_all_ranks_tune_alike_however_far_loaders_read_ahead(lag: int) -> None:
    mail = Mail(4)
    ranks = [
        Rank(r, mail, lag=lag, ahead=lag, exchange=ExchangeClock(every=1), policy=TuningPolicy()) for r in range(4)
    ]
    steps = 160
    for step in range(steps):
        for rank in ranks:
            rank.draw(0, step, steps, rank.ahead)
        assert len({rank.shares[0, step] for rank in ranks}) == 1
        for rank in ranks:
            rank.train(0, step, SLOW[rank.rank])
    costs = lines(SLOW)
    last = ranks[0].shares[0, steps - 1]
    assert last == ranks[0].shares[0, steps - 30]
    assert max(times_s(costs, last)) <= ideal_s(costs) / 0.95 + 4 * PER_SAMPLE_S


# ---- settings and checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("window", 0, "window=0 must be a whole number >= 1 (records)"),
        ("window", 2.0, "window=2.0 must be"),
        ("first_step", 0.0, "first_step=0.0 must be a finite number in (0, 1] (parts of the equal share)"),
        ("first_step", 1.5, "first_step=1.5"),
        ("shrink", 1.0, "shrink=1.0 must be a finite number in (0, 1)"),
        ("shrink", "half", "shrink='half'"),
        ("tolerance", -0.1, "tolerance=-0.1 must be a finite number in [0, 1)"),
        ("changed", 0.0, "changed=0.0 must be a finite number > 0"),
        ("changed", math.nan, "changed=nan"),
        ("warmup", -1, "warmup=-1"),
    ],
)
def test_bad_settings_are_refused_with_the_value(setting: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        TuningPolicy(**{setting: value})


def test_what_decides_is_told_so_that_ranks_can_compare() -> None:
    plain = TuningPolicy().settings()
    assert plain["policy"] == "TuningPolicy"
    others = {"window": 9, "first_step": 0.2, "shrink": 0.6, "tolerance": 0.1, "changed": 0.3, "warmup": 4}
    for name, value in others.items():
        assert TuningPolicy(**{name: value}).settings() != plain, name  # type: ignore[arg-type]


def kept(policy: TuningPolicy) -> Any:
    return json.loads(json.dumps(policy.state_dict()))


@pytest.mark.parametrize("records_before", [3, 9, 100])
def test_a_resumed_run_goes_on_with_its_shares_and_step(records_before: int) -> None:
    policy = started(window=2)
    feed(policy, lines(SLOW), records_before)
    resumed = TuningPolicy(window=2, warmup=0)
    resumed.load_state_dict(kept(policy))
    assert kept(resumed)["tuning"] == kept(policy)["tuning"]  # a checkpoint before the first batch
    resumed.start(world_size=4, total=64, bounds=ShareBounds())
    assert resumed.shares == policy.shares and resumed._quanta == policy._quanta
    said = feed(resumed, lines(SLOW), 100)
    assert any(d.changed for d in said) is (records_before < 100)
    costs = lines(SLOW)
    assert max(times_s(costs, resumed.shares)) <= ideal_s(costs) / 0.95 + 4 * PER_SAMPLE_S


def test_a_resumed_run_on_other_devices_begins_anew() -> None:
    policy = started()
    feed(policy, lines(SLOW), 100)
    resumed = TuningPolicy(warmup=0)
    resumed.load_state_dict(kept(policy))
    resumed.start(world_size=4, total=64, bounds=ShareBounds())
    assert any(d.changed for d in feed(resumed, lines(SWAPPED), 8))


@pytest.mark.parametrize(
    "start",
    [
        {"world_size": 3, "total": 64},
        {"world_size": 4, "total": 96},
        {"world_size": 4, "total": 64, "quantum": 8},
        {"world_size": 4, "total": 64, "bounds": ShareBounds(upper=17)},
    ],
    ids=str,
)
def test_shares_that_do_not_fit_are_not_taken_over(start: dict[str, Any]) -> None:
    policy = started()
    feed(policy, lines(SLOW), 100)
    resumed, fresh = TuningPolicy(), TuningPolicy()
    resumed.load_state_dict(kept(policy))
    for one in (resumed, fresh):
        one.start(**{"bounds": ShareBounds(), **start})
    assert resumed.shares == fresh.shares


def test_a_checkpoint_of_another_policy_is_no_trouble() -> None:
    other = BalancePolicy()
    other.start(world_size=4, total=64, bounds=ShareBounds())
    policy = TuningPolicy()
    policy.load_state_dict(json.loads(json.dumps(other.state_dict())))
    policy.start(world_size=4, total=64, bounds=ShareBounds())
    assert policy.shares == (16,) * 4
    other.load_state_dict(kept(policy))
    other.start(world_size=4, total=64, bounds=ShareBounds())
    assert other.shares == (16,) * 4
