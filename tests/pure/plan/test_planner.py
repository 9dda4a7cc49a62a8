"""Ranking and verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lightning_hetero.plan.planner import plan
from tests.pure.plan.kit import layered, lines, model

pytestmark = pytest.mark.pure


def test_engines_are_ranked_by_throughput_and_the_mildest_of_the_best_is_taken() -> None:
    answer = plan(lines())
    rates = [estimate.samples_per_s for estimate in answer.estimates]
    assert rates == sorted(rates, reverse=True) and answer.estimates[-1].engine == "pipeline"  # no layers
    assert answer.chosen is not None and answer.chosen.engine == "balanced"
    assert answer.gain == pytest.approx(192 / 70, rel=0.03)
    assert f"{answer.gain:.2f} times stock DDP's" in answer.verdict


def test_the_stale_engine_is_taken_only_far_ahead() -> None:
    # A slow link on which a barrier costs, and none of it where nobody waits.
    setup = lines((1.0, 0.02), exchange_s=0.0, global_batch=16)
    held = plan(setup)
    by_name = {e.engine: e for e in held.estimates}
    assert by_name["stale"].samples_per_s > 1.1 * by_name["balanced"].samples_per_s
    assert held.chosen is by_name["stale"]
    assert plan(setup, ["ddp", "balanced"]).chosen is not None


def test_a_pipeline_may_be_asked_to_be_further_ahead() -> None:
    # Gradients are large for the links.
    setup = layered([{}, {}, {"speed": 0.5}, {"speed": 0.25}], {"bandwidth": 1e6}, model=model(param_bytes=1e4))
    by_name = {e.engine: e for e in plan(setup).estimates}
    ahead = by_name["pipeline"].samples_per_s / by_name["balanced"].samples_per_s
    assert ahead > 1.1 and plan(setup, ["ddp", "balanced", "pipeline"]).chosen == by_name["pipeline"]
    held = plan(setup, ["ddp", "balanced", "pipeline"], pipeline_ahead=1.01 * ahead)
    assert held.chosen == by_name["balanced"] and by_name["pipeline"] in held.estimates
    assert plan(setup, ["pipeline"], pipeline_ahead=2.0).chosen == by_name["pipeline"]  # there is no other


def test_money_is_per_device_in_use() -> None:
    setup = lines(prices=(1.0, 1.0, 0.5, 0.25))
    answer = plan(setup, ["ddp"])
    (found,) = answer.estimates
    assert found.money_per_hour(setup) == 2.75
    assert found.money_per_million(setup) == pytest.approx(2.75 / 3600 * 1e6 / found.samples_per_s)
    assert math.isnan(found.money_per_hour(replace(setup, prices=())))


def test_the_answer_is_strict_json_with_every_device() -> None:
    setup = layered([{"mem": 1e6}, {"name": "slow", "speed": 0.5}], {"bandwidth": 1e6}, prices=(1.0, 2.0))
    plain = json.loads(json.dumps(plan(setup).as_plain(), allow_nan=False))
    assert {e["engine"] for e in plain["estimates"]} == {"ddp", "balanced", "stale", "pipeline"}
    for one in plain["estimates"]:
        assert one["ok"] and one["step_s"] >= one["bound_s"] > 0.0 and one["reasons"] and one["overrides"]
        assert [d["rank"] for d in one["devices"]] == [0, 1] and one["devices"][1]["memory_limit_bytes"] is None
        assert one["money_per_million_samples"] > 0.0
    assert plain["engine"] in plain["verdict"] and plain["global_batch"] == 32


@pytest.mark.parametrize("engines", [[], ["dpp"]])
def test_unknown_engines_are_refused(engines: list[str]) -> None:
    with pytest.raises(ValueError, match="must be one or more of ddp, balanced, pipeline, stale"):
        plan(lines(), engines)  # type: ignore[arg-type]
