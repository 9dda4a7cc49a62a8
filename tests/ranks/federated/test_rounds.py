"""A fit inside Lightning: counters, validation, logs and stops agree on all ranks, whoever rests; nothing hangs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset
from torchmetrics import MeanMetric

from lightning_hetero import StragglerMonitor
from lightning_hetero.federated.decide.policy import AdaptiveSteps, Measured
from lightning_hetero.federated.decide.rounds import RoundPlan
from lightning_hetero.federated.policy import FedAvg
from lightning_hetero.shares.policy import ShareDecision
from tests.ranks.federated.kit import EXACT, Plain, Scripted, by_hand, chunks, data, federated, fit, own
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, weights

BATCH = 4
PARTS = (range(0, 32), range(32, 64))  # 8 batches each
VAL = (0, 1, 2, 3, 4, 5, 6)


class Notes(Callback):
    """Notes what others see at a batch's end: weights, the step, who trained."""

    def __init__(self) -> None:
        self.at_end: list[Weights] = []
        self.steps: list[int] = []
        self.logged: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at_end.append(weights(pl_module.net))
        self.steps.append(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def validating(rank: int, world: int, options: dict[str, Any], strategy: dict[str, Any]) -> Any:
    notes = Notes()
    loaders = own(PARTS[rank], BATCH), DataLoader(Subset(data(), VAL), batch_size=3)
    module, trainer = fit(rank, world, federated(**strategy), loaders, callbacks=[notes], **options)
    return module.validated, notes, trainer.global_step, weights(module)


@pytest.mark.parametrize(
    ("options", "strategy", "validations"),
    [
        ({}, {}, 1),
        ({"val_check_interval": 2}, {"local_steps": 4}, 4),  # every other one within a round
        ({"val_check_interval": 0.5, "max_epochs": 2}, {"local_steps": 3}, 4),
        ({"max_steps": 5, "val_check_interval": 5}, {"local_steps": 2}, 1),
    ],
)
def test_validation_sees_the_same_average_on_all_ranks(
    options: dict[str, Any], strategy: dict[str, Any], validations: int
) -> None:
    first, second = run_ranks(2, validating, options, strategy)
    assert len(first[0]) == len(second[0]) == validations
    for mine, other in zip(first[0], second[0], strict=True):
        assert mine.distance(other) == 0.0
    assert first[3].distance(second[3]) == 0.0  # and so are the last ones
    assert first[2] == second[2] == options.get("max_steps", 8 * options.get("max_epochs", 1))
    assert first[1].logged["val"] == second[1].logged["val"]


def test_ranks_are_apart_within_a_round_and_together_behind_it() -> None:
    first, second = run_ranks(2, validating, {}, {"local_steps": 3})
    apart = [a.distance(b) for a, b in zip(first[1].at_end, second[1].at_end, strict=True)]
    assert [d == 0.0 for d in apart] == [False, False, True, False, False, True, False, True]
    assert first[1].steps == second[1].steps == list(range(1, 9))


# ---- resting ranks, each way ---------------------------------------------------------------------------------


class Fixed(AdaptiveSteps):
    """Three times as many steps on rank 0, whatever was measured."""

    def decide(self, measured: list[Measured]) -> ShareDecision | None:  # type: ignore[override]
        super().decide(measured)
        self._resumed = (3, 1)
        return ShareDecision(shares=self._resumed, changed=True, reason="fixed")


class Metered(Plain):
    """Logs a metric object and a mean per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen_mean(batch[0].double())
        self.log("seen_mean", self.seen_mean, on_epoch=True, on_step=False, batch_size=len(batch[0]))
        self.log("index", batch[0].double().mean(), sync_dist=True, on_epoch=True, on_step=False,
                 batch_size=len(batch[0]))  # fmt: skip
        return loss


def resting(rank: int, world: int, strategy: dict[str, Any], options: dict[str, Any], lengths: tuple[int, ...]) -> Any:
    notes, starts = Notes(), [sum(lengths[:r]) for r in range(world)]
    loader = own(range(starts[rank], starts[rank] + lengths[rank]), BATCH)
    module, trainer = fit(
        rank, world, federated(**strategy), loader, module=Metered(), callbacks=[notes], **options
    )
    return weights(module), module.batches, notes, trainer.global_step


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "through at different times": ({"local_steps": 2}, {}, (32, 8)),
    "through, accumulating": ({"local_steps": 1}, {"accumulate_grad_batches": 3}, (28, 12)),
    "more steps on a fast device": ({"policy": Fixed(), "local_steps": 2}, {"max_epochs": 2}, (32, 32)),
    "limited batches": ({"local_steps": 2}, {"limit_train_batches": 3}, (32, 8)),
    "step limit": ({"local_steps": 3}, {"max_steps": 7}, (32, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_rest_neither_hang_nor_count(name: str) -> None:
    strategy, options, lengths = CASES[name]
    (first, mine, notes, steps), (second, others, also, as_many) = run_ranks(
        2, resting, strategy, options, lengths
    )
    assert first.distance(second) == 0.0 and steps == as_many and notes.steps == also.steps
    assert len(mine) != len(others)
    assert set(chain.from_iterable(mine)) <= set(range(lengths[0]))
    assert set(chain.from_iterable(others)) <= set(range(lengths[0], sum(lengths)))
    assert notes.logged["index"] == also.logged["index"] and notes.logged["seen_mean"] == also.logged["seen_mean"]
    if options.get("max_epochs", 1) == 1:
        seen = [i for batch in (*mine, *others) for i in batch]
        assert notes.logged["index"] == pytest.approx(sum(seen) / len(seen))  # a mean over samples
        assert notes.logged["seen_mean"] == pytest.approx(sum(seen) / len(seen))


# ---- sizes, measurements, callbacks ------------------------------------------------------------------------


def resized(rank: int, world: int, workers: int) -> Any:
    monitor = StragglerMonitor()
    extra = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    strategy = federated(policy=Scripted(), local_steps=2)
    module, trainer = fit(rank, world, strategy, own(PARTS[rank], BATCH, **extra), callbacks=[monitor], max_epochs=2)
    sizes, kept = [len(batch) for batch in module.batches], trainer.strategy
    return sizes, kept.shares, kept.global_batch_size, module.batches, weights(module)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_resized_from_round_to_round(workers: int) -> None:
    (first, shares, total, mine, w1), (second, _, _, others, w2) = run_ranks(2, resized, workers)
    assert len(first) == len(second) == 16 and total == 8 and sum(shares) == 8
    assert w1.distance(w2) == 0.0
    assert set(first) > {4} and set(second) > {4}
    if not workers:  # else batches that were fetched ahead keep their size
        assert first == [4, 4, 6, 6, 7, 7, 5, 5, 6, 6, 7, 7, 5, 5, 6, 6]
        assert [a + b for a, b in zip(first, second, strict=True)] == [8] * 16
    flat = list(chain.from_iterable(mine))
    assert sorted(flat[:32]) == list(range(32)) and set(chain.from_iterable(others)) <= set(range(32, 64))


class Stepwise(Plain):
    """A scheduler that moves with every optimizer step; notes the rate it is given."""

    rates: list[float]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def scheduled(rank: int, world: int, policy: str) -> tuple[float, int]:
    lengths = (32, 8)
    loader = own(range(32 * rank, 32 * rank + lengths[rank]), BATCH)
    _, trainer = fit(rank, world, federated(policy=policy), loader, module=Stepwise())
    return trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step


@pytest.mark.parametrize("policy", ["fedavg", "scaled_lr", "adaptive_steps"])
def test_schedulers_move_with_global_step_on_all_ranks(policy: str) -> None:
    assert run_ranks(2, scheduled, policy) == [(pytest.approx(0.05 * 0.9**8), 8)] * 2


class ScaledRates(Scripted):
    @property
    def plan(self) -> RoundPlan:
        plan = super().plan
        return replace(plan, lr_factors=tuple(size / own for size, own in zip(plan.sizes, self._own, strict=True)))


def rates(rank: int, world: int) -> list[float]:
    found: list[float] = []

    class Rated(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda o, *_: found.append(o.param_groups[0]["lr"] / 0.05))
            return optimizer

    fit(rank, world, federated(policy=ScaledRates()), own(PARTS[rank], BATCH), module=Rated())
    return found


def test_a_scaled_rate_holds_in_local_steps_only() -> None:
    first, second = run_ranks(2, rates)
    assert first == pytest.approx([1, 1, 1.5, 1.5, 1.75, 1.75, 1.25, 1.25])
    assert second == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25, 0.75, 0.75])


class ByHandSteps(Plain):
    """Manual optimization, two steps per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[1:]))
            optimizer.step()


