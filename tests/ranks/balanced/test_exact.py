"""Mathematics: uneven, ever-changing shares train the weights of one process with the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from tests.ranks.exact_models import (
    Accumulating,
    Gan,
    Groups,
    Manual,
    Normed,
    OwnSampler,
    PoisonedDummy,
    SumLoss,
    Tokens,
    TokensByMethod,
    TwoHeads,
    sequences,
    tokens_of,
)
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH, EPOCHS = 7 * 16, 16, 2
STEPS = 14  # the scripted shares come again after eleven
EXACT = 1e-12


class Watch(Callback):
    """Notes the shares of every batch and that hooks see the loss ``training_step`` returned."""

    def __init__(self) -> None:
        self.samples: list[int | None] = []
        self.hook_losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(trainer.strategy.current_samples())

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.hook_losses.append(float(loss))


# ---- runs ---------------------------------------------------------------------------------------------------

Outcome = tuple[Weights, list[int], list[float]]  # weights, samples per batch, losses that hooks saw


def fitted(
    rank: int, world: int, module: Toy, data: Any, strategy: Any, batch: int = BATCH, **trainer: Any
) -> Outcome:
    watch = Watch()
    trainer.setdefault("max_epochs", EPOCHS)
    callbacks = [watch] if hasattr(strategy, "current_samples") else []
    fit = rank_trainer(rank, world, strategy, callbacks=callbacks, **trainer)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch // world, shuffle=True)
    fit.fit(module, loader)
    return weights(module), [n for n in watch.samples if n is not None], watch.hook_losses


def job(
    rank: int, world: int, make: Any, args: dict[str, Any], trainer: dict[str, Any], data: Any = None
) -> Outcome:
    return fitted(rank, world, make(), data or regression(SAMPLES), balanced(**args), **trainer)


def check(
    world: int,
    make: Any,
    args: dict[str, Any] | None = None,
    data: Any = None,
    oracle: Any = None,
    **trainer: Any,
) -> list[Outcome]:
    """Fits on ranks with shares that change all the time; every rank must have the single process's weights."""
    outcomes = run_ranks(world, job, make, args or {}, trainer, data)
    expected = (oracle or make)()
    untrained = weights(expected)
    single(expected, data or regression(SAMPLES), BATCH, **{"max_epochs": EPOCHS, **trainer})
    for trained, _, _ in outcomes:
        assert trained.distance(weights(expected)) <= EXACT
    assert outcomes[0][0].distance(untrained) > 1e-2
    steps = list(zip(*(samples for _, samples, _ in outcomes), strict=True))
    assert len(steps) >= STEPS
    assert len({losses[0] for _, _, losses in outcomes}) > 1, "every rank had the same samples"
    assert len(set(steps)) >= 5, "the shares have not changed, so the test proves nothing"
    return outcomes


# ---- tests --------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[int, Any, dict[str, Any], dict[str, Any]]] = {
    "four ranks": (4, Toy, {}, {}),
    "accumulation, last window incomplete": (2, Toy, {}, {"accumulate_grad_batches": 3, "max_epochs": 8}),  # 56 steps
    "clipping by norm": (2, Toy, {}, {"gradient_clip_val": 0.05}),
    "clipping by value": (2, Toy, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "two optimizers": (2, Gan, {"find_unused_parameters": True}, {}),
    "manual accumulation under no_sync": (2, Accumulating, {}, {"max_epochs": 4}),
    "parameters used in turns": (2, TwoHeads, {"find_unused_parameters": True}, {}),
    "static graph": (2, Toy, {"static_graph": True}, {}),
    "static graph, manual": (2, Manual, {"static_graph": True}, {}),
    "gradients as views of buckets": (2, Toy, {"gradient_as_bucket_view": True}, {}),
    "groups and scheduler": (2, Groups, {}, {}),
    "communication hook": (2, Toy, {"ddp_comm_hook": allreduce_hook}, {}),
    "batch norm over ranks": (2, Normed, {}, {}),
    "no samples, NaN": (4, PoisonedDummy, {"min_samples": 0}, {}),
}


@pytest.mark.stock_ddp(
    "accumulate_grad_batches", "gradient_clip_val", "manual", "optimizers", "schedulers", "ddp_comm_hook",
    "find_unused_parameters", "static_graph", "balanced"
)  # fmt: skip
@pytest.mark.stock_ddp(
    "sync_batchnorm", "balanced", differs="tested with a layer that does the same, as torch's own needs a GPU"
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str) -> None:
    world, make, args, trainer = CASES[name]
    outcomes = check(world, make, args, **trainer)
    if "min_samples" in args:
        assert any(0 in samples for _, samples, _ in outcomes)


