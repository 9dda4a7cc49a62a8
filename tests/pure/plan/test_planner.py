"""Ranking and verdict."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_hetero.cluster.engine_times import LOOPS
from lightning_hetero.cluster.spec import cluster_from_plain, equal_cluster
from lightning_hetero.plan.estimate import EngineName
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import AffineCost
from tests.pure.plan.kit import layered, lines, model

pytestmark = pytest.mark.pure


def test_engines_are_ranked_by_throughput_and_the_mildest_of_the_best_is_taken() -> None:
    answer = plan(lines())
    rates = [estimate.samples_per_s for estimate in answer.estimates]
    assert rates == sorted(rates, reverse=True) and answer.estimates[-1].engine == "pipeline"  # no layers
    assert answer.chosen is not None and answer.chosen.engine == "balanced"
    assert answer.gain == pytest.approx(192 / 70, rel=0.03)
    assert f"{answer.gain:.2f} times as fast as stock DDP" in answer.verdict


def test_the_stale_engine_is_taken_only_far_ahead() -> None:
    # A slow link on which a barrier costs, and none of it where nobody waits.
    setup = lines((1.0, 0.02), exchange_s=0.0, global_batch=16)
    held = plan(setup)
    by_name = {e.engine: e for e in held.estimates}
    assert by_name["stale"].samples_per_s > 1.1 * by_name["balanced"].samples_per_s
    assert held.chosen is by_name["stale"]
    assert plan(setup, ["ddp", "balanced"]).chosen is not None


def test_the_answer_is_strict_json_with_every_device() -> None:
    setup = layered([{"mem": 1e6}, {"name": "slow", "speed": 0.5}], {"bandwidth": 1e6})
    plain = json.loads(json.dumps(plan(setup).as_plain(), allow_nan=False))
    assert {e["engine"] for e in plain["estimates"]} == {"ddp", "hetero_balanced", "hetero_stale", "hetero_pipeline"}
    for one in plain["estimates"]:
        assert one["ok"] and one["step_s"] >= one["bound_s"] > 0.0 and one["reasons"]
        assert [d["rank"] for d in one["devices"]] == [0, 1] and one["devices"][1]["memory_limit_bytes"] is None
    assert plain["engine"] in plain["verdict"] and plain["global_batch"] == 32


@pytest.mark.parametrize("engines", [[], ["dpp"]])
def test_unknown_engines_are_refused(engines: list[str]) -> None:
    with pytest.raises(ValueError, match="more of ddp, hetero_balanced, hetero_sharded, hetero_pipeline, hetero_stale"):
        plan(lines(), engines)  # type: ignore[arg-type]


# ---- devices that are not worth it, and an update's own time ------------------------------------------------------


def linked(slow: int, bandwidth: float) -> Setup:
    """Four equal devices; all links of one of them are slow. Gradients are 4 MB."""
    links = [{"between": [slow, other], "bandwidth": bandwidth} for other in range(4) if other != slow]
    spec = {"devices": [{"count": 4}], "link": {"bandwidth": 1e9}, "links": links}
    return Setup(cluster=cluster_from_plain(spec), model=model(param_bytes=1e6), global_batch=64)


def test_a_device_behind_a_slow_link_is_named_with_the_figure() -> None:
    found = plan(linked(2, 1e7), ["ddp", "balanced"])  # 0.6 s of exchange; without rank 2 5 ms, and a third more work
    assert found.gone == (2,) and found.alone is not None
    assert found.alone.step_s == pytest.approx(22 * 3e-3 + 4 / 3 * 4e6 / 1e9, rel=0.01)
    said = f"; without rank 2 (device:2) an update would take {found.alone.step_s * 1e3:.1f} ms: leave out such devices"
    assert found.verdict.endswith(said)
    assert plan(linked(2, 1e9), ["ddp", "balanced"]).alone is None


def test_a_device_that_needs_longer_for_anything_than_the_others_for_all_is_named() -> None:
    costs = (*(AffineCost(fixed_s=0.001, per_sample_s=0.001),) * 3, AffineCost(fixed_s=0.2, per_sample_s=0.008))
    found = plan(Setup(cluster=equal_cluster(4), global_batch=48, costs=costs, exchange_s=0.002), ["ddp", "balanced"])
    assert found.gone == (3,) and found.alone is not None and found.alone.step_s == pytest.approx(0.019)
    assert "without rank 3" in found.verdict


def test_where_another_engine_makes_up_for_a_device_nothing_is_said() -> None:
    found = plan(lines((1.0, 1.0, 1.0, 0.125)))
    assert found.chosen is not None and found.chosen.engine == "stale" and found.alone is None


def test_an_exchange_that_was_measured_is_as_much_shorter_as_the_links_say() -> None:
    setup = replace(linked(2, 1e7), exchange_s=1.2)  # twice what the links say
    by_links_s = linked(2, 1e7).exchange()
    assert setup.without([2]).exchange() == pytest.approx(1.2 * linked(2, 1e7).without([2]).exchange() / by_links_s)
    assert setup.without([0, 1, 2]).exchange() == 0.0
    assert lines(exchange_s=0.5).without([0]).exchange() == 0.5  # nothing is known of links


@pytest.mark.parametrize("engine", ["ddp", "balanced", "stale", "pipeline"])
def test_an_updates_own_time_is_counted_in_every_engine(engine: EngineName) -> None:
    setup = layered([{}, {"speed": 0.5}])
    without, counted, looped = (plan(replace(setup, own_s=own_s, loop_s=loop_s), [engine]).estimates[0]
                                for own_s, loop_s in ((0.0, 0.0), (0.01, 0.0), (0.0, 0.01)))  # fmt: skip
    assert 0.01 * LOOPS[engine] == pytest.approx(looped.step_s - without.step_s, rel=0.05)
    assert 0.004 <= counted.step_s - without.step_s <= 0.012
    assert counted.step_s >= counted.bound_s and max(counted.work_s) <= counted.step_s - 0.004
