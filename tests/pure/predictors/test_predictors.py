"""Each predictor by itself, fed with streams whose law is known."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.predictors import Ewma, Kalman, LastValue, Narx, Predictor, by_name

KINDS = ("last", "ewma", "kalman", "narx")
FIXED_S, PER_SAMPLE_S = 9e-3, 3e-3

samples = st.one_of(st.integers(1, 4), st.integers(1, 100), st.integers(1, 10**9))
times_s = st.floats(1e-12, 1e12)
stream = st.lists(st.tuples(samples, times_s), min_size=1, max_size=40)


def affine_s(b: float, slow: float = 1.0) -> float:
    return slow * (FIXED_S + PER_SAMPLE_S * b)


def fed(predictor: Predictor, measurements: list[tuple[int, float]]) -> Predictor:
    for b, compute_s in measurements:
        predictor.update(b, compute_s)
    return predictor


def settled(kind: str = "kalman", noise: float = 0.0, seed: int = 0) -> Predictor:
    """Sixty measurements with b in 12..20."""
    rng = np.random.default_rng(seed)
    return fed(by_name(kind), [(12 + t % 9, affine_s(12 + t % 9) * jitter(rng, noise)) for t in range(60)])


def jitter(rng: np.random.Generator, noise: float) -> float:
    """Log-normal with mean 1."""
    return math.exp(noise * float(rng.standard_normal()) - noise**2 / 2)


# --- the contract, for all ---


@given(st.sampled_from(KINDS), stream)
def test_any_stream_gives_a_finite_nonnegative_and_monotone_model(
    kind: str, measurements: list[tuple[int, float]]
) -> None:
    predictor = by_name(kind)
    for b, compute_s in measurements:
        predictor.update(b, compute_s)
        cost = predictor.cost()
        assert 0.0 <= cost.fixed_s < math.inf and 0.0 <= cost.per_sample_s < math.inf
        assert cost.fixed_s + cost.per_sample_s > 0.0
        assert 0.0 <= predictor.std_s(b) < math.inf
        assert (
            predictor.predict(0) <= predictor.predict(1) <= predictor.predict(1.5) <= predictor.predict(10**6)
        )
        assert predictor.predict(b) == cost.seconds(b)


@given(st.sampled_from(KINDS), stream, stream)
def test_a_restored_predictor_goes_on_bitwise_alike(
    kind: str, before: list[tuple[int, float]], after: list[tuple[int, float]]
) -> None:
    original = fed(by_name(kind), before)
    state = json.loads(json.dumps(original.state_dict()))
    restored = by_name(kind)
    restored.load_state_dict(state)
    for b, compute_s in after:
        original.update(b, compute_s)
        restored.update(b, compute_s)
        assert restored.cost() == original.cost() and restored.std_s(7) == original.std_s(7)
    assert restored.state_dict() == original.state_dict()


@given(st.sampled_from(KINDS), stream)
def test_fresh_keeps_settings_forgets_and_is_independent(
    kind: str, measurements: list[tuple[int, float]]
) -> None:
    used = fed(by_name(kind), measurements)
    state = used.state_dict()
    new = used.fresh()
    assert type(new) is type(used) and not new.ready
    assert new.state_dict() == by_name(kind).state_dict()
    fed(new, measurements)
    assert new.state_dict() == state == used.state_dict()  # deterministic, and `used` was not touched


@given(st.sampled_from(KINDS), stream, st.integers(-20, 10))
def test_the_unit_of_time_does_not_matter(
    kind: str, measurements: list[tuple[int, float]], power: int
) -> None:
    """A power of two is exact in floats, so every digit must agree."""
    factor = 2.0**power  # 1e-6 .. 1e3
    plain, scaled = by_name(kind), by_name(kind)
    for b, compute_s in measurements:
        plain.update(b, compute_s)
        scaled.update(b, compute_s * factor)
        assert scaled.cost().fixed_s == plain.cost().fixed_s * factor
        assert scaled.cost().per_sample_s == plain.cost().per_sample_s * factor


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_scalars_are_taken_and_the_state_stays_plain(kind: str) -> None:
    a, b = by_name(kind), by_name(kind)
    for n, t in [(16, 0.057), (1, 0.01), (20, 0.07), (20, 0.9), (20, 0.9)]:
        a.update(n, t)
        b.update(np.int64(n), np.float64(t))  # type: ignore[arg-type]
    assert a.state_dict() == b.state_dict()
    plain = [v if isinstance(v, list) else [v] for v in b.state_dict().values()]
    assert {type(one) for many in plain for one in many} <= {int, float}
    assert pickle.loads(pickle.dumps(b)).cost() == a.cost()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad", [(-1, 1.0), (0, 1.0), (math.nan, 1.0), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf)]
)
def test_nonsense_is_refused_and_changes_nothing(kind: str, bad: tuple[int, float]) -> None:
    predictor = fed(by_name(kind), [(16, 0.057)])
    before = predictor.state_dict()
    with pytest.raises(ValueError, match="must be a finite number"):
        predictor.update(*bad)
    assert predictor.state_dict() == before


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_no_prediction_before_the_first_measurement(kind: str) -> None:
    predictor = by_name(kind)
    assert not predictor.ready
    for ask in (lambda: predictor.predict(1), lambda: predictor.std_s(1), predictor.cost):
        with pytest.raises(RuntimeError, match="no measurement yet"):
            ask()
    predictor.update(1, 0.01)
    assert predictor.ready and predictor.predict(1) >= 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_is_refused_by_name(kind: str) -> None:
    predictor = fed(by_name(kind), [(16, 0.057)])
    good = predictor.state_dict()
    with pytest.raises(ValueError, match=r"missing keys \['updates'\]"):
        predictor.load_state_dict({k: v for k, v in good.items() if k != "updates"})
    with pytest.raises(ValueError, match=r"unknown keys \['speed'\]"):
        predictor.load_state_dict({**good, "speed": 1.0})
    assert predictor.state_dict() == good


def test_names() -> None:
    assert [type(by_name(kind)) for kind in KINDS] == [LastValue, Ewma, Kalman, Narx]
    assert by_name("kalman") is not by_name("kalman")
    names = r"\['ewma', 'kalman', 'last', 'narx'\]"
    with pytest.raises(ValueError, match=rf"'Kalman'.*{names}.*any Predictor instance"):
        by_name("Kalman")


@pytest.mark.parametrize("weight", [0.0, -0.1, 1.01, math.nan])
def test_ewma_weight_is_checked(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight=.*\(0, 1\]"):
        Ewma(weight=weight)


# --- time per sample: last value and EWMA ---


@given(st.integers(1, 1000), times_s)
def test_last_value_is_the_last_ratio(b: int, compute_s: float) -> None:
    predictor = fed(LastValue(), [(3, 1.0), (b, compute_s)])
    assert predictor.cost().per_sample_s == compute_s / b and predictor.cost().fixed_s == 0.0


@given(st.floats(0.05, 1.0), st.lists(st.tuples(st.integers(1, 100), st.floats(1e-3, 1e3)), min_size=1))
def test_ewma_is_the_weighted_sum_it_says(weight: float, measurements: list[tuple[int, float]]) -> None:
    n = len(measurements)
    weights = [weight * (1 - weight) ** (n - 1 - i) for i in range(n)]
    weights[0] = (1 - weight) ** (n - 1)
    expected = sum(w * t / b for w, (b, t) in zip(weights, measurements, strict=True))
    assert fed(Ewma(weight=weight), measurements).cost().per_sample_s == pytest.approx(expected, rel=1e-12)


# --- Kalman ---


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("unit_s", [1e-6, 1.0, 1e3])
def test_kalman_finds_fixed_and_per_sample_cost(share: float, unit_s: float) -> None:
    fixed_s, per_sample_s = share * unit_s, (1 - share) * unit_s / 16
    predictor = fed(Kalman(), [(b, fixed_s + per_sample_s * b) for b in [16, 22, 9, 30, 14] * 20])
    assert predictor.cost().fixed_s == pytest.approx(fixed_s, abs=0.01 * unit_s)
    assert predictor.cost().per_sample_s * 16 == pytest.approx(per_sample_s * 16, abs=0.01 * unit_s)


@pytest.mark.parametrize("slow", [10.0, 2.0, 1.3, 0.7, 0.5, 0.1])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_kalman_follows_a_change_of_speed_in_two_updates(slow: float, noise: float) -> None:
    predictor, rng = settled(noise=noise), np.random.default_rng(9)
    before = predictor.predict(16)
    predictor.update(16, affine_s(16, slow) * jitter(rng, noise))
    assert predictor.predict(16) == pytest.approx(before, rel=1e-12)  # could be a hiccup
    predictor.update(18, affine_s(18, slow) * jitter(rng, noise))
    for b in (0, 8, 16, 32):
        assert predictor.predict(b) == pytest.approx(affine_s(b, slow), rel=0.01 + 4 * noise)


@pytest.mark.parametrize("factor", [10.0, 2.0, 0.1])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_kalman_ignores_a_lone_outlier_and_believes_two(factor: float, noise: float) -> None:
    predictor = settled(noise=noise)
    lone = settled(noise=noise)
    lone.update(16, factor * affine_s(16))
    lone.update(14, affine_s(14))
    assert lone.predict(16) == pytest.approx(affine_s(16), rel=0.02)
    fed(predictor, [(16, factor * affine_s(16)), (16, factor * affine_s(16))])
    assert predictor.predict(16) == pytest.approx(factor * affine_s(16), rel=1e-9)


def test_kalman_ignores_a_hiccup_every_few_steps() -> None:
    """A checkpoint or a log line every fourth step must not pull the model up."""
    predictor = settled(noise=0.02)
    rng = np.random.default_rng(3)
    for t in range(400):
        b = 12 + t % 9
        predictor.update(b, affine_s(b) * jitter(rng, 0.02) * (3.0 if t % 4 == 0 else 1.0))
        if t > 10:
            assert predictor.predict(16) == pytest.approx(affine_s(16), rel=0.05)


@pytest.mark.parametrize("first", [100.0, 10.0, 0.1])
def test_kalman_forgets_a_first_step_that_was_far_off(first: float) -> None:
    predictor = fed(Kalman(), [(16, first * affine_s(16)), (16, affine_s(16))])
    assert predictor.predict(16) == pytest.approx(affine_s(16), rel=1e-9)
    fed(predictor, [(b, affine_s(b)) for b in (22, 16, 20, 24)])
    assert predictor.predict(8) == pytest.approx(affine_s(8), rel=0.05)


@pytest.mark.parametrize("b", [1, 16, 4096])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_kalman_stays_put_while_b_stands_still(b: int, noise: float) -> None:
    """alpha and beta cannot be told apart then: the split must neither drift nor lose all certainty."""
    predictor, rng = Kalman(), np.random.default_rng(5)
    fed(predictor, [(x, affine_s(x)) for x in (8, 24, 16, 12, 20) * 10])
    share = predictor.cost().fixed_s / predictor.predict(b)
    for t in range(10_000):
        predictor.update(b, affine_s(b) * jitter(rng, noise))
        if t % 500 == 0:
            assert predictor.predict(b) == pytest.approx(affine_s(b), rel=1e-3 + 3 * noise)
    assert predictor.cost().fixed_s / predictor.predict(b) == pytest.approx(share, abs=0.02)
    assert predictor.std_s(0) < 0.5 * predictor.predict(b)
    for x in (2 * b, 2 * b):
        predictor.update(x, affine_s(x))
    assert predictor.predict(4 * b) == pytest.approx(affine_s(4 * b), rel=0.1)


def test_kalman_is_quieter_than_last_value_and_says_how_quiet() -> None:
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    claimed: list[float] = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        predictors = {kind: by_name(kind) for kind in KINDS}
        for t in range(150):
            compute_s = 0.06 * jitter(rng, 0.1)
            for kind, predictor in predictors.items():
                predictor.update(16, compute_s)
                if t >= 50:
                    errors[kind].append(predictor.predict(16) / 0.06 - 1.0)
            if t >= 50:
                claimed.append(predictors["kalman"].std_s(16) / 0.06)
    rms = {kind: float(np.sqrt(np.mean(np.square(e)))) for kind, e in errors.items()}
    assert rms["last"] == pytest.approx(0.1, rel=0.15)
    assert rms["ewma"] == pytest.approx(0.1 / math.sqrt(3), rel=0.15)
    assert rms["kalman"] < 0.04
    assert np.mean(claimed) == pytest.approx(rms["kalman"], rel=0.4)


@pytest.mark.parametrize("slow", [2.0, 0.5])
def test_kalman_finds_a_change_hidden_in_heavy_noise(slow: float) -> None:
    """Twofold under 30 % noise is inside the gate: the cumulative sum has to find it."""
    errors = []
    for seed in range(20):
        predictor, rng = settled(noise=0.3, seed=seed), np.random.default_rng(100 + seed)
        for t in range(15):
            predictor.update(12 + t % 9, affine_s(12 + t % 9, slow) * jitter(rng, 0.3))
        errors.append(abs(math.log(predictor.predict(16) / affine_s(16, slow))))
    assert np.median(errors) < 0.2


def test_kalman_adapts_to_the_noise_both_ways() -> None:
    predictor, rng = Kalman(), np.random.default_rng(2)
    stds = []
    for noise in (0.0, 0.2, 0.0):
        for _ in range(300):
            predictor.update(16, 0.06 * jitter(rng, noise))
        stds.append(predictor.std_s(16) / 0.06)
    assert stds[0] < 0.01 and stds[1] > 0.02 and stds[2] < 0.01
    exact = fed(Kalman(), [(16, 0.06)] * 300)
    assert exact.state_dict()["noise_sq"] == pytest.approx(0.005**2)