class NotesLoss(Toy):
    """Notes the local loss it returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append([float(loss)])
        return loss


def noted(rank: int, world: int) -> tuple[Outcome, list[float]]:
    module = NotesLoss()
    outcome = fitted(rank, world, module, regression(SAMPLES), balanced())
    return outcome, [one[0] for one in module.seen]


def test_plain_and_hooks_see_the_unweighted_loss() -> None:
    results = run_ranks(2, noted)
    expected = Toy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    for (trained, samples, hook_losses), returned in results:
        assert trained.distance(weights(expected)) <= EXACT
        assert hook_losses == returned
        assert len(hook_losses) == STEPS
        assert len(set(samples)) >= 5


def test_tail_smaller_than_the_world() -> None:
    """The last batch of each epoch has 2 samples for 4 ranks: two ranks train on a dummy of weight 0."""
    outcomes = check(4, PoisonedDummy, data=regression(3 * BATCH + 2), max_epochs=4)
    assert sorted(samples[3] for _, samples, _ in outcomes) == [0, 0, 1, 1]


@pytest.mark.stock_ddp("token_means", "balanced")
@pytest.mark.parametrize("by_method", [True, False], ids=["method", "argument"])
def test_mean_over_tokens(by_method: bool) -> None:
    """Some ranks get sequences without a single token: their NaN counts nothing."""
    make, args = (TokensByMethod, {}) if by_method else (Tokens, {"batch_weight": tokens_of})
    outcomes = check(4, make, args, data=sequences(SAMPLES), oracle=Tokens)
    assert any(loss != loss for _, _, losses in outcomes for loss in losses), "no rank was without tokens"


def test_sum_loss_keeps_the_recipe_of_ddp() -> None:
    """DDP divides a summed loss by the number of ranks: 1/W of the sum over the global batch."""
    check(2, SumLoss, {"loss_reduction": "sum"}, oracle=lambda: SumLoss(of=2))


def test_batch_too_large_for_the_devices_is_computed_in_pieces() -> None:
    """At least three per global batch; the oracle takes it at once. Each epoch ends with a tail of 7."""
    data = regression(6 * BATCH + 7)
    outcomes = check(2, Toy, {"max_samples": 3}, data=data)
    assert len(outcomes[0][1]) == STEPS


def equal_and_stock(rank: int, world: int) -> list[tuple[Weights, Weights]]:
    results = []
    for dtype in (torch.float64, torch.float32):
        pair = []
        for strategy in (balanced(policy=None, rebalance=False), DDPStrategy(process_group_backend="gloo")):
            data = regression(SAMPLES, dtype=dtype)
            sampler = OwnSampler(data, num_replicas=world, rank=rank, shuffle=True)
            loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
            pair.append(fitted(rank, world, Toy(dtype), loader, strategy)[0])
        results.append((pair[0], pair[1]))
    return results


def test_equal_shares_are_stock_ddp_to_the_bit() -> None:
    for pairs in run_ranks(2, equal_and_stock):
        for ours, stock in pairs:
            assert all(torch.equal(ours[k], stock[k]) for k in stock)


def mixed(precision: str) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None
    return MixedPrecision(precision, device="cpu", scaler=scaler)  # type: ignore[arg-type]


def in_precision(rank: int, world: int, precision: str) -> tuple[Weights, Weights]:
    data = regression(SAMPLES, dtype=torch.float32)
    ours = balanced(precision_plugin=mixed(precision))
    stock = DDPStrategy(process_group_backend="gloo", precision_plugin=mixed(precision))
    pair = [fitted(rank, world, Toy(torch.float32), data, strategy)[0] for strategy in (ours, stock)]
    return pair[0], pair[1]


@pytest.mark.stock_ddp("precision_mixed", "balanced")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_as_close_as_an_equal_split(precision: str) -> None:
    expected = Toy(torch.float32)
    data = regression(SAMPLES, dtype=torch.float32)
    single(expected, data, BATCH, max_epochs=EPOCHS, plugins=[mixed(precision)])
    ours, stock = run_ranks(2, in_precision, precision)[0]
    apart = stock.distance(weights(expected))
    assert 1e-5 < apart < 0.1
    assert ours.distance(weights(expected)) <= 3 * apart