def manual(rank: int, world: int) -> tuple[Weights, int]:
    strategy = federated(policy=FedAvg(again=True))
    module, trainer = fit(rank, world, strategy, own(PARTS[rank], BATCH), module=ByHandSteps())
    return weights(module), trainer.global_step


def test_manual_optimization_is_averaged_by_batches() -> None:
    (first, steps), (second, as_many) = run_ranks(2, manual)
    clients = [[batch for batch in chunks(part, BATCH) for _ in range(2)] for part in PARTS]
    assert first.distance(by_hand(clients, 4)) <= EXACT and first.distance(second) == 0.0 and steps == as_many == 16


def moving(rank: int, world: int) -> tuple[Weights, Weights, Weights]:
    average = EMAWeightAveraging(decay=0.5)
    module, _ = fit(rank, world, federated(local_steps=3), own(PARTS[rank], BATCH), callbacks=[average])
    kept: Any = average._average_model
    return weights(module), weights(kept.module), weights(Plain())


def test_averaged_weights_are_averaged_over_ranks_too() -> None:
    (first, kept, start), (second, also, _) = run_ranks(2, moving)
    assert first.distance(second) == 0.0 and kept.distance(also) == 0.0 and kept.distance(start) > 1e-4


class OwnBatchSampler(BatchSampler):
    pass


def by_batch_sampler(rank: int, world: int) -> list[list[int]]:
    mine = Subset(data(), list(PARTS[rank]))
    loader = DataLoader(mine, batch_sampler=OwnBatchSampler(SequentialSampler(mine), 5, True))
    return fit(rank, world, federated(), loader)[0].batches


def test_a_batch_sampler_of_the_users_stays() -> None:
    for batches, part in zip(run_ranks(2, by_batch_sampler), PARTS, strict=True):
        assert batches == chunks(part, 5)[:6]
