"""`Narx`: learns what the load does to the time, is the Kalman filter where it does nothing, is the same everywhere."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hetero.predictors import Kalman, Narx, Predictor
from lightning_hetero.predictors import kalman as narx_module

FIXED_S, PER_SAMPLE_S = 9e-3, 3e-3
Series = list[tuple[float, float, float, float]]  # how slow, noise, free_cpu, free_mem


def fed(predictor: Predictor, series: Series, seed: int = 0) -> Predictor:
    errors(predictor, series, seed)
    return predictor


def errors(predictor: Predictor, series: Series, seed: int = 0) -> list[float]:
    """Returns |log(true / forecast)| one step ahead, with shares that move a little."""
    rng, found = Random(seed), []
    for slow, noise, cpu, mem in series:
        samples = rng.randint(12, 20)
        true_s = slow * (FIXED_S + PER_SAMPLE_S * samples)
        if predictor.ready:
            found.append(abs(math.log(true_s / predictor.predict(samples))))
        predictor.told(free_cpu=cpu, free_mem=mem)
        predictor.update(samples, true_s * noise)
    return found


def noise(rng: Random, relative: float = 0.03) -> float:
    return math.exp(relative * rng.gauss(0.0, 1.0))


def share(rng: Random, free: float, relative: float = 0.03) -> float:
    return min(max(free + relative * rng.gauss(0.0, 1.0), 0.0), 1.0)


def others(rng: Random, steps: int, most: int = 2, change: float = 0.05) -> list[int]:
    found, now = [], 0
    for _ in range(steps):
        now = rng.randint(0, most) if rng.random() < change else now
        found.append(now)
    return found


# --- where the load tells something ---


def load(rng: Random, steps: int) -> Series:
    """One minus what others take is what is left: told together with the time."""
    return [(1.0 + n, noise(rng), share(rng, 1.0 / (1.0 + n)), 0.6) for n in others(rng, steps)]


def announced(rng: Random, steps: int) -> Series:
    """Spells that the counters show one step before the time does."""
    slow = [1.0] * (steps + 6)
    for step in range(steps):
        if rng.random() < 0.03:
            length = rng.randint(2, 5)
            slow[step : step + length] = [4.0] * length
    return [(slow[k], noise(rng), share(rng, 1.0 / slow[k + 1]), 0.6) for k in range(steps)]


def wandering(rng: Random, steps: int) -> Series:
    found, value = [], 0.0
    for _ in range(steps):
        value = 0.97 * value + 0.243 * rng.gauss(0.0, 1.0)
        free = 1.0 / (1.0 + math.exp(-1.0 - 2.0 * value))
        found.append((1.0 / free, noise(rng), share(rng, free), 0.6))
    return found


@pytest.mark.parametrize(("make", "most"), [(load, 0.9), (announced, 0.35), (wandering, 0.9)])
def test_what_the_load_does_is_learned(make: Callable[[Random, int], Series], most: float) -> None:
    """Mean error over the filter's; the goals are not met by a network that is not told the load."""
    ratios = []
    for seed in range(3):
        series = make(Random(f"{make.__name__} {seed}"), 500)
        narx, kalman = (fmean(errors(p, series)[100:]) for p in (Narx(), Kalman()))
        ratios.append(narx / kalman)
    assert fmean(ratios) < most


def test_without_a_load_it_is_an_autoregression_on_times() -> None:
    """Every third step takes longer, which a filter takes for noise."""
    rng = Random(1)
    rhythm = [(1.5 if k % 3 == 0 else 1.0, noise(rng), math.nan, math.nan) for k in range(400)]
    narx, kalman = (fmean(errors(p, rhythm)[100:]) for p in (Narx(), Kalman()))
    assert narx < 0.5 * kalman


# --- where it tells nothing ---


def idle(rng: Random, steps: int) -> list[float]:
    """A load that moves and has nothing to do with the time."""
    return [share(rng, 1.0 / (1.0 + n)) for n in others(rng, steps)]


