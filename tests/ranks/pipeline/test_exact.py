"""Mathematics: pipelines of any shape train the weights of one process with the global batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, regression, single, weights
from tests.ranks.pipeline import variants
from tests.ranks.pipeline.kit import WORLD, Deep, fit, pipeline

EXACT = 1e-12
DATA = regression(112)  # 7 global batches of 16

CASES: dict[str, tuple[type[Deep], dict[str, Any], dict[str, Any]]] = {  # module, strategy's arguments, Trainer's
    "plain": (Deep, {}, {"max_epochs": 2}),
    "clipped by norm": (Deep, {}, {"gradient_clip_val": 0.05}),
    "clipped by value": (Deep, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated, last window short": (
        Deep, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "max_epochs": 2}
    ),
    "skip connection": (variants.Skipping, {}, {}),
    "two calls": (variants.TwoCalls, {}, {"gradient_clip_val": 0.05}),
    "module list": (variants.Listed, {}, {}),
    "tuple": (variants.Tuples, {}, {}),
    "frozen": (variants.Frozen, {}, {"gradient_clip_val": 0.05}),
    "unused": (variants.Unused, {"find_unused_parameters": True}, {}),
    "momentum, schedule": (variants.Momentum, {}, {}),
    "token weights": (variants.Weighted, {}, {}),
    "dict": (variants.Dictionary, {}, {}),
    "layers computed again": (Deep, {"checkpoint_layers": True}, {"accumulate_grad_batches": 2}),
}  # fmt: skip


EPOCHS = 1  # unless a case says more
NAMES = {
    "1x2": tuple(name for name in CASES if name not in ("plain", "clipped by norm")),  # as are others, with more
    "2x2": ("plain", "clipped by norm", "accumulated, last window short", "unused", "token weights"),
    "1x4": ("plain", "clipped by norm", "accumulated, last window short", "two calls"),
    **dict.fromkeys(("2x1", "resting", "1x1"), ("plain",)),
}


def job(rank: int, world: int, plan: str, names: tuple[str, ...]) -> dict[str, tuple[Weights, dict[str, float]]]:
    found = {}
    for name in names:
        make, arguments, options = CASES[name]
        options = {"max_epochs": EPOCHS, **options}
        trained, trainer = fit(rank, world, make(), pipeline(plan, **arguments), data=DATA, **options)
        found[name] = trained, {k: float(v) for k, v in trainer.callback_metrics.items()}
    return found


@cache
def oracle(name: str) -> tuple[Weights, dict[str, float]]:
    make, _, options = CASES[name]
    module = make()
    trainer = single(module, DATA, 16, **{"max_epochs": EPOCHS, **options})
    return weights(module), {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.stock_ddp(
    "accumulate_grad_batches", "gradient_clip_val", "optimizers", "schedulers", "find_unused_parameters",
    "token_means", "pipeline"
)  # fmt: skip
@pytest.mark.parametrize("plan", NAMES)
@pytest.mark.short("1x2", "2x1", "1x1", "resting")
def test_the_weights_are_those_of_one_process(plan: str) -> None:
    ranks = run_ranks(WORLD[plan], job, plan, NAMES[plan], timeout_s=100.0)
    for name in NAMES[plan]:
        expected, logged = oracle(name)
        for found, metrics in (rank[name] for rank in ranks):
            assert found.distance(expected) <= EXACT, name
            if name != "token weights":  # logged means count samples
                assert metrics == pytest.approx(logged, rel=1e-9), name


def dropped(rank: int, world: int, plan: Any) -> Weights:
    strategy = pipeline(plan, global_batch_size=16)
    return fit(rank, world, variants.Dropping(), strategy, data=DATA, max_epochs=1)[0]


def test_what_is_drawn_does_not_depend_on_the_plan() -> None:
    def group(ranks: list[int], cuts: list[int], samples: int) -> dict[str, Any]:
        return {"ranks": ranks, "cuts": cuts, "samples": samples, "micro_samples": 4}

    alone = run_ranks(2, dropped, {"groups": [group([0], [0, 6], 16)]})[0]  # one device, another one at rest
    chain = run_ranks(4, dropped, {"groups": [group([3, 1, 0], [0, 1, 4, 6], 16)]})
    two = run_ranks(4, dropped, {"groups": [group([0, 1], [0, 2, 6], 12), group([2, 3], [0, 5, 6], 4)]})
    for found in (*chain, *two):
        assert found.distance(alone) <= EXACT
    other = variants.Dropping()
    assert weights(other).distance(alone) > 1e-3  # it was trained


def test_a_sum_is_divided_by_the_ranks_as_under_ddp() -> None:
    ranks = run_ranks(2, summed)
    module = variants.Summed()
    module.loss = lambda batch: variants.Summed.loss(module, batch) / 2  # type: ignore[method-assign]
    single(module, DATA, 16, max_epochs=1)
    for found in ranks:
        assert found.distance(weights(module)) <= EXACT


def summed(rank: int, world: int) -> Weights:
    strategy = pipeline("1x2", loss_reduction="sum")
    return fit(rank, world, variants.Summed(), strategy, data=DATA, max_epochs=1)[0]


def autocast(rank: int, world: int) -> tuple[Weights, Weights]:
    def trained(**options: Any) -> Weights:
        data = regression(len(DATA), dtype=torch.float32)
        return fit(rank, world, Deep(torch.float32), pipeline("1x2"), data=data, max_epochs=1, **options)[0]

    return trained(), trained(precision="bf16-mixed")


@pytest.mark.stock_ddp("precision_mixed", "pipeline")
def test_bf16_is_as_good_as_on_one_device() -> None:
    data = regression(len(DATA), dtype=torch.float32)
    modules = [Deep(torch.float32), Deep(torch.float32)]
    single(modules[0], data, 16, max_epochs=1)
    single(modules[1], data, 16, max_epochs=1, precision="bf16-mixed")
    expected, half = map(weights, modules)
    error = half.distance(expected)
    for found, found_half in run_ranks(2, autocast):
        assert found.distance(expected) < 1e-5
        assert 0 < found_half.distance(expected) < 3 * error
