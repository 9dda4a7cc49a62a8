"""The transport between nodes, under Lightning on one node: exact, resumable, and no death spreads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.ranks.exact_models import Gan, Groups
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, rank_trainer, regression, single, stale, weights
from tests.ranks.resume_kit import Saver
from tests.ranks.stale.fits import Noting, Seen, check_once
from tests.ranks.stale.fits import fit as noted_fit
from tests.ranks.stale.models import indexed

pytestmark = pytest.mark.ranks
EXACT = 1e-12
SAMPLES, BATCH, EPOCHS = 110, 24, 3
MODELS: dict[str, type[Toy]] = {"groups": Groups, "two optimizers": Gan}


def pairs(**kwargs: Any) -> Any:
    return stale(**{"policy": "bsp", "transport": "pairs", **kwargs})


def loader(per_device: int) -> DataLoader:
    return DataLoader(regression(SAMPLES), batch_size=per_device, shuffle=True)


def fit(rank: int, world: int, name: str) -> tuple[Weights, int]:
    module = MODELS[name]()
    trainer = rank_trainer(rank, world, pairs(), max_epochs=EPOCHS)
    trainer.fit(module, loader(BATCH // world))
    return weights(module), trainer.global_step


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_one_process(name: str) -> None:
    module = MODELS[name]()
    untrained = weights(module)
    oracle = single(module, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    assert weights(module).distance(untrained) > 1e-3
    for result, step in run_ranks(3, fit, name):
        assert result.distance(weights(module)) <= EXACT
        assert step == oracle.global_step


def samples_job(rank: int, world: int) -> Seen:
    strategy = {"policy": "flexible", "transport": "pairs"}
    return noted_fit(rank, world, DataLoader(indexed(SAMPLES), batch_size=8, shuffle=True), strategy=strategy,
                     module=Noting())  # fmt: skip


def test_under_a_policy_that_waits_for_nobody_each_sample_counts_once() -> None:
    ranks = run_ranks(3, samples_job)
    check_once(ranks, [range(SAMPLES)] * EPOCHS)
    assert len({r.steps for r in ranks}) == 1
    assert all(r.weights.distance(ranks[0].weights) == 0.0 for r in ranks)


def saving_job(rank: int, world: int, folder: str) -> None:
    trainer = rank_trainer(rank, world, pairs(), max_epochs=EPOCHS, callbacks=[Saver(folder, [(1, 2)])])
    trainer.fit(Groups(), loader(BATCH // world))


def resuming_job(rank: int, world: int, path: str) -> Weights:
    module = Groups()
    rank_trainer(rank, world, pairs(), max_epochs=EPOCHS).fit(module, loader(BATCH // world), ckpt_path=path)
    return weights(module)


def test_the_servers_state_comes_back_over_the_wire(tmp_path: Path) -> None:
    """In the middle of the second epoch: Adam's state, which only the server has, and which samples are left."""
    path = tmp_path / "batch-1-2.ckpt"
    run_ranks(2, saving_job, str(tmp_path))
    saved = torch.load(path, weights_only=True)
    moments = saved["optimizer_states"][0]["state"]
    assert moments and all(float(m["step"]) == 8.0 and m["exp_avg_sq"].any() for m in moments.values())
    module = Groups()
    single(module, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    for result in run_ranks(3, resuming_job, str(path)):
        assert result.distance(weights(module)) <= EXACT
