"""A set-up from a trace: costs, exchange and names are what the run had."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hetero.cluster.spec import cluster_to_plain, equal_cluster
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.recorded import setup_from_run
from lightning_hetero.record.run import run_of
from lightning_hetero.types import AffineCost, Event
from tests.pure.plan.kit import model

pytestmark = pytest.mark.pure


def step(rank: int, at: int, samples: int, compute_s: float, wait_s: float = 0.0) -> Event:
    data: dict[str, Any] = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
    return Event(kind="step", rank=rank, epoch=0, step=at, t_s=0.0, data=data)


def run(rank: int, name: str) -> Event:
    return Event(kind="run", rank=rank, epoch=0, step=0, t_s=0.0, data={"version": 1, "world_size": 2, "names": [name]})


def ddp_run() -> list[Event]:
    """16 samples each; rank 1 is three times slower; the exchange takes 10 ms."""
    events = [run(0, "box cuda:0"), run(1, "box cuda:1")]
    for at in range(10):
        warm = 5.0 if at == 0 else 1.0
        events += [step(0, at, 16, 0.1 * warm, 0.21), step(1, at, 16, 0.3 * warm, 0.01)]
    return events


def test_a_run_of_stock_ddp() -> None:
    setup = setup_from_run(run_of(ddp_run()))
    assert setup.global_batch == 32 and setup.exchange_s == pytest.approx(0.01)
    assert setup.costs == (
        AffineCost(fixed_s=0.0, per_sample_s=0.1 / 16),
        AffineCost(fixed_s=0.0, per_sample_s=0.3 / 16),
    )
    assert [device.name for device in setup.cluster.devices] == ["box/cuda:0", "box/cuda:1"]
    assert setup.cluster.devices[1].speed == pytest.approx(1 / 3)
    by_name = {e.engine: e for e in plan(setup).estimates}
    assert by_name["ddp"].step_s == pytest.approx(0.31)  # as it was
    assert by_name["balanced"].step_s == pytest.approx(0.16, rel=0.03)


def test_shares_of_several_sizes_tell_a_fixed_part() -> None:
    events = [run(0, "a"), run(1, "b")]
    for at, n in enumerate((16, 16, 8, 24, 16, 28)):
        events += [step(0, at, n, 0.02 + 0.001 * n), step(1, at, 32 - n, 0.001 * (32 - n))]
    setup = setup_from_run(run_of(events), global_batch=64)
    fixed, other = setup.costs
    assert isinstance(fixed, AffineCost) and fixed.fixed_s == pytest.approx(0.02) and setup.global_batch == 64
    assert other.fixed_s == pytest.approx(0.0, abs=1e-9) and other.per_sample_s == pytest.approx(0.001)


def test_a_pipelines_run_brings_its_cluster_and_costs() -> None:
    data = {"plan": {}, "cluster": cluster_to_plain(equal_cluster(2)), "profile": model_to_plain(model())}
    events = [run(0, "a"), Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=data)]
    events += [step(rank, at, 8, 0.1) for at in range(4) for rank in (0, 1)]
    setup = setup_from_run(run_of(events))
    assert setup.model == model() and setup.cluster == equal_cluster(2) and setup.global_batch == 16


@pytest.mark.parametrize(
    "more", [[], [Event(kind="step", rank=0, epoch=0, step=0, t_s=0.0, data={"step_s": 1.0})]]
)
def test_a_trace_without_work_says_what_to_record(more: list[Event]) -> None:
    with pytest.raises(ValueError, match=r"under stock DDP with StragglerMonitor\(\) and HeteroTrace\(\)"):
        setup_from_run(run_of([run(0, "a"), *more]))
