"""Pins the private names behind diverted logs and combined metrics to the installed versions."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.regression import PearsonCorrCoef

from lightning_hetero import lightning_compat as compat
from tests.ranks.kit import Toy, quiet_trainer, regression

VERSIONS = (
    f"lightning {lightning.__version__}, torch {torch.__version__}, torchmetrics {torchmetrics.__version__}"
    " behave differently: adapt lightning_hetero/lightning_compat/logs.py"
)


class Asking(Toy):
    """Calls a function in its training and its prediction step."""

    def __init__(self, ask: Callable[[LightningModule, Tensor], None]) -> None:
        super().__init__()
        self.ask = ask

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ask(self, batch[0])
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ask(self, batch[0])
        return batch[0]


def fit(ask: Callable[[Any, Tensor], None], *, predict: bool = False) -> Any:
    trainer = quiet_trainer(devices=1, max_epochs=2)
    loader = DataLoader(regression(20), batch_size=8)
    if predict:
        trainer.predict(Asking(ask), loader)
    else:
        trainer.fit(Asking(ask), loader)
    return trainer


def test_results_of() -> None:
    found: list[Any] = []
    fit(lambda module, x: found.append(compat.results_of(module.trainer)))
    assert found[0] is not None and all(results is found[0] for results in found), VERSIONS
    found.clear()
    fit(lambda module, x: found.append(compat.results_of(module.trainer)), predict=True)
    assert set(found) == {None}, VERSIONS


def test_running_hook() -> None:
    found: list[Any] = []
    trainer = fit(lambda module, x: found.append(compat.running_hook(module.trainer)))
    assert set(found) == {"training_step"} and compat.running_hook(trainer) is None, VERSIONS


def test_size_of_batch() -> None:
    found: list[int] = []
    trainer = fit(lambda module, x: found.append(compat.size_of_batch(module.trainer, required=True)))
    assert found == [8, 8, 4] * 2, VERSIONS
    results = SimpleNamespace(batch=[object()], batch_size=None)
    fake: Any = SimpleNamespace(_results=results)
    assert compat.size_of_batch(fake, required=False) == 1
    with pytest.raises(MisconfigurationException):
        compat.size_of_batch(fake, required=True)
    assert compat.size_of_batch(trainer, required=True) == 1


def test_divert_logs() -> None:
    """Everything comes by, with Lightning's checks made, and nothing is logged; then it is as before."""
    taken: list[tuple[Any, ...]] = []

    def ask(module: LightningModule, x: Tensor) -> None:
        undo = compat.divert_logs(module.trainer, lambda log, *args, **options: taken.append((args, options)))
        module.log("a", 2.0, batch_size=3)
        module.log_dict({"b": x.mean()}, reduce_fx="sum")
        with pytest.raises(ValueError, match="single element"):
            module.log("c", x)
        undo()
        module.log("d", 1.0)

    trainer = fit(ask)
    assert trainer.callback_metrics.keys() == {"d"}, VERSIONS
    (fx, name, value), options = taken[0]
    assert (fx, name, float(value)) == ("training_step", "a", 2.0) and options["batch_size"] == 3, VERSIONS
    assert [args[1] for args, _ in taken[:2]] == ["a", "b"] and taken[1][1]["reduce_fx"] == "sum", VERSIONS
    wanted = {
        *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "metric_attribute"),
        *("rank_zero_only", "batch_size", "sync_dist", "sync_dist_fn", "sync_dist_group", "enable_graph"),
    }
    assert options.keys() == wanted, VERSIONS


@pytest.mark.parametrize(
    ("given", "expected"),
    [("mean", "mean"), ("avg", "mean"), (torch.mean, "mean"), (sum, "sum"), ("max", "max"), (min, "min")],
)
def test_logged_reduction(given: Any, expected: str) -> None:
    options = {"on_step": True, "on_epoch": True, "reduce_fx": given}
    assert compat.logged_reduction("fx", "name", options) == expected, VERSIONS
    for wrong in ({"reduce_fx": torch.median}, {"on_step": False, "on_epoch": False}):
        with pytest.raises(MisconfigurationException):
            compat.logged_reduction("fx", "name", {**options, **wrong})


