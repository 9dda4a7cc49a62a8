"""A rank that runs out of memory loses nothing: the weights are those of one process that has enough."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_hetero import LoadBalancedStrategy
from tests.ranks.balanced.memory_kit import BATCH, EPOCHS, EXACT, SAMPLES, Count, Limits, Outcome, Wall, fitted
from tests.ranks.exact_models import Manual, SumLoss, Tokens, TwoHeads, sequences, tokens_of
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, single, weights


def job(
    rank: int, world: int, make: Any, where: str, limits: Limits, args: dict[str, Any], trainer: dict[str, Any]
) -> Outcome:
    module = make()
    wall = Wall(module, where, limits.get(rank))
    data = sequences(SAMPLES) if isinstance(module, Tokens) else None
    fit, samples, told = fitted(rank, world, module, balanced(**args), data, **trainer)
    logged = {k: float(v) for k, v in fit.callback_metrics.items()}
    return weights(module), samples, wall.failures, told, logged


@cache
def with_memory(job: Any, *args: Any) -> list[Any]:
    """What several tests compare with: the same job where memory never ends."""
    return run_ranks(2, job, *args, None)


class Twice(Toy):
    """Uses each parameter twice."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x) + self.net(-2 * x), y)


class Hooked(Toy):
    """A hook on a parameter changes whole gradients, not those of pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda g: 2 * g)


class Dict(Toy):
    """Returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "rows": batch[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["rows"].shape == batch[0].shape and not outputs["rows"].requires_grad


class OwnBackward(Toy):
    """A backward pass that is no plain one."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3 * loss).backward()


class Checkpointed(Toy):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(checkpoint(self.net, x, use_reentrant=False), y)


class Cublas(Toy):
    """Memory is short where cuBLAS wants it, which has words of its own for that."""

    def lack(self, text: str) -> Exception:
        return RuntimeError(f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`: {text}")


CASES: dict[str, tuple[Any, str, Limits, dict[str, Any], dict[str, Any]]] = {
    "forward, all ranks": (Toy, "forward", {0: 3, 1: 4}, {}, {}),
    "forward, accumulation, clipping": (
        Toy, "forward", {1: 4}, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "forward, accumulation, views of buckets": (
        Toy, "forward", {1: 4}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002},
        {"accumulate_grad_batches": 3}),
    "forward, parameters in turns": (TwoHeads, "forward", {1: 4}, {"find_unused_parameters": True}, {}),
    "forward, sum": (SumLoss, "forward", {1: 4}, {"loss_reduction": "sum"}, {}),
    "forward, dict": (Dict, "forward", {1: 4}, {}, {}),
    "forward, for cuBLAS": (Cublas, "forward", {1: 4}, {}, {}),
    "forward, checkpointed activations": (Checkpointed, "forward", {1: 4}, {}, {}),
    "backward": (Toy, "backward", {1: 4}, {}, {}),
    "backward, all ranks, small buckets": (Toy, "backward", {0: 3, 1: 4}, {"bucket_cap_mb": 0.0002}, {}),
    "backward, accumulation, clipping": (
        Toy, "backward", {1: 4}, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "backward, gradients as views of buckets": (
        Toy, "backward", {1: 4}, {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 3}),
    "backward, parameters used twice": (Twice, "backward", {1: 4}, {}, {}),
    "backward, tokens": (Tokens, "backward", {1: 4}, {"batch_weight": tokens_of}, {}),
    "backward, hook on a parameter": (Hooked, "backward", {1: 4}, {}, {}),
    "backward, of the user's own": (OwnBackward, "backward", {1: 4}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str) -> None:
    make, where, limits, args, trainer = CASES[name]
    outcomes = run_ranks(2, job, make, where, limits, args, trainer)
    expected = make(2) if make is SumLoss else make()
    data = sequences(SAMPLES) if make is Tokens else regression(SAMPLES)
    single(expected, data, BATCH, **{"max_epochs": EPOCHS, **trainer})
    for rank, (trained, samples, failures, told, _) in enumerate(outcomes):
        assert trained.distance(weights(expected)) <= EXACT
        if rank in limits:
            assert failures >= 1 and max(samples) > limits[rank]
            assert len(told) == 1 and f"rank {rank} ran out of memory" in told[0] and "Nothing is lost" in told[0]
        else:
            assert not failures and not told
    assert len({tuple(samples) for _, samples, *_ in outcomes}) == 2


# ---- without an argument --------------------------------------------------------------------------------------

MEASURED = 136  # samples of runs whose shares come from measured speeds


class Outside(Toy):
    """What a user may write."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        if self.global_rank == 1 and self.trainer.world_size > 1 and len(x) > 5:
            self.seen.append([float(len(x))])
            raise torch.OutOfMemoryError
        return super().training_step(batch, batch_idx)


def default_job(rank: int, world: int) -> tuple[Weights, tuple[int, ...], list[int], int, list[str]]:
    module = Outside()
    strategy = LoadBalancedStrategy()
    _, samples, told = fitted(rank, world, module, strategy, regression(MEASURED))
    return weights(module), strategy.shares, samples, len(module.seen), told


def test_by_default_a_rank_gets_what_it_holds_from_the_next_batches_on() -> None:
    outcomes = run_ranks(2, default_job)
    expected = Outside()
    single(expected, regression(MEASURED), BATCH, max_epochs=EPOCHS)
    for trained, shares, *_ in outcomes:
        assert trained.distance(weights(expected)) <= EXACT
        assert 1 <= shares[1] <= 6 and sum(shares) == BATCH  # 6 fails: it may be the next to be tried
    _, _, samples, failures, told = outcomes[1]
    # Until the next exchange, some steps away by their time, it keeps a share of 6 and computes it in pieces.
    assert samples[0] == 8 and max(samples[-4:]) <= 6
    assert 1 <= failures <= 3, "it knows what does not fit and does not try it"
    assert "OutOfMemoryError" in told[0] and len(told) == 1
    assert outcomes[0][3:] == (0, [])


class OwnBatches(BatchSampler):
    """Whose batches are not divided by speed."""


def equal_job(rank: int, world: int, where: str, limit: int | None) -> tuple[Weights, int, list[str]]:
    module, data = Toy(), regression(SAMPLES)
    wall = Wall(module, where, limit if rank == 1 else None)
    loader = DataLoader(data, batch_sampler=OwnBatches(SequentialSampler(data), BATCH // world, drop_last=False))
    trainer = rank_trainer(rank, world, LoadBalancedStrategy(), max_epochs=EPOCHS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    return weights(module), wall.failures, [str(w.message) for w in caught if "out of memory" in str(w.message)]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batches_that_are_not_divided_are_cut_where_they_do_not_fit(where: str) -> None:
    short, enough = run_ranks(2, equal_job, where, 4), with_memory(equal_job, "forward")
    assert short[0][0].distance(enough[0][0]) <= EXACT and short[1][0].distance(enough[0][0]) <= EXACT
    assert [failures for _, failures, _ in short] == [0, 1] and len(short[1][2]) == 1


PLANNED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "accumulation, clipping": (Toy, {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "parameters in turns": (TwoHeads, {"find_unused_parameters": True}, {}),
    "tokens": (Tokens, {"batch_weight": tokens_of}, {}),
    "dict": (Dict, {}, {}),
}


@pytest.mark.parametrize("name", PLANNED)
def test_pieces_that_are_planned(name: str) -> None:
    """`max_samples` is less than the parts: weights are one process's, and no step is tried in vain."""
    make, args, trainer = PLANNED[name]
    outcomes = run_ranks(2, job, make, "forward", {0: 3, 1: 3}, {**args, "max_samples": 3}, trainer)
    expected = make(2) if make is SumLoss else make()
    data = sequences(SAMPLES) if make is Tokens else regression(SAMPLES)
    single(expected, data, BATCH, **{"max_epochs": EPOCHS, **trainer})
    for trained, samples, failures, told, _ in outcomes:
        assert trained.distance(weights(expected)) <= EXACT
        assert max(samples) > 3 and not failures and not told


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_planned_pieces_that_do_not_fit_are_cut_again(where: str) -> None:
    outcomes = run_ranks(2, job, Toy, where, {1: 2}, {"max_samples": 3}, {})
    expected = Toy()
    single(expected, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    for rank, (trained, _, failures, told, _) in enumerate(outcomes):
        assert trained.distance(weights(expected)) <= EXACT
        assert bool(failures) == bool(told) == (rank == 1)


# ---- what else a step leaves ----------------------------------------------------------------------------------


class Logs(Toy):
    """Logs in each way there is; `rows` are counted by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torchmetrics.SumMetric()
        self.steps: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        self.log("early", x.mean(), on_step=False, on_epoch=True, sync_dist=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", x.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("smallest", x.min(), reduce_fx="min", on_step=False, on_epoch=True, sync_dist=True)
        self.log("total", x.sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.rows(torch.full((len(x),), 1.0))
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(float(self.trainer.callback_metrics["loss_step"]))


def logs_job(rank: int, world: int, where: str, limit: int | None) -> tuple[dict[str, float], list[float], int]:
    module = Logs()
    wall = Wall(module, where, limit if rank == 1 else None)
    fit, _, _ = fitted(rank, world, module, balanced())
    return {k: float(v) for k, v in fit.callback_metrics.items()}, module.steps, wall.failures


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_logged_values_are_those_of_whole_batches(where: str) -> None:
    short, enough = run_ranks(2, logs_job, where, 4), with_memory(logs_job, "forward")
    assert short[1][2] and not enough[1][2]
    names = ["loss_step", "loss_epoch", "largest", "smallest", "total", "rows", "early"]
    for mine, theirs in zip(short, enough, strict=True):
        assert {k: mine[0][k] for k in names} == pytest.approx({k: theirs[0][k] for k in names}, rel=1e-12)
        assert mine[1] == pytest.approx(theirs[1], rel=1e-12)
    assert short[0][0]["rows"] == SAMPLES


class Noisy(Toy):
    """Draws before and behind the wall, and has BatchNorm in front of it."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.net = nn.Sequential(nn.Sequential(self.net[0], norm), self.net[1], nn.Dropout(0.5), self.net[2])
        self.norm, self.drawn, self.at = norm, list[tuple[int, float, int]](), at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        size = len(batch[0])
        self.drawn.append((batch_idx, float(torch.rand(1)), size))
        if batch_idx == self.at and self.global_rank == 0:
            self.net(batch[0])
            self.at = None
            raise torch.OutOfMemoryError("a neighbour")
        return super().training_step(batch, batch_idx)


def noisy_job(rank: int, world: int, limit: int | None, at: int | None) -> tuple[list[tuple[int, float, int]], int]:
    module = Noisy(at)
    Wall(module, "forward", limit if rank == 0 else None)  # whose BatchNorm is everybody's
    fitted(rank, world, module, balanced(rebalance=False, policy=None), max_epochs=1, limit_train_batches=4)
    return module.drawn, int(module.norm.num_batches_tracked)


def test_what_a_failed_try_has_drawn_and_counted_is_put_back() -> None:
    drawn, counted = run_ranks(2, noisy_job, 4, None)[0]
    known = [(batch, 4) for batch in (1, 1, 2, 2, 3, 3)]
    assert [(batch, size) for batch, _, size in drawn] == [(0, 8), (0, 4), (0, 4), *known]
    assert drawn[1][1] == drawn[0][1], "the first piece draws what the failed try has drawn"
    assert len({value for _, value, _ in drawn}) == len(drawn) - 1, "pieces draw numbers of their own"
    assert counted == 8, "a piece is a batch to BatchNorm"


# ---- in mixed precision ---------------------------------------------------------------------------------------


def mixed_job(rank: int, world: int, precision: str, where: str, limit: int | None) -> Weights:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, device="cpu", scaler=scaler)  # type: ignore[arg-type]
    module = Toy(torch.float32)
    wall = Wall(module, where, limit if rank == 1 else None)
    fitted(rank, world, module, balanced(precision_plugin=plugin), regression(SAMPLES, dtype=torch.float32))
    assert bool(wall.failures) == (limit is not None and rank == 1)
    return weights(module)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.short("forward-bf16-mixed", "backward-16-mixed")
def test_mixed_precision(precision: str, where: str) -> None:
    short, enough = run_ranks(2, mixed_job, precision, where, 4)[0], with_memory(mixed_job, precision, "forward")[0]
    exact = Toy(torch.float32)
    single(exact, regression(SAMPLES, dtype=torch.float32), BATCH, max_epochs=EPOCHS)
    error = enough.distance(weights(exact))
    assert short.distance(weights(exact)) <= 3 * error + 1e-6 < 0.1


# ---- resume ---------------------------------------------------------------------------------------------------


def resume_job(rank: int, world: int) -> tuple[Weights, list[int], int, int]:
    module = Toy()
    wall = Wall(module, "forward", {1: 5}.get(rank))
    fit, _, _ = fitted(rank, world, module, balanced(policy=None), regression(MEASURED))
    fit.save_checkpoint("half.ckpt")
    first, wall.failures = wall.failures, 0
    module, strategy = Toy(), balanced(policy=None)
    wall = Wall(module, "forward", {1: 5}.get(rank))
    count = Count()
    second = rank_trainer(rank, world, strategy, callbacks=[count], max_epochs=2)
    second.fit(module, DataLoader(regression(MEASURED), batch_size=BATCH // world, shuffle=True), ckpt_path="half.ckpt")
    return weights(module), count.samples, first, wall.failures


def test_a_resumed_run_knows_what_its_ranks_hold() -> None:
    outcomes = run_ranks(2, resume_job)
    expected = Toy()
    single(expected, regression(MEASURED), BATCH, max_epochs=2)
    assert all(trained.distance(weights(expected)) <= EXACT for trained, *_ in outcomes)
    _, samples, first, again = outcomes[1]
    assert first >= 1 and again <= 1
    assert max(samples) <= 6  # which fails, and is tried once if measured speeds ask for it


# ---- what smaller pieces do not cure --------------------------------------------------------------------------


class Talks(Toy):
    """Asks the others how they are, before or behind the wall."""

    def __init__(self, first: bool = True) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.first:
            self.all_gather(torch.zeros(1))
        loss = self.loss(batch)
        self.all_gather(loss.detach())
        return loss


class TalksLater(Talks):
    def __init__(self) -> None:
        super().__init__(first=False)


class Whole(Toy):
    """Its batches have a part that nobody can cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, torch.zeros(len(batch[0]) + 1)] if self.trainer.training else batch


class Nccl(Toy):
    """Memory is short where NCCL makes its communicator, in the midst of a collective."""

    def lack(self, text: str) -> Exception:
        return torch.distributed.DistBackendError(f"{text}: NCCL error in: ..., Cuda failure 2 'out of memory'")


class Reentrant(Toy):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = checkpoint(self.net[:2], x.requires_grad_(), use_reentrant=True)
        return nn.functional.mse_loss(self.net[2](hidden), y)


INCURABLE: dict[str, tuple[Any, str, int, dict[str, Any], str]] = {
    "one sample": (Toy, "forward", 0, {}, "1 sample cannot be divided any further"),
    "talked before": (Talks, "forward", 4, {}, "training_step had already communicated with the other ranks"),
    "talks in pieces": (TalksLater, "forward", 4, {}, "once per piece on this rank and once on the others"),
    "no way to cut": (Whole, "forward", 4, {}, "it is not known which dimension is that of the samples"),
    "one sample, backward": (Toy, "backward", 0, {}, "1 sample cannot be divided any further"),
    "static graph, first backward": (Toy, "backward", 4, {"static_graph": True}, "learns from the first backward pass"),
    "reentrant checkpoints": (Reentrant, "forward", 4, {}, "use_reentrant=False"),
    "in a collective, backward": (Nccl, "backward", 4, {}, "in a collective, which this rank cannot begin again"),
    "manual optimization": (Manual, "forward", 4, {}, "no room for 8 rows"),
}


def incurable_job(rank: int, world: int) -> dict[str, str]:
    """Every rank fails alike, so that none waits for another and one job does for all cases."""
    told: dict[str, str] = {}
    for name, (make, where, limit, args, _) in INCURABLE.items():
        module = make()
        Wall(module, where, limit)
        with pytest.raises(torch.OutOfMemoryError) as error:
            fitted(rank, world, module, balanced(**args))
        told[name] = str(error.value)
    return told


def test_what_smaller_pieces_do_not_cure_is_raised_with_the_cause_and_the_reason() -> None:
    for told in run_ranks(2, incurable_job):
        for name, (*_, reason) in INCURABLE.items():
            cause, _, why = told[name].partition("\n")
            assert cause.startswith("no room for"), name
            assert reason in (why or cause), name
