"""Bad input: a clear error before training, with the value, what is allowed and what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_hetero import BalancePolicy, BatchRebalancer, LoadBalancedStrategy
from lightning_hetero.predictors import Ewma
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, quiet_trainer, rank_trainer, regression

# ---- at construction ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "parts"),
    [
        ("global_batch_size", 0, ("global_batch_size=0", ">= 1")),
        ("global_batch_size", 1.5, ("global_batch_size=1.5", "whole number")),
        ("quantum", True, ("quantum=True", "whole number >= 1")),
        ("exchange_every", -2, ("exchange_every=-2", ">= 1")),
        ("predictor", "oracle", ("'oracle'", "kalman", "ewma", "last")),
        ("predictor", 7, ("predictor=7", "Predictor")),
        ("dead_band", -0.1, ("dead_band=-0.1", ">= 0")),
        ("stream", "endless", ("stream='endless'", "infinite", "shared", "finite")),
        ("batch_sampler", "split", ("batch_sampler='split'", "refuse", "pool")),
        ("loss_reduction", "none", ("loss_reduction='none'", "mean", "sum")),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(
    argument: str, value: Any, parts: Sequence[str]
) -> None:
    with pytest.raises(ValueError) as error:
        LoadBalancedStrategy(**{argument: value})
    for part in parts:
        assert part in str(error.value)


def test_an_unknown_ddp_argument_comes_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"'find_unused_parameter'; did you mean 'find_unused_parameters'\?"):
        LoadBalancedStrategy(find_unused_parameter=True)
    with pytest.raises(TypeError, match=r"have no argument 'xyzzy'$"):
        LoadBalancedStrategy(xyzzy=1)
    assert LoadBalancedStrategy(bucket_cap_mb=3, static_graph=True).policy.dead_band == 0.02


@pytest.mark.stock_ddp("model_averaging_period", "balanced", refused="the ranks' weights drift apart")
def test_post_local_sgd_is_refused_with_the_reason() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    with pytest.raises(TypeError, match=r"post-localSGD lets the ranks' weights drift.*strategy='ddp'"):
        quiet_trainer(devices=2, strategy=LoadBalancedStrategy(model_averaging_period=4))
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)
    with pytest.raises(TypeError, match="post-localSGD"):
        quiet_trainer(devices=2, strategy=LoadBalancedStrategy(ddp_comm_state=state))


def test_a_policy_and_its_settings_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="either a whole policy, or predictor and dead_band"):
        LoadBalancedStrategy(policy=BalancePolicy(), dead_band=0.1)
    assert LoadBalancedStrategy(policy="predictive", dead_band=0.1).policy.dead_band == 0.1


def test_fabric_is_refused_with_a_pointer_to_the_trainer() -> None:
    """Strategies of the Trainer and of Fabric are two hierarchies in Lightning; for objects the message is its own."""
    with pytest.raises(TypeError, match=r"no counterpart in Fabric.*Trainer\(strategy"):
        Fabric(accelerator="cpu", devices=2, strategy="hetero_balanced")
    with pytest.raises(ValueError, match=r"<LoadBalancedStrategy for lightning\.pytorch\.Trainer: "):
        Fabric(accelerator="cpu", devices=2, strategy=LoadBalancedStrategy())  # type: ignore[arg-type]


# ---- when the loaders are known ----------------------------------------------------------------------------


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training began")


class Untrained(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training began")


class Lbfgs(Untrained):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Pairs(BatchSampler):
    """A batch sampler of the user's own."""


def plain(batch_size: int | None = 4, **kwargs: Any) -> DataLoader:
    return DataLoader(regression(64), batch_size=batch_size, **kwargs)


def own_batches() -> DataLoader:
    return DataLoader(regression(64), batch_sampler=Pairs(SequentialSampler(range(64)), 4, False))


Case = tuple[dict[str, Any], type[Toy], Callable[[], Any], str, tuple[str, ...]]
CASES: dict[str, Case] = {
    "batch below one sample per rank": (
        {"global_batch_size": 1}, Untrained, plain, "ValueError",
        ("asks for 2 samples on 2 ranks", "global batch has 1", "at least 2"),
    ),
    "batch below the minimum": (
        {"min_samples": 8}, Untrained, plain, "ValueError",
        ("min_samples=8 asks for 16 samples on 2 ranks", "has 8", "lower min_samples", "at least 16"),
    ),
    "maximum without accumulation": (
        {"max_samples": 3}, Manual, plain, "ValueError",
        ("8 samples exceeds max_samples=3 on 2 ranks (6 together)", "manual optimization", "lower the batch"),
    ),
    "no room at all": ({"max_samples": 0}, Untrained, plain, "ValueError", ("max_samples=0 leaves no room",)),
    "negative minimum": ({"min_samples": -1}, Untrained, plain, "ValueError", ("min_samples=-1", ">= 0")),
    "quantum that does not divide": (
        {"quantum": 3}, Untrained, plain, "ValueError", ("quantum=3", "8 samples", "multiple"),
    ),
    "own batch sampler and size": (
        {"batch_sampler": "pool", "global_batch_size": 8}, Untrained, own_batches, "ValueError",
        ("global_batch_size=8 cannot be combined with a batch sampler",),
    ),
    "several loaders, one size": (
        {"global_batch_size": 8}, Untrained, lambda: [plain(), plain(2)], "ValueError",
        ("global_batch_size=8 is ambiguous with 2 train loaders", "batch_size"),
    ),
    "LBFGS": ({}, Lbfgs, plain, "TypeError", ("LBFGS", "one device or another optimizer")),
}  # fmt: skip


