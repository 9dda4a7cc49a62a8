"""`LoadBalancedStrategy(policy="tuning")`: shares that are tried out train the weights of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hetero.balanced.policy import TuningPolicy
from lightning_hetero.shares.policy import BalancePolicy, Decision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH, EPOCHS = 400, 16, 2  # 50 steps


class Shares(Callback):
    def __init__(self) -> None:
        self.trained: list[int | None] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(trainer.strategy.current_samples())


def with_known_speeds(policy: BalancePolicy) -> None:
    """Lets it see rank 1 take three times as long, whatever the clock says."""
    observe = policy.observe

    def told(records: Sequence[SpeedSample]) -> Decision:
        times = [0.1 * r.samples * (3 if r.rank == 1 else 1) for r in records]
        pairs = zip(records, times, strict=True)
        return observe(
            [SpeedSample(rank=r.rank, step=r.step, samples=r.samples, compute_s=t) for r, t in pairs]
        )

    policy.observe = told  # type: ignore[method-assign]


def tuning_job(rank: int, world: int) -> tuple[str, tuple[int, ...], list[int | None], Weights]:
    strategy, shares, module = balanced(policy="tuning"), Shares(), Toy()
    with_known_speeds(strategy.policy)
    trainer = rank_trainer(rank, world, strategy, callbacks=[shares], max_epochs=EPOCHS)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH // world, shuffle=True))
    return type(strategy.policy_in_use).__name__, strategy.shares, shares.trained, weights(module)


def test_shares_are_tuned_and_the_weights_are_those_of_one_process() -> None:
    oracle = Toy()
    single(oracle, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    outcomes = run_ranks(2, tuning_job)
    for name, final, _, trained in outcomes:
        assert name == TuningPolicy.__name__
        assert final == (12, 4)
        assert trained.distance(weights(oracle)) <= 1e-12
    steps = list(zip(*(trained for _, _, trained, _ in outcomes), strict=True))
    assert len(steps) == 50 and all(a + b == BATCH for a, b in steps)
    assert steps[0] == (8, 8) and len(set(steps)) >= 3
