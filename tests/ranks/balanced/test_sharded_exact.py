"""Mathematics: sharded models with uneven, ever-changing shares get the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.balanced import sharded_models as models
from tests.ranks.balanced.sharded_kit import (
    BATCH,
    Block,
    Deep,
    InOrder,
    Outcome,
    Program,
    Sharded,
    alone,
    on_ranks,
    sharded,
    weights,
)
from tests.ranks.exact_models import sequences, tokens_of
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, rank_trainer, regression

CLIPPED = {"gradient_clip_val": 0.05}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
ACCUMULATED = {"accumulate_grad_batches": 3}  # the last window of an epoch is incomplete
AUTO = {"shard": "auto"}
TAIL = {"samples": 16 * 12 + 1, "trainer": {"max_epochs": 4}}  # the last batch has one sample

TWO: dict[str, Program] = {
    "auto": Program(Deep, AUTO, ACCUMULATED | CLIPPED),
    "classes": Program(models.Inner, {"shard": [Block]}, BY_VALUE),
    "checkpoint wrapper": Program(models.Wrapped, trainer=CLIPPED),
    "checkpoint": Program(models.Recomputed, AUTO, ACCUMULATED),
    "compiled": Program(models.Compiled, trainer=ACCUMULATED | CLIPPED),
    "whole until backward": Program(models.Kept, trainer=ACCUMULATED | BY_VALUE),
    "a parameter of the module": Program(models.Direct, AUTO, CLIPPED),
    "tied": Program(models.Tied, AUTO, ACCUMULATED),
    "normalised over ranks": Program(models.Normed, AUTO, CLIPPED),
    "frozen": Program(models.Frozen, trainer=ACCUMULATED | CLIPPED),
    "plain backward": Program(models.Plain),
    "two optimizers": Program(models.Gan, AUTO),
    "sum": Program(models.Sum, AUTO | {"loss_reduction": "sum"}, CLIPPED, alone=models.HalfSum),
    "metrics": Program(models.Logs, val=True),
    "tail": Program(models.Poisoned, AUTO, **TAIL),
    "no samples": Program(models.Poisoned, AUTO | {"min_samples": 0}, CLIPPED),
}
FOUR: dict[str, Program] = {
    "hybrid": Program(models.Hybrid, trainer=ACCUMULATED | CLIPPED),
    "tensor parallel": Program(models.TensorParallel, {"tensor_parallel_size": 2}, CLIPPED | ACCUMULATED),
    "no tokens": Program(models.Tokens, {"batch_weight": tokens_of}, ACCUMULATED, data=sequences),
}
MORE_TWO: dict[str, Program] = {
    "two groups, a scheduler": Program(models.Groups, trainer=CLIPPED),  # "metrics" has them, too
    "auto, by value": Program(Deep, AUTO, BY_VALUE),
    "by value": Program(Sharded, trainer=ACCUMULATED | BY_VALUE),
    "checkpoint, reentrant": Program(models.Reentrant, AUTO),
    "inner": Program(models.Inner, AUTO, ACCUMULATED),
    "layer by layer": Program(models.Parts, AUTO, CLIPPED),
    "tied, own": Program(models.TiedSharded, trainer=CLIPPED),
    "manual": Program(models.Manual),
    "two optimizers, own": Program(models.GanSharded),
}
MORE_FOUR: dict[str, Program] = {
    "four": Program(Sharded, trainer=ACCUMULATED | CLIPPED),
    "four, auto, compiled": Program(models.Compiled, trainer=CLIPPED),
    "hybrid, tail": Program(models.HybridPoisoned, **TAIL),
    "tensor parallel, by value": Program(models.TensorParallel, {"tensor_parallel_size": 2}, BY_VALUE),
    "tensor parallel, tail": Program(models.TensorParallel, {"tensor_parallel_size": 2}, **TAIL),
}


def first(rows: int, data: Callable[[], TensorDataset]) -> TensorDataset:
    return TensorDataset(*data()[:rows])


def shorter(program: Program) -> Program:
    """Fourteen steps of its fifty, as the scripted shares come again after eleven; a last batch not full stays so."""
    rows = program.samples * 7 // 25 // BATCH * BATCH + program.samples % BATCH
    return replace(program, data=partial(first, rows, program.data or partial(regression, program.samples)))


# With --long all of them have fifty steps.
LENGTHS = {False: 14, True: 50}
TABLES: dict[tuple[int, bool], dict[str, Program]] = {
    (2, False): {name: shorter(program) for name, program in TWO.items()} | {"auto": TWO["auto"]},
    (4, False): {name: shorter(program) for name, program in FOUR.items()},
    (2, True): TWO | MORE_TWO,
    (4, True): FOUR | MORE_FOUR,
}
CASES = [
    pytest.param(*group, name, id=f"{name}, {LENGTHS[group[1]]} steps", marks=[pytest.mark.long] if group[1] else [])
    for group, table in TABLES.items()
    for name in table
]


@cache
def trained(world: int, long: bool) -> list[dict[str, Outcome | str]]:
    """Returns what all trainings of a group have left behind, by rank and name: one launch for all of them."""
    return run_ranks(world, on_ranks, TABLES[world, long], timeout_s=300)


@pytest.mark.parametrize(("world", "long", "name"), CASES)
def test_weights_are_those_of_one_process(world: int, long: bool, name: str) -> None:
    program = TABLES[world, long][name]
    outcomes = [rank[name] for rank in trained(world, long)]
    expected = alone(program)
    found: list[Outcome] = []
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
        found.append(outcome)
        assert outcome.weights.distance(expected.weights) <= program.exact
        # The ranks' mean of sums is another value, and a rank without tokens has logged NaN.
        if not isinstance(program.make(), models.Sum | models.Tokens):
            check_metrics(outcome, expected)
    steps = list(zip(*(outcome.samples for outcome in found), strict=True))
    assert len(steps) >= LENGTHS[long]
    assert len(set(steps)) >= 5, "the shares have not changed, so the test shows nothing"
    if "tail" in name or name == "no samples":
        assert any(0 in step for step in steps)
    if program.val:
        check_predictions(found, expected)


def check_metrics(outcome: Outcome, expected: Outcome) -> None:
    for ours, theirs in zip(outcome.metrics, expected.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-6)  # torchmetrics count in float32


def check_predictions(found: list[Outcome], expected: Outcome) -> None:
    """The sampler of an evaluation gives each rank every second sample, as under stock."""
    parts = [torch.cat(outcome.predictions) for outcome in found]
    assert torch.allclose(torch.stack(parts, 1).flatten(0, 1), torch.cat(expected.predictions), rtol=1e-12)


# ---- in a lower precision: the same as stock with parts of the same size ---------------------------------------


class Numbered(models.Bf16):
    """Notes the samples that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.told.append(batch[2].tolist())
        return self.loss(batch)


class ByHand(models.Bf16):
    """Weights the loss as a user has to."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) * (self.trainer.world_size * len(batch[0]) / 16)


def in_bf16(rank: int, world: int) -> tuple[Weights, Weights, list[list[int]]]:
    plain = regression(320, dtype=torch.float32)
    data = TensorDataset(*plain.tensors, torch.arange(320))
    ours, stock = Numbered(), ByHand()
    trainer = rank_trainer(rank, world, sharded(), max_epochs=1)
    trainer.fit(ours, DataLoader(data, batch_size=16 // world, sampler=InOrder(data)))
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(stock, DataLoader(data, batch_sampler=ours.told))
    return weights(ours), weights(stock), ours.told


def test_mixed_precision_of_fsdp_is_that_of_stock_with_a_loss_weighted_by_hand() -> None:
    results = run_ranks(2, in_bf16)
    for ours, stock, _ in results:
        assert all(torch.equal(ours[name], stock[name]) for name in stock)
    assert len({len(batch) for batch in results[0][2]}) >= 5