def refusing_job(rank: int, world: int, names: Sequence[str]) -> list[tuple[str, str]]:
    said = []
    for name in names:
        kwargs, module, loader, _, _ = CASES[name]
        try:
            rank_trainer(rank, world, balanced(**kwargs), max_epochs=1).fit(module(), loader())
        except Exception as error:
            said.append((type(error).__name__, str(error)))
        else:
            said.append(("nothing", ""))
    return said


@functools.cache
def refusals() -> list[list[tuple[str, str]]]:
    return run_ranks(2, refusing_job, list(CASES))


@pytest.mark.stock_ddp("lbfgs", "balanced", refused="each rank would decide from its own loss")
@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses_before_the_first_step(name: str) -> None:
    *_, expected, parts = CASES[name]
    for said in refusals():
        kind, message = said[list(CASES).index(name)]
        assert kind == expected, message
        for part in parts:
            assert part in message


# ---- ranks that differ -------------------------------------------------------------------------------------


def differing(rank: int, which: str) -> LoadBalancedStrategy:
    one = 4 + 4 * rank
    if which == "policy":
        return balanced(policy=BalancePolicy(dead_band=0.1 * rank))
    if which == "predictor":
        return balanced(policy=BalancePolicy(predictor=Ewma(weight=(0.5, 0.25)[rank])))
    return balanced(**{
        "global_batch_size": {"global_batch_size": 2 * one},
        "min_samples": {"min_samples": 1 + rank},
        "exchange_every": {"exchange_every": 1 + rank},
        "quantum": {"quantum": 1 + rank},
        "rebalance": {"rebalance": rank == 0},
        "loss_reduction": {"loss_reduction": ("mean", "sum")[rank]},
    }[which])  # fmt: skip


DIFFERENT = {
    "global_batch_size": ("global_batch_size", "8", "16"),
    "min_samples": ("bounds", "lower=1", "lower=2"),
    "exchange_every": ("exchange_every", "'1'", "'2'"),
    "quantum": ("quantum", "'1'", "'2'"),
    "rebalance": ("rebalance", "True", "False"),
    "loss_reduction": ("loss_reduction", "mean", "sum"),
    "policy": ("thresholds", "dead_band=0.0", "dead_band=0.1"),
    "predictor": ("predictor", "Ewma(weight=0.5)", "Ewma(weight=0.25)"),
}


def differing_job(rank: int, world: int) -> list[str]:
    said = []
    for which in DIFFERENT:
        with pytest.raises(ValueError) as error:
            rank_trainer(rank, world, differing(rank, which), max_epochs=1).fit(Untrained(), plain())
        said.append(str(error.value))
    for loader in (lambda: plain(4 + rank), lambda: DataLoader(regression(64 + 8 * rank), batch_size=4)):
        with pytest.raises(ValueError) as error:
            rank_trainer(rank, world, balanced(), max_epochs=1).fit(Untrained(), loader())
        said.append(str(error.value))
    return said


def test_ranks_that_differ_stop_all_with_both_sides_named() -> None:
    for said in run_ranks(2, differing_job):
        for (setting, mine, other), message in zip(DIFFERENT.values(), said, strict=False):
            assert "configured differently" in message and f"{setting} is {{0: " in message
            assert mine in message and other in message and "same program" in message
        assert "batch_size: {0: 4, 1: 5}" in said[-2] and "they have {0: 64, 1: 72} samples by rank" in said[-1]


class Tampered(BalancePolicy):
    """On rank 1, somebody else's shares."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def start(self, **kwargs: Any) -> None:
        super().start(**kwargs)
        self.shares = (4, 4) if self._rank == 0 else (3, 5)


def tampered_job(rank: int, world: int) -> str:
    with pytest.raises(RuntimeError) as error:
        rank_trainer(rank, world, balanced(policy=Tampered(rank)), max_epochs=1).fit(Toy(), plain())
    return str(error.value)


def test_shares_that_differ_at_run_time_are_an_error_naming_both_sides() -> None:
    for rank, message in enumerate(run_ranks(2, tampered_job)):
        assert "disagree on the shares of epoch 0, step 0" in message
        assert (
            f"rank {rank} ran" in message and f"rank {1 - rank} ran" in message and "same program" in message
        )


def stock_job(rank: int, world: int) -> str:
    strategy = DDPStrategy(process_group_backend="gloo")
    with pytest.raises(TypeError) as error:
        rank_trainer(rank, world, strategy, callbacks=[BatchRebalancer()], max_epochs=1).fit(
            Untrained(), plain()
        )
    return str(error.value)


def test_the_rebalancer_needs_its_strategy() -> None:
    for message in run_ranks(2, stock_job):
        assert "BatchRebalancer needs strategy='hetero_balanced'" in message and "DDPStrategy" in message