def test_log_again() -> None:
    """The same as ``self.log``, over two epochs; and a metric's step value is the one given."""
    metric = MeanMetric()
    options = {"prog_bar": False, "logger": True, "on_step": True, "on_epoch": True, "add_dataloader_idx": True}
    options |= {"metric_attribute": None, "rank_zero_only": False}
    seen: list[float] = []

    def ask(module: Any, x: Tensor) -> None:
        module.log("by log", x.mean(), on_step=True, on_epoch=True)
        again: Any = {**options, "reduce_fx": "mean"}
        compat.log_again(module.trainer, "training_step", "again", x.mean(), batch_size=len(x), **again)
        metric(x.mean(), weight=len(x))
        three = torch.tensor(3.0)
        compat.log_again(
            module.trainer, "training_step", "metric", metric, batch_size=1, step_value=three, **options
        )
        seen.append(float(module.trainer.callback_metrics["metric_step"]))

    values = {k: float(v) for k, v in fit(ask).callback_metrics.items()}
    for kind in ("step", "epoch"):
        assert values[f"again_{kind}"] == pytest.approx(values[f"by log_{kind}"]), VERSIONS
    assert values["metric_epoch"] == pytest.approx(values["by log_epoch"]), VERSIONS
    assert set(seen) == {3.0}, VERSIONS


def test_log_again_begins_an_epoch_as_log_does() -> None:
    """In its first batch a hook's values are reset when another hook has logged in between."""

    def by_log(module: Any, fx: str, value: float) -> None:
        before, module._current_fx_name = module._current_fx_name, fx
        module.log(fx, value, on_step=False, on_epoch=True)
        module._current_fx_name = before

    def again(module: Any, fx: str, value: float) -> None:
        options = {"prog_bar": False, "logger": True, "on_step": False, "on_epoch": True, "reduce_fx": "mean"}
        options |= {"add_dataloader_idx": True, "metric_attribute": None, "rank_zero_only": False}
        size = compat.size_of_batch(module.trainer, required=True)
        compat.log_again(module.trainer, fx, fx, torch.tensor(value), batch_size=size, **options)

    def logged(log: Callable[[Any, str, float], None]) -> dict[str, float]:
        hooks = ("training_step", "on_before_backward", "training_step")
        trainer = fit(lambda module, x: [log(module, fx, float(i)) for i, fx in enumerate(hooks)])  # type: ignore
        return {k: float(v) for k, v in trainer.callback_metrics.items()}

    assert logged(again) == logged(by_log), VERSIONS
    assert logged(again)["training_step"] > 1.0, VERSIONS  # the first 0 of the epoch was forgotten


def always() -> bool:
    return True


@pytest.mark.parametrize(("make", "inputs"), [(CatMetric, 1), (PearsonCorrCoef, 2)])
def test_combine_metric_with(make: Callable[[], Any], inputs: int) -> None:
    """States of ranks with updates count, lists and tensors alike; not within a step; and it can be undone."""
    one, other, idle, whole = (make() for _ in range(4))
    said: list[Any] = []
    stepping: list[bool] = []
    kept: list[Any] = []

    def gather(state: Any) -> list[Any]:
        said.append(state)
        return list(said)

    def watch(metric: Any) -> Callable[[], None]:
        metric.distributed_available_fn = always
        return compat.combine_metric_with(metric, gather, inside=lambda: bool(stepping), computed=kept.append)

    g = torch.Generator().manual_seed(0)
    undo = [watch(metric) for metric in (one, other, idle)]
    for metric in (one, other):
        data = [torch.rand(5, generator=g) for _ in range(inputs)]
        metric.update(*data)
        whole.update(*data)
    alone = copy.deepcopy(one)
    assert vars(alone)["_sync_dist"].__self__ is alone, VERSIONS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepping.append(True)
        first = one.compute()
        assert not said, VERSIONS
        stepping.clear()
        assert kept == [one], VERSIONS
        compat.forget_computed(kept)
        assert one.compute().tolist() == first.tolist(), VERSIONS  # before the others
        other.compute()
        assert idle.compute().tolist() == pytest.approx(whole.compute().tolist()), VERSIONS
    assert [state is None for state in said] == [False, False, True] and not idle.update_called, VERSIONS
    assert pickle.loads(pickle.dumps(one)).compute().tolist() == first.tolist(), VERSIONS
    for back in undo:
        back()
    said.clear()
    alone.distributed_available_fn = None
    assert alone.compute().tolist() == first.tolist() and not said, VERSIONS  # a copy that was made before
    assert "_sync_dist" not in vars(one) and not isinstance(one.compute, MethodType), VERSIONS


def test_forget_computed() -> None:
    """Without it a metric returns the value that it has computed, without asking other ranks."""
    metric = CatMetric()
    metric.update(1.0)
    kept, others = [metric], metric.compute()
    assert metric.compute() is others, VERSIONS
    compat.forget_computed(kept)
    assert not kept and metric.compute() is not others, VERSIONS
