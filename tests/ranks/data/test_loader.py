"""Which samples are trained on, by real Trainers: the global batches, samplers, refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.ranks.data.indexed import EXACT, Fit, Noting, Other, by_name, ddp_order, fit, indexed, refusal, together
from tests.ranks.data.kit import Backwards, Pairs
from tests.ranks.harness import run_ranks
from tests.ranks.kit import single, weights

# ---- the content of the global batches ---------------------------------------------------------------------

WORLD = 3
SAMPLES, BATCH, EPOCHS = 38, 3, 2  # 4 global batches of 9 and a tail of 2


def everyday(rank: int, world: int) -> dict[str, Fit]:
    def loader(**kwargs: Any) -> DataLoader:
        return DataLoader(indexed(SAMPLES), batch_size=BATCH, **kwargs)

    def run(data: DataLoader, strategy: Any) -> Fit:
        return fit(rank, world, data, strategy=strategy, max_epochs=EPOCHS)

    lazy = {"min_samples": 0}  # ranks may get nothing
    return {
        "scripted": run(loader(shuffle=True), lazy),
        "other": run(loader(shuffle=True), {**lazy, "policy": Other()}),
        "equal": run(loader(), {"rebalance": False}),
        "unshuffled": run(loader(), lazy),
        "drop_last": run(loader(shuffle=True, drop_last=True), lazy),
        "stock": run(loader(shuffle=True), DDPStrategy(process_group_backend="gloo")),
        "stock_unshuffled": run(loader(), DDPStrategy(process_group_backend="gloo")),
    }


@cache
def everyday_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(WORLD, everyday))


@pytest.mark.parametrize("name", ["scripted", "other", "equal", "unshuffled"])
def test_global_batches_do_not_depend_on_the_shares(name: str) -> None:
    batches = together(everyday_runs()[name])
    assert batches == ddp_order(SAMPLES, BATCH * WORLD, EPOCHS)
    for epoch in range(EPOCHS):  # every sample once
        assert sorted(i for b in batches[5 * epoch : 5 * epoch + 5] for i in b) == list(range(SAMPLES))


def test_drop_last_leaves_out_the_tail() -> None:
    assert together(everyday_runs()["drop_last"]) == ddp_order(SAMPLES, BATCH * WORLD, EPOCHS, drop_last=True)


def test_the_runs_differ_in_shares_and_ranks_go_without() -> None:
    shares = {name: [tuple(map(len, s)) for s in zip(*(r.seen for r in ranks), strict=True)]
              for name, ranks in everyday_runs().items()}
    assert len(set(shares["scripted"])) > 5
    assert sum(a != b for a, b in zip(shares["scripted"], shares["other"], strict=True)) > 5
    assert any(0 in s for s in shares["scripted"] if sum(s) == BATCH * WORLD)
    assert [sum(s) for s in shares["scripted"]] == ([9] * 4 + [2]) * EPOCHS
    assert set(shares["equal"]) == {(3, 3, 3), (1, 1, 0)}


@pytest.mark.parametrize("suffix", ["", "_unshuffled"])
def test_stock_ddp_trains_on_the_same_sets(suffix: str) -> None:
    """Both shuffle whatever the loader says; stock pads the tail of 2 with the epoch's first sample."""
    ours = together(everyday_runs()["unshuffled" if suffix else "scripted"])
    theirs = together(everyday_runs()["stock" + suffix])
    assert len(ours) == len(theirs)
    for t, (mine, stock) in enumerate(zip(ours, theirs, strict=True)):
        padding = ours[t - 4][:1] if t % 5 == 4 else []
        assert sorted(stock) == sorted(mine + padding)


@pytest.mark.parametrize("name", ["scripted", "other", "unshuffled"])
def test_weights_are_the_single_processes(name: str) -> None:
    oracle = single_run()
    for run in everyday_runs()[name]:
        assert run.weights.distance(oracle) < EXACT
        assert run.updates == 5 * EPOCHS


@cache
def single_run() -> Any:
    module = Noting()
    single(module, indexed(SAMPLES), BATCH * WORLD, max_epochs=EPOCHS)
    return weights(module)


# ---- refusals ----------------------------------------------------------------------------------------------


def refusals(rank: int, world: int) -> dict[str, str]:
    def no(strategy: Any = None, trainer: dict[str, Any] | None = None, n: int = 30, **kwargs: Any) -> str:
        return refusal(rank, world, DataLoader(indexed(n), **kwargs), strategy=strategy, **(trainer or {}))

    return {
        "samples": no(n=30 + 10 * rank, batch_size=4),
        "batch_size": no(batch_size=4 + rank),
        "drop_last": no(batch_size=4, drop_last=rank == 1),
        "kind": no(batch_size=4, sampler=Backwards(9) if rank else None),
        "pool and size": no({"batch_sampler": "pool", "global_batch_size": 6}, batch_sampler=Pairs()),
        "own and size": no({"global_batch_size": 6}, {"use_distributed_sampler": False}, batch_size=4),
        "too small": no({"min_samples": 5}, batch_size=4),
        "quantum": no({"quantum": 3}, batch_size=4),
    }


def test_refusals_say_what_and_why() -> None:
    zero, one = run_ranks(2, refusals)
    assert zero == one
    expected = {
        "samples": ("ValueError", "{0: 30, 1: 40} samples by rank", "{0: 4, 1: 5} batches", "limit_train_batches=4"),
        "batch_size": ("ValueError", "differ between ranks in batch_size: {0: 4, 1: 5}"),
        "drop_last": ("ValueError", "differ between ranks in drop_last: {0: False, 1: True}"),
        "kind": ("ValueError", "differ between ranks in kind: {0: 'plain', 1: 'sampler'}"),
        "pool and size": ("ValueError", "global_batch_size=6 cannot be combined with a batch sampler"),
        "own and size": ("ValueError", "global_batch_size=6", "use_distributed_sampler=False"),
        "too small": ("ValueError", "min_samples=5 asks for 10 samples on 2 ranks"),
        "quantum": ("ValueError", "quantum=3"),
    }
    assert zero.keys() == expected.keys()
    for name, parts in expected.items():
        for part in parts:
            assert part in zero[name], f"{name}: {zero[name]}"
