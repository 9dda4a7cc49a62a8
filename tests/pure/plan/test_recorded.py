"""A set-up from a run: costs, exchange and names are what the run had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.cluster.spec import cluster_to_plain, equal_cluster
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import setup_from_run
from lightning_hetero.record.run import run_of
from lightning_hetero.types import AffineCost, Event
from tests.pure.plan.kit import model
from tests.pure.report.kit import opened, run_with

pytestmark = pytest.mark.pure
# 16 samples each; rank 1 is three times slower; the exchange takes 10 ms.
STEADY = [(16, 0.1, 0.21), (16, 0.3, 0.01)]


def test_a_run_of_stock_ddp() -> None:
    run = run_with([[(16, 0.5, 0.21), (16, 1.5, 0.01)], *[STEADY] * 9])  # the first step is no measure of the others
    setup = setup_from_run(replace(run, devices={0: "box cuda:0", 1: "box cuda:1"}))
    assert setup.global_batch == 32 and setup.exchange_s == pytest.approx(0.01)
    assert setup.costs == tuple(AffineCost(fixed_s=0.0, per_sample_s=seconds / 16) for seconds in (0.1, 0.3))
    assert [device.name for device in setup.cluster.devices] == ["box/cuda:0", "box/cuda:1"]
    assert setup.cluster.devices[1].speed == pytest.approx(1 / 3)
    by_name = {e.engine: e for e in plan(setup).estimates}
    assert by_name["ddp"].step_s == pytest.approx(0.31)  # as it was
    assert by_name["balanced"].step_s == pytest.approx(0.16, rel=0.03)


def test_shares_of_several_sizes_tell_a_fixed_part() -> None:
    steps = [[(n, 0.02 + 0.001 * n, 0.0), (32 - n, 0.001 * (32 - n), 0.0)] for n in (16, 16, 8, 24, 16, 28)]
    setup = setup_from_run(run_with(steps), global_batch=64)
    fixed, other = setup.costs
    assert fixed.fixed_s == pytest.approx(0.02) and setup.global_batch == 64
    assert other.fixed_s == pytest.approx(0.0, abs=1e-9) and other.per_sample_s == pytest.approx(0.001)


def test_a_pipelines_run_brings_its_cluster_and_costs() -> None:
    data = {"plan": {}, "cluster": cluster_to_plain(equal_cluster(2)), "profile": model_to_plain(model())}
    planned = Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=data)
    setup = setup_from_run(run_with([[(8, 0.1, 0.0)] * 2] * 4, [planned]))
    assert setup.model == model() and setup.cluster == equal_cluster(2) and setup.global_batch == 16


@pytest.mark.parametrize("data", [None, {"step_s": 1.0}])
def test_a_trace_without_work_says_what_to_record(data: dict[str, float] | None) -> None:
    more = [] if data is None else [Event(kind="step", rank=0, epoch=0, step=0, t_s=0.0, data=data)]
    with pytest.raises(ValueError, match=r"under stock DDP with StragglerMonitor\(\) and HeteroTrace\(\)"):
        setup_from_run(run_of([opened(0, 1), *more]))
