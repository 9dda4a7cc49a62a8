"""The stale engine's numbers: buffers, mixed precision, compressed gradients, gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks.data.indexed import ddp_order, indexed
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, rank_trainer, regression, single, stale, weights
from tests.ranks.stale.models import Counted, Indexed, Norm, with_nan

pytestmark = pytest.mark.ranks
SAMPLES, BATCH, EPOCHS = 110, 24, 2


def fitted(rank: int, world: int, module: Toy, data: Any, strategy: dict[str, Any], **trainer: Any) -> Any:
    strategy = {"policy": "bsp", **strategy}
    fit = rank_trainer(rank, world, stale(**strategy), **{"max_epochs": EPOCHS, **trainer})
    loader = data if isinstance(data, DataLoader | list) else DataLoader(data, batch_size=BATCH // world, shuffle=True)
    fit.fit(module, loader)
    return fit


def loss_of(trained: Weights, make: Callable[[], Toy] = Toy) -> float:
    """Mean squared error over the training data, in float64."""
    model = make()
    model.load_state_dict({k: v.double() for k, v in trained.items()})
    x, y = regression(SAMPLES).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model.net(x), y))


# ---- buffers ------------------------------------------------------------------------------------------------


def norm_job(rank: int, world: int) -> Weights:
    module = Norm()
    fitted(rank, world, module, regression(SAMPLES), {})
    return weights(module)


@pytest.mark.stock_ddp("batchnorm", "stale")
def test_running_statistics_are_means_over_the_samples() -> None:
    """The running mean is that of the global batches; the variance is the mean of the ranks' variances."""
    module = Norm()
    single(module, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    expected = weights(module)
    x = regression(SAMPLES).tensors[0]
    variance = torch.ones(6, dtype=torch.float64)
    for batch in ddp_order(SAMPLES, BATCH, EPOCHS):
        parts = torch.tensor_split(x[batch], 3)  # larger parts to lower ranks
        mean = sum(p.var(0) * len(p) for p in parts) / len(batch)
        variance = 0.9 * variance + 0.1 * mean
    for trained in run_ranks(3, norm_job):
        assert trained.distance({**expected, "norm.running_var": trained["norm.running_var"]}) <= 1e-12
        assert torch.allclose(trained["norm.running_var"], variance, rtol=1e-12)
        assert not torch.allclose(variance, expected["norm.running_var"], rtol=1e-3)


# ---- precision ----------------------------------------------------------------------------------------------


class Bursting(Toy):
    """float32; a batch with sample 7 has gradients beyond every range of numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        loss = super().training_step((x, y), batch_idx)
        return loss * math.inf if 7 in index.tolist() else loss


def float32(samples: int) -> Any:
    index, x, y = indexed(samples).tensors
    return torch.utils.data.TensorDataset(index, x.float(), y.float())


def mixed(precision: str) -> MixedPrecision:
    scaler = None
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    return MixedPrecision(precision, device="cpu", scaler=scaler)  # type: ignore[arg-type]


def scale_job(rank: int, world: int, policy: str, accumulate: int) -> Any:
    module, plugin = Bursting(torch.float32), mixed("16-mixed")
    strategy = stale(policy=policy, precision_plugin=plugin)
    counted = Counted()
    trainer = rank_trainer(
        rank, world, strategy, max_epochs=EPOCHS, accumulate_grad_batches=accumulate, callbacks=[counted]
    )
    trainer.fit(module, DataLoader(float32(SAMPLES), batch_size=BATCH // world, shuffle=True))
    assert plugin.scaler is not None
    return weights(module), trainer.global_step, plugin.scaler.state_dict(), counted.epochs[-1]["overflows"]


@pytest.mark.parametrize(
    ("world", "policy", "accumulate"), [(2, "bsp", 1), (2, "bsp", 2), (2, "flexible", 1)]
)
def test_an_overflow_anywhere_skips_the_update_everywhere(world: int, policy: str, accumulate: int) -> None:
    """One rank's overflow costs one update and halves the scale of all, as on one device."""
    module, plugin = Bursting(torch.float32), mixed("16-mixed")
    oracle = single(
        module, float32(SAMPLES), BATCH, max_epochs=EPOCHS, plugins=[plugin], accumulate_grad_batches=accumulate
    )
    assert plugin.scaler is not None
    results = run_ranks(world, scale_job, policy, accumulate)
    scales = [scaler for _, _, scaler, _ in results]
    assert all(scaler == scales[0] for scaler in scales)
    for trained, step, scaler, overflows in results:
        assert step == oracle.global_step
        assert all(v.isfinite().all() for v in trained.values())
        assert all(torch.equal(trained[k], v) for k, v in results[0][0].items())
        assert overflows == EPOCHS
        if policy == "bsp" or world == 1:
            assert scaler == plugin.scaler.state_dict()
            assert trained.distance(weights(module)) <= 1e-2


def precise_job(rank: int, world: int, precision: str) -> Weights:
    module = Toy(torch.float32)
    kwargs = {"precision": precision} if precision == "bf16-true" else {}
    plugin = {} if kwargs else {"precision_plugin": mixed(precision)}
    fitted(rank, world, module, regression(SAMPLES, dtype=torch.float32), plugin, **kwargs)
    return weights(module)


@pytest.mark.stock_ddp("precision_mixed", "stale")
@pytest.mark.parametrize(("precision", "near"), [("bf16-mixed", 0.01), ("16-mixed", 0.005), ("bf16-true", 0.05)])
def test_lower_precision_trains_nearly_the_same_weights(precision: str, near: float) -> None:
    expected = Toy(torch.float32)
    single(expected, regression(SAMPLES, dtype=torch.float32), BATCH, max_epochs=EPOCHS)
    results = run_ranks(2, precise_job, precision)
    for trained in results:
        wide = Weights({k: v.float() for k, v in trained.items()})
        assert 1e-6 < wide.distance(weights(expected)) <= near
        assert all(torch.equal(trained[k], v) for k, v in results[0].items())


# ---- compression --------------------------------------------------------------------------------------------


def compressed_job(rank: int, world: int, compression: Any) -> Weights:
    module = Toy()
    fitted(rank, world, module, regression(SAMPLES), {"compression": compression}, max_epochs=6)
    return weights(module)


@pytest.mark.parametrize(("compression", "near"), [("bf16", 0.02), ("fp16", 0.01)])
def test_compressed_gradients_train(compression: Any, near: float) -> None:
    expected = Toy()
    before = loss_of(weights(expected))
    single(expected, regression(SAMPLES), BATCH, max_epochs=6)
    gained = before - loss_of(weights(expected))
    for trained in run_ranks(2, compressed_job, compression):
        assert 1e-9 < trained.distance(weights(expected)) <= near
        assert before - loss_of(trained) > 0.7 * gained > 0


# ---- gradients that are not finite --------------------------------------------------------------------------


def nan_job(rank: int, world: int, nonfinite: str) -> Any:
    module = Indexed()
    try:
        trainer = fitted(rank, world, module, with_nan(SAMPLES, at=7), {"nonfinite": nonfinite})
    except Exception as error:
        return type(error).__name__, str(error), 7 in [i for batch in module.seen for i in batch]
    return weights(module), trainer.global_step


def test_a_gradient_that_is_not_finite_stops_all_and_is_named() -> None:
    results = run_ranks(3, nan_job, "stop")
    guilty = [rank for rank, (_, _, had) in enumerate(results) if had]
    assert len(guilty) == 1
    for kind, message, _ in results:
        assert kind == "RemoteFailureError"
        assert f"worker {guilty[0]} has a gradient with NaN or Inf in epoch 0, batch" in message
        assert "'net." in message and "nonfinite='skip'" in message


def test_or_its_samples_are_left_out() -> None:
    """The update is the mean over the other ranks' samples."""

    class Part(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            index, x, y = batch
            thirds = torch.tensor_split(torch.arange(len(x)), 3)
            good = torch.cat([part for part in thirds if 7 not in index[part]])
            return super().training_step((x[good], y[good]), batch_idx)

    expected = Part()
    oracle = single(expected, indexed(SAMPLES), BATCH, max_epochs=EPOCHS)
    for trained, step in run_ranks(3, nan_job, "skip"):
        assert trained.distance(weights(expected)) <= 1e-12
        assert step == oracle.global_step
