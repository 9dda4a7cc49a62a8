"""Configurations that nobody has thought of: each is refused with a reason, or every sample counts exactly once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults import observe
from tests.ranks.harness import RankEnvironment, run_ranks

pytestmark = pytest.mark.timeout(900)

WORLD = 2
LAYERS = 3


def train(rank: int, world: int, said: dict[str, Any]) -> str:
    """Returns why it was refused; empty: it came to the end."""
    from tests.faults import asked, program

    asked.FOLDER = Path.cwd()
    asked.RANK[:] = [rank]
    before = dict(asked.ASKED)
    asked.ASKED.update(said, ranks=world, start=None, step_s=0.0)
    try:
        program.train(world, plugins=[RankEnvironment(rank, world)])
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        asked.ASKED.clear()
        asked.ASKED.update(before)
    return ""


def options(engine: str) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a strategy, right and wrong ones."""
    counts = st.integers(0, 9)
    bounds = counts | st.lists(counts, min_size=WORLD, max_size=WORLD)
    match engine:
        case "balanced":
            known = {"min_samples": bounds, "max_samples": bounds, "dead_band": st.floats(-0.5, 2.0),
                     "global_batch_size": st.integers(0, 20), "predictor": st.sampled_from(["ewma", "last", "kalman"]),
                     "policy": st.sampled_from(["predictive", None])}  # fmt: skip
        case "stale":
            known = {"policy": st.sampled_from(["flexible", "saps", "bsp", "asp", "ssp"]),
                     "bound": st.integers(-1, 4), "global_batch_size": st.integers(0, 20),
                     "compression": st.sampled_from([None, "bf16"])}  # fmt: skip
        case "federated":
            known = {"local_steps": st.integers(0, 7), "proximal": st.sampled_from([-1.0, 0.0])}
        case _:
            return plans().map(lambda plan: {"plan": {"groups": plan}})
    return st.fixed_dictionaries({}, optional=known)


@st.composite
def plans(draw: Any) -> list[dict[str, Any]]:
    """A chain of two ranks, or two ranks alone, with samples and micro-batches that may not fit."""
    cut = draw(st.integers(0, LAYERS))
    shares = [draw(st.integers(0, 8)) for _ in range(WORLD)]
    micro = draw(st.integers(0, 5))
    if draw(st.booleans()):
        return [{"ranks": [1, 0], "cuts": [0, cut, LAYERS], "samples": shares[0], "micro_samples": micro}]
    return [
        {"ranks": [rank], "cuts": [0, LAYERS], "samples": shares[rank], "micro_samples": micro} for rank in range(WORLD)
    ]


def check(engine: str, asked: dict[str, Any]) -> None:
    folder = Path.cwd() / f"run{len(os.listdir())}"
    folder.mkdir()
    refusals = run_ranks(WORLD, train_in, str(folder), {"engine": engine, **asked})
    assert len({bool(refusal) for refusal in refusals}) == 1, refusals  # all, or none
    assert all(len(refusal) > 30 for refusal in refusals if refusal), refusals
    if any(refusals) or not asked["samples"]:
        return
    books = observe.samples(folder, asked["samples"])
    every = set(range(asked["samples"] * asked["epochs"]))
    if engine == "federated":  # each rank's own
        found = set().union(*(counts.keys() for counts in books.counted.values()))
        assert found == every and not books.twice()
        return
    assert books.counted and not books.twice() and not books.unknown()
    if asked["options"].get("policy") in ("backup", "quorum"):  # what comes late is left out, and that is their purpose
        return
    assert not books.lost(every, list(books.counted), set())


def train_in(rank: int, world: int, folder: str, asked: dict[str, Any]) -> str:
    os.chdir(folder)
    return train(rank, world, asked)


SIZES = {"samples": st.integers(0, 40), "batch": st.integers(1, 7), "epochs": st.integers(1, 2)}


@pytest.mark.parametrize("engine", ["balanced", "stale", "pipeline", "federated"])
def test_a_configuration_is_refused_or_right(engine: str, pytestconfig: pytest.Config) -> None:
    examples = 40 if pytestconfig.getoption("--matrix") else 3

    @settings(max_examples=examples)
    @given(options(engine), st.fixed_dictionaries(SIZES))
    def explore(arguments: dict[str, Any], sizes: dict[str, int]) -> None:
        check(engine, {**sizes, "options": arguments})

    explore()
