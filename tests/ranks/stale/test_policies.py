"""Every policy through whole fits, with ranks that are slow: what must hold whatever the timing."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.stale.policies import Buffered, Quorum
from lightning_hetero.stale.decide.policy import Saps
from tests.ranks.data.indexed import indexed
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, rank_trainer, single, stale, weights
from tests.ranks.stale.models import Counted, Indexed

pytestmark = pytest.mark.ranks
SAMPLES, BATCH, EPOCHS = 110, 24, 6
# Low: when the machine is busy some updates are the mean of a few samples only, at full worth, hence noisy.
LR = 0.01
TICKS = 5


class Slow(Callback):
    """The ranks take ``sample_s`` for each sample, in fill-ins, too, and the last of them eight times as long."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        times = 8 if trainer.global_rank == trainer.world_size - 1 else 1
        time.sleep(times * self.sample_s * (trainer.strategy.current_samples() or 0))


class Spans(Callback):
    """What the server says is applied, at the end of each epoch; and that all ranks hold the same weights then."""

    def __init__(self) -> None:
        self.applied: list[list[list[int]]] = []
        self.version: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.strategy._run.worker.state()
        self.applied.append(state["coordinator"]["applied"])
        self.version.append(state["version"])


class Scheduled(Indexed):
    """Stepped every step by Lightning."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def mean_loss(trained: Weights) -> float:
    model = Toy()
    model.load_state_dict(trained)
    _, x, y = indexed(SAMPLES).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model.net(x), y))


class Result:
    """What a rank saw."""

    def __init__(self, module: Indexed, trainer: Any, counted: Counted, spans: Spans) -> None:
        self.weights = weights(module)
        self.seen: list[int] = [i for batch in module.seen for i in batch]  # type: ignore[misc]
        self.step = trainer.global_step
        self.lr = [group["lr"] for o in trainer.optimizers for group in o.param_groups]
        self.metrics = counted.epochs
        self.applied, self.version = spans.applied, spans.version


def job(
    rank: int, world: int, policy: Any, sample_s: float, epochs: int, trainer: dict[str, Any]
) -> Result:
    module, counted, spans = Scheduled(), Counted(), Spans()
    callbacks = [counted, spans, Slow(sample_s)]
    fit = rank_trainer(rank, world, stale(policy=policy), callbacks=callbacks, max_epochs=epochs, **trainer)
    fit.fit(module, DataLoader(indexed(SAMPLES), batch_size=BATCH // world, shuffle=True))
    return Result(module, fit, counted, spans)


def check(
    results: list[Result],
    oracle: Weights,
    *,
    steps: int,
    lr: float,
    bound: int | None = None,
) -> None:
    """Asserts what holds whatever the timing.

    Args:
        oracle: what a single process trains.
        bound: versions that an applied contribution may be old.
    """
    epochs = len(results[0].metrics)
    first, untrained = results[0], mean_loss(weights(Toy()))
    for result in results:
        assert result.step == steps
        assert result.lr == pytest.approx([lr] * len(result.lr), rel=1e-12)
        assert all(torch.equal(result.weights[k], v) for k, v in first.weights.items())
        assert result.metrics == first.metrics
        assert result.version == first.version and result.applied == first.applied
    fallen, expected = (untrained - mean_loss(w) for w in (first.weights, oracle))
    # Staleness and smaller updates cost something; the rest is the same recipe.
    assert fallen > 0.5 * expected > 0.02
    metrics = first.metrics[-1]
    accepted = sum(metrics["samples"].values())
    assert first.applied == [[[0, SAMPLES]]] * epochs
    assert accepted == epochs * SAMPLES
    seen = Counter(i for result in results for i in result.seen)
    assert sum(seen.values()) == accepted  # the module's lists forget what was wasted, see `fit.parts`
    assert all(seen[i] == epochs for i in range(SAMPLES))
    if bound is not None:
        assert max(map(int, metrics["staleness"])) <= bound


def trained_alone(epochs: int, **trainer: Any) -> Weights:
    module = Scheduled()
    single(module, indexed(SAMPLES), BATCH, max_epochs=epochs, **trainer)
    return weights(module)


POLICIES: dict[str, tuple[Any, int | None]] = {
    "saps": (Saps(threshold=3, bound=6), 6),
    "asp": ("asp", None),
    "ssp": ("ssp", None),
    "bsp": ("bsp", 0),
    "buffered": (Buffered(k=2), 2),
    "quorum": (Quorum(), 2),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.short("saps", "quorum")
def test_every_policy_trains(name: str) -> None:
    policy, bound = POLICIES[name]
    results = run_ranks(3, job, policy, 2e-4, EPOCHS, {})
    oracle = trained_alone(EPOCHS)
    check(results, oracle, steps=EPOCHS * TICKS, lr=LR * 0.99 ** (EPOCHS * TICKS), bound=bound)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, TICKS), (3, 2)], ids=["plain", "accumulation"])  # per epoch
def test_a_rank_eight_times_slower(accumulate: int, steps: int) -> None:
    """Steps, schedules and samples are those of equal ranks; the slow one has less of the work."""
    epochs = EPOCHS * accumulate
    options = {"accumulate_grad_batches": accumulate} if accumulate > 1 else {}
    results = run_ranks(3, job, "flexible", 5e-4, epochs, options)
    oracle = trained_alone(epochs, **options)
    check(results, oracle, steps=epochs * steps, lr=LR * 0.99 ** (epochs * steps), bound=2)
    shares = results[0].metrics[-1]["samples"]
    assert shares.get("2", 0) < min(shares["0"], shares["1"])
