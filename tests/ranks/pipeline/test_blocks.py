"""Off-the-shelf transformers divide unmodified, and end on the weights of one process."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hetero import Scenario, ThrottleCallback
from lightning_hetero.solvers.plans import plan_to_plain
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, rank_trainer, single, weights
from tests.ranks.pipeline.blocks_kit import LENGTH, MODELS, Sentences, gpt2, padded_encoder
from tests.ranks.pipeline.kit import pipeline

EXACT = 1e-12
SAMPLES, BATCH, MICRO = 24, 12, (5, 5, 2)
CUTS = {2: [0, 1, 4], 4: [0, 1, 2, 3, 4]}
PLANNED = ("BERT", "a loop of one's own", "found")  # found in GPT-2
NAMES = {2: tuple(name for name in MODELS if name not in (*PLANNED, "GPT-2")), 4: tuple(MODELS)}  # by stages


def plan(stages: int) -> dict[str, Any]:
    ranks = list(range(stages))[::-1]
    return {"groups": [{"ranks": ranks, "cuts": CUTS[stages], "samples": BATCH, "micro_batches": list(MICRO)}]}


def job(rank: int, world: int) -> dict[str, Weights]:
    found = {}
    for name in NAMES[world]:
        make, backbone = MODELS[name]
        module = make()
        strategy = pipeline(plan(world), backbone=backbone)
        trainer = rank_trainer(rank, world, strategy, max_epochs=1)
        data = Sentences(SAMPLES, pictures=name == "ViT")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You defined a `validation_step`")
            trainer.fit(module, DataLoader(data, batch_size=BATCH // world, shuffle=True))
        found[name] = weights(module)
    return found


def planned_job(rank: int, world: int) -> dict[str, tuple[Weights, Any]]:
    """The plan is found: blocks are measured with what they are called with, which differs with the samples."""
    found = {}
    for name in PLANNED:
        make, backbone = MODELS[name]
        module = make()
        strategy = pipeline(None, backbone=backbone, max_groups=1, micro_batch_size=LENGTH)
        throttle = ThrottleCallback(Scenario(speeds=[1.0, 1.0], sample_s=2e-3))  # else a device alone is as fast
        trainer = rank_trainer(rank, world, strategy, max_epochs=1, callbacks=[throttle])
        trainer.fit(module, DataLoader(Sentences(4 * LENGTH), batch_size=LENGTH, shuffle=True))
        assert strategy.planned is not None
        found[name] = weights(module), plan_to_plain(strategy.planned.plan)["groups"]
    return found


def test_a_plan_is_found_for_blocks_with_side_inputs() -> None:
    ranks = run_ranks(2, planned_job, timeout_s=110.0)
    for name in ranks[0]:
        module = MODELS[name][0]()
        single(module, Sentences(4 * LENGTH), 2 * LENGTH, max_epochs=1)
        for rank in ranks:
            found, groups = rank[name]
            assert [len(group["ranks"]) for group in groups] == [2], name
            assert found.distance(weights(module)) <= EXACT, name


def evaluated_job(rank: int, world: int) -> dict[str, Any]:
    """Validation: layers take other ways there, e.g. with nested tensors; caches that nobody reads, or somebody."""
    found: dict[str, Any] = {}
    for strategy in (pipeline(plan(world), backbone="net.encoder"), DDPStrategy()):
        module = padded_encoder()
        trainer = rank_trainer(rank, world, strategy)
        found[type(strategy).__name__] = trainer.validate(module, DataLoader(Sentences(8), 4), verbose=False)
    for name, again in {"once": False, "again": True}.items():
        module = gpt2()
        if again:
            module.validation_step = lambda batch, i, module=module: module.net.generate(**prompt(batch))
        trainer = rank_trainer(rank, world, pipeline(plan(world), backbone="net"))
        try:
            found[name] = trainer.validate(module, DataLoader(Sentences(8), 4), verbose=False)
        except RuntimeError as error:
            found[name] = str(error)
    return found


def prompt(batch: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": batch["input_ids"][:, :3], "max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": None}


def test_evaluation_is_that_of_stock_ddp() -> None:
    for rank in run_ranks(2, evaluated_job):
        assert rank["HeteroPipelineStrategy"][0] == pytest.approx(rank["DDPStrategy"][0], rel=1e-12)
        assert math.isfinite(rank["once"][0]["val"])
        assert "that an earlier call has filled" in rank["again"] and "use_cache=False" in rank["again"]


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.long)])
def test_transformers_train_as_in_one_process(stages: int) -> None:
    ranks = run_ranks(stages, job, timeout_s=110.0)
    for name in NAMES[stages]:
        module = MODELS[name][0]()
        begun = weights(module)
        single(module, Sentences(SAMPLES, pictures=name == "ViT"), BATCH, max_epochs=1)
        expected = weights(module)
        assert expected.distance(begun) > 1e-3, name  # it was trained
        for found in ranks:
            assert found[name].distance(expected) <= EXACT, name
