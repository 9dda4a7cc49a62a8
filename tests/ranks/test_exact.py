"""Mathematics: uneven, ever-changing shares train the weights of one process with the global batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero.balanced.weighting import LossWeight
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES, Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH, EPOCHS = 400, 16, 4  # 100 steps
EXACT = 1e-12
TOKENS = 5


class Watch(Callback):
    """Notes the shares of every batch and that hooks see the loss ``training_step`` returned."""

    def __init__(self) -> None:
        self.samples: list[int | None] = []
        self.hook_losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(trainer.strategy.current_samples())

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.hook_losses.append(float(loss))


# ---- models: each is right for one process and changes one thing -------------------------------------------


class Groups(Toy):
    """Two parameter groups and a scheduler stepped every step."""

    def configure_optimizers(self) -> Any:
        first, _, last = self.net.children()
        groups = [{"params": first.parameters(), "lr": 3e-3}, {"params": last.parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoHeads(Toy):
    """Uses its heads in turns, so that every step leaves parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.heads = nn.ModuleList(nn.Linear(16, 1, dtype=torch.float64) for _ in range(2))
        self.net = self.net[:2]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.heads[batch_idx % 2](self.net(x)), y)


class Gan(Toy):
    """Manual optimization: two optimizers, each toggled, two backward passes per step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(6)
        self.judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        maker, judge = self.optimizers()  # type: ignore[misc]
        logits = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(maker)
        fooled = self.judge(self.net(x))
        self.manual_backward(logits(fooled, torch.ones_like(fooled)))
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        real, fake = self.judge(y), self.judge(self.net(x).detach())
        self.manual_backward(logits(real, torch.ones_like(real)) + logits(fake, torch.zeros_like(fake)))
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.SGD(self.judge.parameters(), 1e-2)]


class Accumulating(Toy):
    """Manual optimization that accumulates three batches, without synchronising the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        steps = batch_idx % 3 == 2
        no_sync = getattr(self.trainer.model, "no_sync", nullcontext)
        with nullcontext() if steps else no_sync():
            self.manual_backward(self.loss(batch) / 3)
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class Manual(Toy):
    """Manual optimization at its plainest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _summed(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _summed(grad)


def _summed(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


class SyncNorm(nn.Module):
    """Normalises with the statistics of all ranks' samples, differentiably (torch's own wants CUDA)."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])])
        if dist.is_initialized():
            sums = _Sum.apply(sums)
        n = x.shape[1]
        mean = sums[:n] / sums[-1]
        return (x - mean) / (sums[n : 2 * n] / sums[-1] - mean**2 + 1e-5).sqrt()


class Normed(Toy):
    """Batch statistics couple the ranks; behind them an in-place activation, as in every ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], SyncNorm(), nn.ReLU(inplace=True), self.net[2])

    def configure_optimizers(self) -> Any:
        # Not Adam: the first bias has gradient 0, and Adam would make steps out of its rounding error.
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Tokens(Toy):
    """Mean over the tokens of variable-length sequences, NaN for a batch without any."""

    def loss(self, batch: Any) -> Tensor:
        x, y, present = batch
        wrong = (self.net(x).squeeze(-1) - y) ** 2
        return (wrong * present).sum() / present.sum()


class TokensByMethod(Tokens):
    def batch_weight(self, batch: Any) -> float:
        return tokens_of(batch)


class SumLoss(Toy):
    """A sum over the batch, divided by ``of``: what stock DDP makes of it on that many ranks."""

    def __init__(self, of: int = 1) -> None:
        super().__init__(lr=1e-3)
        self.of = of

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0]) / self.of


class PoisonedDummy(Toy):
    """Gives NaN on a batch that does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dummy = getattr(self.trainer.strategy, "current_samples", lambda: None)() == 0
        return loss * float("nan") if dummy else loss


class Newton(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class OwnSampler(DistributedSampler):
    """A subclass is taken as it is: rank r keeps its own samples when shares are equal."""


def tokens_of(batch: Any) -> float:
    return float(batch[2].sum())


def sequences() -> TensorDataset:
    """Sequences of 0 to 5 tokens; every fifth is empty."""
    g = torch.Generator().manual_seed(8)
    x = torch.randn(SAMPLES, TOKENS, FEATURES, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES,), generator=g)
    lengths[::5] = 0
    return TensorDataset(x, x.sum(-1).sin(), (torch.arange(TOKENS) < lengths[:, None]).double())


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
    assert len(steps) >= 96
    assert len({losses[0] for _, _, losses in outcomes}) > 1, "every rank had the same samples"
    assert len(set(steps)) >= 5, "the shares have not changed, so the test proves nothing"
    return outcomes


