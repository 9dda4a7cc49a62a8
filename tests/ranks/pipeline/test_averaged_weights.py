"""Callbacks that keep weights of a divided module: averages are those of one process, what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_hetero import lightning_compat as compat
from tests.ranks.harness import run_ranks
from tests.ranks.kit import quiet_trainer, rank_trainer, weights
from tests.ranks.pipeline.kit import WORLD, Deep, pipeline
from tests.ranks.pipeline.resume_kit import BATCH, EXACT, alone, differences, train, validate
from tests.ranks.pipeline.variants import Normed
from tests.ranks.resume_kit import Saver

EPOCHS, SAMPLES = 3, 48  # three batches each


def ema() -> Callback:
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.8))


def plain_average() -> Callback:
    return WeightAveraging(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def swa() -> Callback:
    return StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)


KINDS: dict[str, Callable[[], Callback]] = {"ema": ema, "many at a time": plain_average, "swa": swa}
NAMES = {"1x2": ["many at a time", "swa"], "2x2": ["ema"]}  # by plan


class Odd(Callback):
    """Keeps a copy of what it finds, as many do, and puts it into the checkpoint."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = deepcopy(pl_module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [self.kept]}


def averaging_job(rank: int, world: int, plan: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES[plan]:
        make = KINDS[name]
        best = ModelCheckpoint(f"{folder}/{name}/best", monitor="val", filename="best")
        callback, module = make(), Deep()
        options = {"callbacks": [callback, best, Saver(f"{folder}/{name}", [])], "enable_checkpointing": True}
        trainer = rank_trainer(rank, world, pipeline(plan), max_epochs=EPOCHS, **options)
        trainer.fit(module, train(BATCH // world, SAMPLES), validate())
        ended = weights(module)
        ((_, copy),) = compat.averaging_callbacks(trainer)
        kept = weights(copy)
        (tested,) = trainer.validate(module, validate(), verbose=False)
        resumed = Deep()
        again = rank_trainer(rank, world, pipeline(plan), max_epochs=EPOCHS, callbacks=[make()])
        again.fit(resumed, train(BATCH // world, SAMPLES), ckpt_path=f"{folder}/{name}/epoch-1.ckpt")
        found[name] = ended, kept, float(best.best_model_score or 0), tested["val"], weights(resumed)
    return found


def copying_job(rank: int, world: int, plan: str, folder: str) -> str:
    options = {"callbacks": [Odd(), Saver(f"{folder}/odd", [])], "max_epochs": 1}
    rank_trainer(rank, world, pipeline(plan), **options).fit(Deep(), train(BATCH // world, SAMPLES))
    trainer = rank_trainer(rank, world, pipeline(plan), callbacks=[swa()], max_epochs=1)
    with pytest.raises(TypeError) as error:
        trainer.fit(Normed(), train(BATCH // world, SAMPLES))
    return str(error.value)


@pytest.mark.stock_ddp("StochasticWeightAveraging", "WeightAveraging", "pipeline")
@pytest.mark.stock_ddp(
    "StochasticWeightAveraging_norm", "pipeline", refused="the statistics are on several ranks; use `WeightAveraging`"
)  # fmt: skip
def test_averages_are_those_of_one_process(tmp_path: Path) -> None:
    where = str(tmp_path / "ours")
    runs: dict[str, list[Any]] = {}
    for plan, names in NAMES.items():
        runs |= dict.fromkeys(names, run_ranks(WORLD[plan], averaging_job, plan, where, timeout_s=100.0))
    for name, ranks in runs.items():
        module, folder = Deep(), tmp_path / "one"
        best = ModelCheckpoint(folder / name / "best", monitor="val", filename="best")
        callbacks = [KINDS[name](), best, Saver(str(folder / name), [])]
        options = {"max_epochs": EPOCHS, "callbacks": callbacks, "enable_checkpointing": True}
        trainer = alone(module, validated=True, samples=SAMPLES, **options)[2]
        ((_, copy),) = compat.averaging_callbacks(trainer)
        (tested,) = quiet_trainer(devices=1).validate(module, validate(), verbose=False)
        for found in ranks:
            ended, kept, score, value, resumed = found[name]
            assert ended.distance(weights(module)) <= EXACT, name
            assert kept.distance(weights(copy)) <= EXACT, name
            assert resumed.distance(weights(module)) <= EXACT, name
            assert score == pytest.approx(float(best.best_model_score or 0), rel=1e-6)
            assert value == pytest.approx(tested["val"], rel=1e-6)
        for file in ("epoch-1.ckpt", "best/best.ckpt"):
            ours, stock = (torch.load(where / name / file, weights_only=True) for where in (tmp_path / "ours", folder))
            for key in ("state_dict", "current_model_state", "averaging_state"):
                assert (key in ours) == (key in stock)
                assert differences(ours.get(key), stock.get(key), key) == []
            key = "StochasticWeightAveraging"
            assert differences(ours["callbacks"].get(key), stock["callbacks"].get(key)) == []
    for normed in run_ranks(2, copying_job, "1x2", where):
        assert "BatchNorm" in normed and "WeightAveraging" in normed
    kept = torch.load(tmp_path / "ours" / "odd" / "epoch-0.ckpt", weights_only=True)["callbacks"]["Odd"]["kept"]
    assert differences(kept, [Deep().state_dict()]) == [], "copies that a callback keeps are whole in a checkpoint"
