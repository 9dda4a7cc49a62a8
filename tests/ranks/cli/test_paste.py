"""What the planner prints to be pasted trains: the Python with the module that was asked about, by every engine."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch
import pytest

from lightning_hetero.cli.loading import load_data, load_module, profile_module
from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.plan.parallel import sharded
from lightning_hetero.plan.paste import snippet
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import Setup
from tests.ranks.harness import RankEnvironment, run_ranks

MODULE, DATA = "lightning_hetero.demo:DigitsCNN", "lightning_hetero.demo:DigitsData"


def fit(rank: int, world: int, program: str) -> tuple[int, str]:
    """Runs the program, and a step with its Trainer; as on a machine with these ranks."""
    here: dict[str, Any] = {
        "plugins": [RankEnvironment(rank, world)], "max_steps": 1, "limit_val_batches": 0, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    made: dict[str, Any] = {}
    with patch.object(lightning.pytorch, "Trainer", partial(lightning.pytorch.Trainer, **here)):
        exec(program, made)
    trainer = made["trainer"]
    trainer.fit(load_module(MODULE), datamodule=load_data(DATA))
    return trainer.global_step, type(trainer.strategy).__name__


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    profile = profile_module(load_module(MODULE), load_data(DATA), accelerator="cpu")
    devices = [{"name": "fast"}, {"name": "slow", "speed": 0.5}]
    cluster = cluster_from_plain({"devices": devices, "link": {"bandwidth": "1 GB/s"}})
    setup = Setup(cluster=cluster, model=profile.model, global_batch=32, spans=profile.spans)
    found = [*plan(setup).estimates, sharded(setup)]  # which is in no plan where every device holds the model
    return {one.strategy: snippet(one, {"accelerator": "cpu"}) for one in found}


@pytest.mark.parametrize("name", ["ddp", "hetero_balanced", "hetero_sharded", "hetero_stale", "hetero_pipeline"])
def test_the_printed_python_trains_the_module_that_was_asked_about(name: str, programs: dict[str, str]) -> None:
    steps, strategies = zip(*run_ranks(2, fit, programs[name]), strict=True)
    assert set(steps) == {1} and strategies[0] in ("DDPStrategy", *programs[name].split())