# ---- tests --------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[int, Any, dict[str, Any], dict[str, Any]]] = {
    "four ranks": (4, Toy, {}, {}),
    "accumulation, last window incomplete": (2, Toy, {}, {"accumulate_grad_batches": 3}),
    "clipping by norm": (2, Toy, {}, {"gradient_clip_val": 0.05}),
    "clipping by value": (2, Toy, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "two optimizers": (2, Gan, {"find_unused_parameters": True}, {}),
    "manual accumulation under no_sync": (2, Accumulating, {}, {"max_epochs": 5}),
    "parameters used in turns": (2, TwoHeads, {"find_unused_parameters": True}, {}),
    "static graph": (2, Toy, {"static_graph": True}, {}),
    "static graph, manual": (2, Manual, {"static_graph": True}, {}),
    "gradients as views of buckets": (2, Toy, {"gradient_as_bucket_view": True}, {}),
    "groups and scheduler": (2, Groups, {}, {}),
    "communication hook": (2, Toy, {"ddp_comm_hook": allreduce_hook}, {}),
    "batch norm over ranks": (2, Normed, {"waiting_modules": (SyncNorm,)}, {}),
    "no samples, NaN": (4, PoisonedDummy, {"min_samples": 0}, {}),
}


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
        assert len(hook_losses) == 100
        assert len(set(samples)) >= 5


def test_tail_smaller_than_the_world() -> None:
    """The last batch of each epoch has 2 samples for 4 ranks: two ranks train on a dummy of weight 0."""
    outcomes = check(4, PoisonedDummy, data=regression(6 * BATCH + 2), max_epochs=14)
    assert sorted(samples[6] for _, samples, _ in outcomes) == [0, 0, 1, 1]


@pytest.mark.parametrize("by_method", [True, False], ids=["method", "argument"])
def test_mean_over_tokens(by_method: bool) -> None:
    """Some ranks get sequences without a single token: their NaN counts nothing."""
    make, args = (TokensByMethod, {}) if by_method else (Tokens, {"batch_weight": tokens_of})
    outcomes = check(4, make, args, data=sequences(), oracle=Tokens)
    assert any(loss != loss for _, _, losses in outcomes for loss in losses), "no rank was without tokens"


def test_sum_loss_keeps_the_recipe_of_ddp() -> None:
    """DDP divides a summed loss by the number of ranks: 1/W of the sum over the global batch."""
    check(2, SumLoss, {"loss_reduction": "sum"}, oracle=lambda: SumLoss(of=2))


def test_batch_too_large_for_the_devices_is_accumulated() -> None:
    """Three micro-batches per global batch; the oracle takes it at once. Each epoch ends with a tail of 7."""
    data = regression(19 * BATCH + 7)
    outcomes = check(2, Toy, {"max_samples": 3}, data=data, max_epochs=5)
    assert len(outcomes[0][1]) == 5 * (19 * 3 + 2)


def unweighted(rank: int, world: int) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossWeight, "factor", lambda self: 1.0)
        return fitted(rank, world, Toy(), regression(SAMPLES), balanced())


def test_unweighted_uneven_shares_would_be_biased() -> None:
    """What a sampler alone would train; were it as good, the other tests could not fail."""
    trained, _, _ = run_ranks(2, unweighted)[0]
    expected = Toy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    assert trained.distance(weights(expected)) > 1e-3


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


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_as_close_as_an_equal_split(precision: str) -> None:
    expected = Toy(torch.float32)
    data = regression(SAMPLES, dtype=torch.float32)
    single(expected, data, BATCH, max_epochs=EPOCHS, plugins=[mixed(precision)])
    ours, stock = run_ranks(2, in_precision, precision)[0]
    apart = stock.distance(weights(expected))
    assert 1e-5 < apart < 0.1
    assert ours.distance(weights(expected)) <= 3 * apart


def newton(rank: int, world: int) -> None:
    fitted(rank, world, Newton(), regression(32), balanced())


def test_lbfgs_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=r"LBFGS decides from the loss.*use one device or another optimizer"):
        run_ranks(2, newton)
