"""How often the host waits for its device, per step: a budget by engine, in tests/goldens/gpu_syncs.json.

A number that rises fails, with the places; one that falls is written down: python -m tests.simgpu.budget
"""

from __future__ import annotations

import json

import pytest

from tests.simgpu.budget import ENGINES, GOLDEN, measured, row, told, total


@pytest.mark.parametrize("name", ENGINES)
def test_the_host_waits_no_more_often_than_it_did(name: str) -> None:
    golden, found = json.loads(GOLDEN.read_text())[name], row(name)
    for number, places in (("per_step", "places"), ("beside", "places_beside")):
        assert found[number] <= golden[number], (
            f"{name}: the host waits {found[number]} times a step ({number}), it was {golden[number]}\n"
            f"{told(found[places])}\nit was\n{told(golden[places])}\n"
            "if it must be so: python -m tests.simgpu.budget"
        )


@pytest.mark.parametrize("name", ["balanced", "federated"])
def test_the_host_waits_no_more_often_than_with_stock_ddp(name: str) -> None:
    assert total(measured(name)[0]) <= total(measured("ddp")[0]), told(measured(name)[0])


@pytest.mark.parametrize("name", ["stale", "pipeline 1x2", "pipeline 2x1", "pipeline 2x2"])
def test_the_host_waits_at_most_four_times_a_step(name: str) -> None:
    assert total(measured(name)[0]) <= 4, told(measured(name)[0])
