"""Scenarios: functions of (seed, rank, step), against closed forms, SciPy and the law of large numbers."""

from __future__ import annotations

import math
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_hetero.emulate import Fault, Scenario, Slowdown, SlowSpells, SpeedChange

CONF = Path(__file__).parents[3] / "conf" / "hetero" / "emulation"

speeds = st.lists(st.floats(0.05, 8.0), min_size=1, max_size=6)
ranks = st.integers(0, 9)
steps = st.integers(0, 10_000)


def noisy(seed: int) -> Scenario:
    spells = SlowSpells(probability=0.1, factor=3.0, steps=7)
    return Scenario(speeds=[1.0, 0.5], sample_s=0.01, step_s=0.002, jitter=0.2, spells=spells, seed=seed)


@settings(max_examples=15)
@given(st.integers(0, 2**64 - 1), st.randoms(use_true_random=False))
def test_the_same_in_any_order_and_process(seed: int, shuffler: random.Random) -> None:
    asked = [(rank, step) for rank in range(3) for step in range(0, 40, 3)]
    first = {key: noisy(seed).work_s(*key, 8) for key in asked}
    shuffler.shuffle(asked)
    copy = pickle.loads(pickle.dumps(noisy(seed)))
    assert {key: copy.work_s(*key, 8) for key in asked} == first


def test_seeds_ranks_and_steps_draw_their_own_numbers() -> None:
    calm = Scenario(sample_s=1.0, jitter=0.2)
    drawn = [Scenario(sample_s=1.0, jitter=0.2, seed=s).work_s(0, 0, 1) for s in range(5)]
    drawn += [calm.work_s(r, 0, 1) for r in range(1, 5)] + [calm.work_s(0, s, 1) for s in range(1, 5)]
    assert len(set(drawn)) == len(drawn)


@given(speeds, speeds, ranks, steps, steps, st.integers(0, 100))
def test_speed_changes_hold_from_their_step_on(
    before: list[float], after: list[float], rank: int, at: int, later: int, samples: int
) -> None:
    scenario = Scenario(speeds=before, sample_s=0.01, step_s=0.5).change(after, at_step=at)
    values = after if later >= at else before
    assert scenario.speed(rank, later) == values[rank % len(values)]
    assert scenario.work_s(rank, later, samples) == pytest.approx(
        (0.5 + 0.01 * samples) / values[rank % len(values)]
    )