def noisy(rng: Random, steps: int) -> Series:
    return [(1.0, noise(rng, 0.1), cpu, 0.6) for cpu in idle(rng, steps)]


def hiccups(rng: Random, steps: int) -> Series:
    return [(1.0, (3.0 if rng.random() < 0.05 else 1.0) * noise(rng), cpu, 0.6) for cpu in idle(rng, steps)]


def drift(rng: Random, steps: int) -> Series:
    found, value = [], 0.0
    for cpu in idle(rng, steps):
        value += 0.01 * rng.gauss(0.0, 1.0)
        found.append((math.exp(value), noise(rng), cpu, 0.6))
    return found


def swap(rng: Random, steps: int) -> Series:
    return [(3.0 if k // 100 % 2 else 1.0, noise(rng), cpu, 0.6) for k, cpu in enumerate(idle(rng, steps))]


@given(st.sampled_from([noisy, hiccups, drift, swap]), st.integers(0, 2**32))
@settings(max_examples=20)
def test_it_is_never_much_worse_than_the_filter(make: Callable[[Random, int], Series], seed: int) -> None:
    """Over 300 steps no more than 5 % of the filter's error, and one step of a change misjudged."""
    series = make(Random(seed), 300)
    narx, kalman = (math.fsum(errors(p, series, seed)) for p in (Narx(), Kalman()))
    assert narx < 1.05 * kalman + math.log(3.0)


def test_a_relation_that_ends_makes_the_filter_count_again() -> None:
    rng = Random(4)
    narx = fed(Narx(), announced(rng, 400))
    assert narx.state_dict()["network_error"] < 0.5 * narx.state_dict()["filter_error"]  # type: ignore[operator]
    for k in range(200):  # the same talk of load, and a steady time
        narx.told(free_cpu=share(rng, 0.25 if k % 20 < 4 else 1.0), free_mem=0.6)
        narx.update(16, (FIXED_S + 16 * PER_SAMPLE_S) * noise(rng))
        if k > 100:
            assert narx.predict(16) == pytest.approx(FIXED_S + 16 * PER_SAMPLE_S, rel=0.05)


def test_until_it_is_warm_it_is_the_filter_to_the_bit() -> None:
    narx, kalman = Narx(warm=10**9), Kalman()
    for slow, factor, cpu, mem in announced(Random(2), 200):
        narx.told(free_cpu=cpu, free_mem=mem)
        for predictor in (narx, kalman):
            predictor.update(16, slow * factor)
        assert narx.cost() == kalman.cost() and narx.std_s(9) == kalman.std_s(9)


# --- the same numbers everywhere ---

loads = st.one_of(st.floats(0.0, 1.0), st.just(math.nan), st.floats())
record = st.tuples(
    st.one_of(st.integers(1, 4), st.integers(1, 10**9)), st.floats(1e-12, 1e12), loads, loads, st.booleans()
)
Records = list[tuple[int, float, float, float, bool]]


def feed(predictor: Predictor, records: Records) -> None:
    for samples, compute_s, cpu, mem, tells in records:
        if tells:
            predictor.told(free_cpu=cpu, free_mem=mem)
        predictor.update(samples, compute_s)


@given(st.lists(record, min_size=1, max_size=60))
@example([(16, 1e-12 if k % 2 else 1e12, k / 60, 0.0, True) for k in range(60)])
@example([(k % 3 + 1, 1e12 if k % 2 else 1e-12, math.nan, 1.0, True) for k in range(60)])
def test_whatever_comes_the_model_is_finite_and_its_state_round_trips(records: Records) -> None:
    first, second = Narx(warm=1, margin=0.0, zone=0.0), Narx(warm=1, margin=0.0, zone=0.0)
    feed(first, records[: len(records) // 2])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    third = first.fresh()
    feed(third, records[: len(records) // 2])
    for one in records[len(records) // 2 :]:
        for predictor in (first, second, third):
            feed(predictor, [one])
        cost = first.cost()
        assert 0.0 <= cost.fixed_s < math.inf and 0.0 <= cost.per_sample_s < math.inf
        assert cost.fixed_s + cost.per_sample_s > 0.0 and 0.0 <= first.std_s(7) < math.inf
        assert cost == second.cost() == third.cost()
    assert first.state_dict() == second.state_dict() == third.state_dict()


def test_the_numbers_are_the_same_on_every_machine() -> None:
    """To the last bit, since ranks on unlike hosts must decide alike; the inputs are made without libraries, too."""
    narx = Narx()
    for k in range(300):
        slow = 4.0 if k % 23 < 4 else 1.0
        narx.told(free_cpu=0.25 if (k + 1) % 23 < 4 else 1.0 - (k * 29 % 31) / 500.0, free_mem=0.5 + (k % 7) / 100.0)
        narx.update(12 + k % 9, slow * (0.009 + 0.003 * (12 + k % 9)) * (1.0 + (k * 37 % 101 - 50) / 2000.0))
    assert narx.factor != 1.0
    numbers = [narx.predict(16), narx.network_error, *narx.weights]
    assert hashlib.sha256(struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()[:16] == "71b55f9e07483f90"


def test_only_operations_that_are_rounded_alike_everywhere() -> None:
    """No exp, log, pow or sum of an array: their last bits differ between libraries, and so would decisions.

    IEEE 754 fixes those of sqrt.
    """
    tree = ast.parse(inspect.getsource(narx_module))
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "math"}
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    powers = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow)]
    assert used <= {"fsum", "sqrt"} and not called & {"sum", "pow", "round"} and "numpy" not in ast.unparse(tree)
    assert all(isinstance(side, ast.Constant) and type(side.value) is int for n in powers for side in (n.left, n.right))


def test_weights_stay_bounded_however_little_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recursive least squares that forgets loses its hold where inputs stand still; here it stops to forget."""
    monkeypatch.setattr(narx_module, "_FORGET", 0.05)
    narx = Narx()
    rng = Random(3)
    for k in range(3000):
        narx.told(free_cpu=1.0, free_mem=0.6)
        narx.update(16, 0.06 * noise(rng, 0.01 if k % 1000 < 900 else 0.3))
        spread: Sequence[float] = narx.spread
        n = len(narx.weights)
        assert all(v > 0.0 for v in spread[:: n + 1])
        assert math.fsum(spread[:: n + 1]) <= 1.1 * 10.0 * n
    assert max(map(abs, narx.weights)) < 10.0
    assert narx.predict(16) == pytest.approx(0.06, rel=0.3)


# --- state and settings ---


def test_a_copy_does_not_share_its_lists() -> None:
    one = fed(Narx(), announced(Random(0), 50))
    state = one.state_dict()
    other = one.fresh()
    other.load_state_dict(state)
    fed(other, announced(Random(1), 5))
    assert one.state_dict() == state and other.state_dict() != state
    assert one.fresh().state_dict() == Narx().state_dict()


def test_a_load_counts_for_one_record() -> None:
    """Not told again is not known, whatever was told before."""
    silent, told = Narx(), Narx()
    for predictor in (silent, told):
        predictor.told(free_cpu=0.5, free_mem=0.5)
        predictor.update(16, 0.06)
        predictor.told(free_cpu=math.nan, free_mem=math.nan) if predictor is told else None
        predictor.update(16, 0.06)
    assert silent.state_dict() == told.state_dict()
    assert silent.past_loads[:2] == [0.0, 0.0] and silent.past_loads[2] > 0.0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("warm", 0), ("warm", 1.5), ("zone", -0.1), ("zone", math.nan), ("margin", 1.0),
    ],
)  # fmt: skip
def test_settings_are_checked(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{setting}=.* must (lie in \[|be a whole number >=)"):
        Narx(**{setting: value})  # type: ignore[arg-type]
