"""``predictor="narx"`` in real runs: loads are in the records of both ranks, shares move, a resume goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_hetero import BalancePolicy, LoadBalancedStrategy
from lightning_hetero.balanced.fit import step_times
from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression, single, weights
from tests.ranks.resume_kit import plain_types

SAMPLES, BATCH, STEPS = 320, 16, 60


class Timed(BalancePolicy):
    """Rank 1 takes three times as long, whatever the clock says; notes what was told of the hosts."""

    def __init__(self, predictor: Any = "narx") -> None:
        super().__init__(predictor=predictor)
        self.loads: list[list[tuple[float, float]]] = []
        self.first: tuple[int, ...] = ()

    def start(self, **kwargs: Any) -> None:
        super().start(**kwargs)
        self.first = self.shares

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        self.loads.append([(r.free_cpu, r.free_mem) for r in records])
        return super().observe([replace(r, compute_s=0.1 * r.samples * (1 + 2 * r.rank)) for r in records])


def of_rank(rank: int) -> type:
    """A host's load that differs by rank."""

    class Fixed:
        def free(self) -> tuple[float, float]:
            return 0.5 + 0.25 * rank, 0.125 * (1 + rank)

    return Fixed


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


def resuming_job(rank: int, world: int, folder: str) -> dict[str, Any]:
    step_times.HostLoad, kept = of_rank(rank), step_times.HostLoad  # type: ignore[assignment,misc]
    try:
        policies = [Timed(), Timed(), Timed("kalman")]
        trainer, _ = fit(rank, world, balanced(policy=policies[0]))
        shares = trainer.strategy.shares
        state = policies[0].state_dict()
        trainer.save_checkpoint(f"{folder}/end.ckpt")
        for policy in policies[1:]:
            again = rank_trainer(rank, world, balanced(policy=policy), max_epochs=4)
            again.fit(Toy(), DataLoader(regression(SAMPLES), batch_size=BATCH // world), ckpt_path=f"{folder}/end.ckpt")
    finally:
        step_times.HostLoad = kept  # type: ignore[misc]
    return {
        "shares": shares,
        "state": state,
        "loads": [policy.loads for policy in policies],
        "first": [policy.first for policy in policies],
        "learned": [policy.state_dict()["predictors"][0].get("learned") for policy in policies],
    }


def test_loads_travel_with_the_times_and_a_resume_keeps_what_was_learned(tmp_path: Path) -> None:
    ranks = run_ranks(2, resuming_job, str(tmp_path))
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["lightning_hetero"]["policy"]
    assert plain_types(saved) and saved["predictor"] == "Narx"
    before = saved["predictors"][0]["learned"]
    for result in ranks:
        assert result["shares"] == (12, 4)
        assert result["loads"][0] == [[(0.5, 0.125), (0.75, 0.25)]] * STEPS
        assert all(math.isnan(x) for x in sum(result["loads"][2][0], ()))  # nobody wants it: nobody measures it
        assert result["first"] == [(8, 8), (12, 4), (8, 8)]
        assert STEPS - 4 <= before <= STEPS - 3 and result["learned"] == [STEPS - 3, before + STEPS // 3, None]
    assert ranks[0]["state"] == ranks[1]["state"]  # both ranks hold the same network, to the last bit
