"""Ranking and verdict."""

from __future__ import annotations

import json

import pytest

from lightning_hetero.plan.planner import plan
from tests.pure.plan.kit import layered, lines

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
    setup = layered([{"mem": 1e6}, {"name": "slow", "speed": 0.5}], {"bandwidth": 1e6}, prices=(1.0, 2.0))
    plain = json.loads(json.dumps(plan(setup).as_plain(), allow_nan=False))
    assert {e["engine"] for e in plain["estimates"]} == {"ddp", "hetero_balanced", "hetero_stale", "hetero_pipeline"}
    for one in plain["estimates"]:
        assert one["ok"] and one["step_s"] >= one["bound_s"] > 0.0 and one["reasons"]
        assert [d["rank"] for d in one["devices"]] == [0, 1] and one["devices"][1]["memory_limit_bytes"] is None
        each_s = one["samples_per_s"] * 3600 / 1e6
        assert one["money_per_hour"] <= 3.0 and one["money_per_million_samples"] == pytest.approx(
            one["money_per_hour"] / each_s
        )
    assert plain["engine"] in plain["verdict"] and plain["global_batch"] == 32


@pytest.mark.parametrize("engines", [[], ["dpp"]])
def test_unknown_engines_are_refused(engines: list[str]) -> None:
    with pytest.raises(ValueError, match="more of ddp, hetero_balanced, hetero_sharded, hetero_pipeline, hetero_stale"):
        plan(lines(), engines)  # type: ignore[arg-type]
