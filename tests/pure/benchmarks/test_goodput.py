"""The goodput benchmark's outages, and what it makes of jobs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from benchmarks.goodput.__main__ import MIDDLE_S, cases, figures_of
from benchmarks.goodput.kills import outages


def test_outages_are_poisson_and_a_machine_that_is_away_does_not_go() -> None:
    found = outages([1, 2, 3], between_s=10.0, repair_s=2.0, until_s=60_000.0, seed=4)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    # each machine: once in 30 s while it is there, and away for 2 s
    assert len(found) == pytest.approx(3 * 60_000.0 / 32.0, rel=0.05)
    for rank in (1, 2, 3):
        own = [one for one in found if one.rank == rank]
        assert all(a.back_s < b.at_s for a, b in pairwise(own))
        assert all(one.back_s - one.at_s == pytest.approx(2.0) for one in own)
    assert found == outages([1, 2, 3], 10.0, 2.0, 60_000.0, 4) != outages([1, 2, 3], 10.0, 2.0, 60_000.0, 5)


def test_goodput_is_over_the_same_system_without_an_outage() -> None:
    def job(samples: int) -> dict[str, Any]:
        return {"samples": samples, "outages": 1, "lost_steps": 2}

    raw = {name: [job(100), job(50)] for name, *_ in cases((MIDDLE_S,))}
    raw["none: stale"] = [job(100), job(100)]
    figures = {figure["name"]: figure for figure in figures_of(raw)}
    assert figures["every 20 s: stale: goodput"]["value"] == 0.75
    assert figures["every 20 s: stale: goodput"]["holds"] is False
    assert figures["every 20 s: stale: goodput, worst turn"]["value"] == 0.5
    assert figures["every 20 s: DDP, checkpoint every 10 s: goodput"]["value"] == 1.0
    assert figures["every 20 s: stale / the better DDP"]["value"] == 1.0