def test_changes_given_out_of_order_apply_in_order() -> None:
    late, early = {"step": 20, "speeds": [0.25]}, {"step": 10, "speeds": [0.5]}
    scenario = Scenario(changes=[late, early])
    assert [scenario.speed(0, s) for s in (9, 10, 19, 20, 99)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_slowdowns_end_multiply_and_survive_changes() -> None:
    scenario = (
        Scenario(speeds=[1.0])
        .slow(1, 3, at_step=10, steps=5)
        .slow(1, 2, at_step=12)
        .change([4.0], at_step=14)
    )
    assert [scenario.speed(1, s) for s in (9, 10, 12, 14, 15)] == pytest.approx([1, 1 / 3, 1 / 6, 4 / 6, 2])
    assert [scenario.speed(0, s) for s in (9, 10, 12, 14, 15)] == [1, 1, 1, 4, 4]


@pytest.mark.parametrize(("probability", "length"), [(0.02, 1), (0.02, 10), (0.3, 4), (0.01, 33)])
def test_spells_come_as_often_and_last_as_long_as_said(probability: float, length: int) -> None:
    spells = SlowSpells(probability=probability, factor=2.0, steps=length)
    scenario = Scenario(spells=spells, seed=1)
    slow = np.array([[scenario.speed(r, 1000 + s) == 0.5 for s in range(600)] for r in range(8)])
    expected = 1 - (1 - probability) ** length  # at least one start within the last `length` steps
    deviation = math.sqrt(expected * (1 - expected) * 2 * length / slow.size)  # neighbours are correlated
    assert abs(slow.mean() - expected) < 4 * deviation
    for row in slow:  # no spell, except at the edges, is shorter than its length
        edges = np.flatnonzero(np.diff(row.astype(int)))
        runs = [(a, b) for a, b in pairwise(edges) if row[a + 1]]
        assert all(b - a >= length for a, b in runs)


@pytest.mark.parametrize("jitter", [0.05, 0.3, 1.0])
def test_jitter_has_mean_one_and_the_deviation_asked_for(jitter: float) -> None:
    scenario = Scenario(sample_s=1.0, seed=3).jittered(jitter)
    n = 5000
    times = np.array([scenario.work_s(s % 4, s // 4, 1) for s in range(n)])
    logs = np.log(times)
    sigma = math.sqrt(math.log1p(jitter**2))
    assert abs(times.mean() - 1) < 4 * jitter / math.sqrt(n)
    assert abs(logs.mean() + sigma**2 / 2) < 4 * sigma / math.sqrt(n)
    assert logs.std() == pytest.approx(sigma, rel=4 / math.sqrt(2 * n))


def test_builders_chain_and_leave_the_scenario_alone() -> None:
    calm = Scenario()
    scenario = calm.kill(rank=2, at_step=9).kill(0, 3)
    assert calm == Scenario() != scenario
    assert scenario.fault(2, 9) == Fault(step=9, rank=2, kind="kill")
    assert scenario.fault(0, 3) == Fault(step=3, rank=0, kind="kill")
    assert scenario.fault(2, 8) is None and scenario.fault(3, 9) is None


def test_caps_are_by_rank() -> None:
    capped = Scenario(mem_samples={1: 8, 3: 4})
    assert capped == Scenario(mem_samples=[None, 8, None, 4]) and hash(capped) != hash(Scenario())
    assert [capped.mem_cap(r) for r in range(6)] == [None, 8, None, 4, None, None]


def test_plain_values_make_the_same_scenario_as_objects() -> None:
    plain: dict[str, Any] = {
        "speeds": [1, 0.5],
        "spells": {"probability": 0.1, "factor": 2, "steps": 3},
        "changes": [{"step": 4, "speeds": [1]}, {"step": 2, "rank": 1, "factor": 2}],
        "faults": [{"step": 6, "rank": 0, "kind": "stall", "stall_s": 1}],
        "mem_samples": {1: 16},
    }
    objects = Scenario(
        speeds=(1.0, 0.5),
        spells=SlowSpells(probability=0.1, factor=2.0, steps=3),
        changes=(SpeedChange(step=4, speeds=(1.0,)), Slowdown(step=2, rank=1, factor=2.0)),
        faults=(Fault(step=6, rank=0, kind="stall", stall_s=1.0),),
        mem_samples=[None, 16],
    )
    assert Scenario(**plain) == objects
    config: Any = OmegaConf.create(plain)  # Hydra hands over its own lists and mappings
    assert Scenario(**{str(k): config[k] for k in config}) == objects


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"speeds": []}, "speeds"),
        ({"speeds": [1.0, 0.0]}, r"speeds\[1\]=0.0"),
        ({"speeds": [math.nan]}, r"speeds\[0\]=nan"),
        ({"sample_s": -1}, "sample_s=-1"),
        ({"step_s": math.inf}, "step_s=inf"),
        ({"jitter": -0.1}, "jitter=-0.1"),
        ({"seed": 2**64}, "seed="),
        ({"seed": 1.5}, "seed=1.5"),
        ({"spells": {"probability": 1.1, "factor": 2, "steps": 1}}, "probability=1.1"),
        ({"spells": {"probability": 0.1, "factor": 0.5, "steps": 1}}, "factor=0.5"),
        ({"spells": {"probability": 0.1, "factor": 2}}, "incomplete.*steps"),
        ({"changes": [{"step": -1, "speeds": [1]}]}, "step=-1"),
        ({"changes": [{"step": 1, "sped": [1]}]}, r"unknown keys \['sped'\]"),
        ({"changes": [{"step": 1, "rank": 0, "factor": 0.5}]}, "factor=0.5"),
        ({"faults": [{"step": 1, "rank": 0, "kind": "sulk"}]}, "'sulk'.*kill, stall, exception"),
        ({"faults": [{"step": 1, "rank": 0, "kind": "stall"}]}, "stall_s"),
        ({"faults": [{"step": 1, "rank": 0, "kind": "kill", "stall_s": 1}]}, "stall_s"),
        ({"faults": [{"step": 1, "rank": 0, "kind": "kill"}] * 2}, "two faults"),
        ({"mem_samples": [0]}, r"mem_samples\[0\]=0"),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Scenario(**arguments)


def test_bad_questions_are_named() -> None:
    with pytest.raises(TypeError, match="faults="):
        Scenario(faults="kill")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="give sample_s"):
        Scenario(speeds=[0.5]).work_s(0, 0, 1)
    with pytest.raises(ValueError, match="rank=-1"):
        Scenario().speed(-1, 0)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_yaml_files_are_valid_scenarios(path: Path) -> None:
    config: Any = OmegaConf.load(path)
    assert path.read_text().startswith("# ")
    if path.stem == "none":
        assert config == {"scenario": None}
        return
    assert dict(config, scenario=None) == {"_target_": "lightning_hetero.ThrottleCallback", "scenario": None}
    arguments = {str(k): v for k, v in config.scenario.items()}
    assert arguments.pop("_target_") == "lightning_hetero.Scenario" and arguments.pop("_convert_") == "all"
    assert Scenario(**arguments).emulated


def test_the_yaml_files_promised_are_there() -> None:
    names = {"none", "equal", "two_fast_two_slow", "speed_swap", "one_straggler", "noisy_neighbours", "dying_rank"}
    assert names <= {p.stem for p in CONF.glob("*.yaml")}


def test_what_concerns_ranks_that_there_are_not_is_named() -> None:
    scenario = Scenario(speeds=[1, 1, 0.5, 0.25], mem_samples={3: 8}).change([1, 2, 3], at_step=5)
    scenario = scenario.slow(rank=2, factor=2).kill(rank=4, at_step=1)
    assert scenario.unused(5) == ()
    assert scenario.unused(2) == (
        "speeds beyond the first 2: [0.5, 0.25]",
        "speeds from step 5 on beyond the first 2: [3.0]",
        "a fault (kill) of rank 4",
        "a slowdown of rank 2",
        "a cap of memory of rank 3",
    )
    assert Scenario(speeds=[1.0]).unused(4) == ()  # repeated
