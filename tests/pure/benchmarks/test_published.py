"""Published set-ups: the planner says what was measured, where both can be compared."""

from __future__ import annotations

import pytest

from benchmarks.planner.published import BOX_ENGINES, CASES, LEVELS, Figure, box, levels
from lightning_hetero.plan.planner import Plan, plan

pytestmark = pytest.mark.pure
ANSWERS: dict[str, Plan] = {}


def answer(case: int) -> Plan:
    name = CASES[case].name
    if name not in ANSWERS:
        ANSWERS[name] = plan(CASES[case].make(), ("ddp", "balanced"))
    return ANSWERS[name]


COMPARED = [(i, figure) for i, case in enumerate(CASES) for figure in case.figures if figure.value is not None]


@pytest.mark.parametrize(("case", "figure"), COMPARED, ids=lambda value: getattr(value, "what", str(value)))
def test_the_planner_says_what_was_published(case: int, figure: Figure) -> None:
    assert figure.value is not None
    assert figure.planned(answer(case)) == pytest.approx(figure.value, rel=0.05)


def test_r2sp_has_its_ideal() -> None:
    """Two, two and four machines of 429, 628 and 917 samples/s: 1.68, the sum of speeds over eight times the least."""
    assert pytest.approx(1.68, abs=0.005) == 5782 / 3432
    found = {e.engine: e for e in answer(0).estimates}
    assert found["ddp"].step_s == pytest.approx(512 / 429)
    assert found["balanced"].step_s == pytest.approx(8 * 512 / 5782, rel=0.01)


def test_lbbs_shares_are_its_own_as_far_as_the_dead_band_cares() -> None:
    """167, 167, 158 and 20 published; on these curves the last samples of the slowest card are worth 2 % of a step."""
    found = next(e for e in answer(1).estimates if e.engine == "balanced")
    assert sum(found.shares) == 512 and max(found.work_s) == pytest.approx(
        CASES[1].make().costs[0].seconds(167), rel=0.03
    )
    for mine, theirs in zip(found.shares, (167, 167, 158, 20), strict=True):
        assert mine == pytest.approx(theirs, abs=10)


@pytest.mark.parametrize("name", LEVELS)
def test_omnilearns_levels_gain_what_their_cores_say(name: str) -> None:
    cores = LEVELS[name]
    found = plan(levels(name), ("ddp", "balanced"))
    assert found.gain == pytest.approx(12 / min(cores), rel=0.04)
    assert (name == "HL1") == (found.chosen is not None and found.chosen.engine == "ddp")


def test_a_box_of_three_generations_trains_what_its_smallest_card_does_not_hold() -> None:
    small, large = (plan(box(*size), BOX_ENGINES) for size in ((12, 768), (24, 1024)))
    assert small.gain > 1.5  # DDP waits for the 2080
    refused = {e.engine for e in large.estimates if not e.ok}
    assert large.chosen is not None and large.chosen.engine == "pipeline" and {"ddp", "balanced"} <= refused
    assert large.chosen.plan is not None and len(large.chosen.plan.groups) == 1
    layers = [
        b - a for a, b in zip(large.chosen.plan.groups[0].cuts, large.chosen.plan.groups[0].cuts[1:], strict=False)
    ]
    assert layers == sorted(layers, reverse=True) and sum(layers) == 24
    limits = [device.mem_bytes for device in large.setup.cluster.devices]
    assert all(held <= limit for held, limit in zip(large.chosen.memory_bytes, limits, strict=True))
