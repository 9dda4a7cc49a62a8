"""`BatchRebalancer`: its own policy replaces the strategy's, and it can be switched off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import BatchRebalancer  # the other callbacks' public place is its, too
from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Scripted, Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH = 80, 16
EXACT = 1e-12


def loader(batch_size: int = BATCH // 2, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(regression(samples), batch_size=batch_size)


class Counting(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        self.asked += 1
        return super().observe(records)


class SwitchOff(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.strategy.rebalancer.enabled = False


class Shares(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.strategy.shares)


def rebalancer_job(rank: int, world: int) -> list[tuple[int, list[tuple[int, ...]], Weights]]:
    results = []
    for own, strategy, off in (
        (Counting(), balanced(), False),  # the callback's policy replaces the strategy's
        (Counting(), balanced(), True),
        (None, balanced(rebalance=False), False),
    ):
        shares, module = Shares(), Toy()
        callbacks = [shares, *([BatchRebalancer(own)] if own else []), *([SwitchOff()] if off else [])]
        trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=2)
        trainer.fit(module, loader())
        results.append((own.asked if own else 0, shares.seen, weights(module)))
    return results


def test_the_rebalancer_brings_its_own_policy_and_can_be_switched_off() -> None:
    oracle = Toy()
    single(oracle, regression(SAMPLES), BATCH, max_epochs=2)
    for given, switched, never in run_ranks(2, rebalancer_job):
        assert given[0] == 10 and len(set(given[1])) > 3
        assert switched[0] == 3 and len(set(switched[1][4:])) == 1 and len(set(switched[1])) > 1
        assert set(never[1]) == {(BATCH // 2, BATCH // 2)}
        for _, _, final in (given, switched, never):
            assert final.distance(weights(oracle)) <= EXACT
