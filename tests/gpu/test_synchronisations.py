"""How often the host waits for the GPU in a step: a budget for each engine."""

from __future__ import annotations

import pytest

from tests.gpu.kit import SIMULATED, fit_engine
from tests.gpu.ranks import run_card_ranks
from tests.gpu.syncs import CountSyncs

pytestmark = pytest.mark.skipif(SIMULATED, reason="a simulated GPU counts by itself: tests/simgpu")
BUDGETS = {"stale": 4.0, "pipeline 1x2": 4.0, "pipeline 2x1": 4.0}


def counted(rank: int, world: int, name: str) -> tuple[float, dict[str, int]]:
    count = CountSyncs()
    fit_engine(rank, world, name, callbacks=[count], max_steps=13)
    return count.per_step(), dict(count.places)


@pytest.mark.parametrize("name", BUDGETS)
def test_no_more_than_its_budget(name: str) -> None:
    for per_step, places in run_card_ranks(2, counted, name):
        assert per_step <= BUDGETS[name], places


@pytest.mark.parametrize("name", ["balanced", "federated"])
def test_no_more_than_stock_ddp(name: str) -> None:
    stock = run_card_ranks(2, counted, "ddp")
    for (per_step, places), (allowed, _) in zip(run_card_ranks(2, counted, name), stock, strict=True):
        assert per_step <= allowed, places
