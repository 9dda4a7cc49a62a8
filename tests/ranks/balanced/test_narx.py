"""``predictor="narx"`` in real runs: loads are in the records of both ranks, shares move, a resume goes on."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero import LoadBalancedStrategy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, single, weights

SAMPLES, BATCH, STEPS = 320, 16, 60


def fit(rank: int, world: int, strategy: Any, **kwargs: Any) -> tuple[Any, Toy]:
    module = Toy()
    trainer = rank_trainer(rank, world, strategy, max_epochs=3)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH // world), **kwargs)
    return trainer, module


def training_job(rank: int, world: int) -> dict[str, Any]:
    strategy = LoadBalancedStrategy(predictor="narx", exchange_every=1, process_group_backend="gloo", monitor=False)
    trainer, module = fit(rank, world, strategy)
    report = strategy.step_report()
    assert report is not None
    return {
        "steps": trainer.global_step,
        "weights": weights(module),
        "loads": [(r.free_cpu, r.free_mem) for r in report.records],
    }


def test_it_trains_as_one_process_and_both_ranks_tell_their_load() -> None:
    oracle = Toy()
    single(oracle, regression(SAMPLES), BATCH, max_epochs=3)
    ranks = run_ranks(2, training_job)
    for result in ranks:
        assert result["steps"] == STEPS
        assert result["weights"].distance(weights(oracle)) <= 1e-12
        assert len(result["loads"]) == 2
        for cpu, mem in result["loads"]:
            assert math.isnan(cpu) or 0.0 <= cpu <= 1.0  # a short run may end before there is a measurement
            assert 0.0 < mem < 1.0
    assert ranks[0]["loads"][0][1] == ranks[1]["loads"][0][1]
