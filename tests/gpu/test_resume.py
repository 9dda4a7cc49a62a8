"""Checkpoints of trainings on GPUs: resumed there, or on the CPU, they go on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.gpu.kit import PRECISIONS, STEPS, Model, Trained, fit_engine, moved, oracle, weights
from tests.gpu.ranks import run_card_ranks
from tests.ranks.kit import Weights

HALF = STEPS // 2
NAMES = ("balanced equal", "stale", "pipeline 1x2")


class Halfway(Callback):
    """Saves after half of the steps, with the state of each rank's device's generator, or begins with such a state."""

    def __init__(self, begin: torch.Tensor | None = None) -> None:
        self.begin = begin
        self.half: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.begin is None:
            torch.cuda.manual_seed(7)
        else:
            torch.cuda.set_rng_state(self.begin)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == HALF and self.begin is None:
            self.half = torch.cuda.get_rng_state()
            trainer.save_checkpoint("half.ckpt")


class Outcome(NamedTuple):
    whole: Weights
    resumed: Weights
    same_state: bool
    drawn: bool


def in_two_parts(rank: int, world: int, name: str) -> Outcome:
    """Trains in one go and from its middle, with dropout, whose masks come from the device's generator."""
    whole = Halfway()
    expected = fit_engine(rank, world, name, module=Model(dropout=0.2), callbacks=[whole])
    state = torch.cuda.get_rng_state()
    assert whole.half is not None
    again = [Halfway(whole.half)]
    found = fit_engine(rank, world, name, module=Model(dropout=0.2), callbacks=again, ckpt_path="half.ckpt")
    same, drawn = torch.equal(torch.cuda.get_rng_state(), state), not torch.equal(whole.half, state)
    return Outcome(expected.weights, found.weights, same, drawn)


@pytest.mark.parametrize("name", NAMES)
def test_with_the_devices_random_numbers(name: str) -> None:
    for outcome in run_card_ranks(2, in_two_parts, name):
        assert outcome.same_state
        assert outcome.drawn or "pipeline" in name  # which seeds its layers by step and puts the generator back
        assert moved(outcome.resumed, outcome.whole, weights(Model())) <= PRECISIONS["32-true"]


# ---- between the GPU and the CPU: all samples are the same, as stock Lightning resumes with others -----------------


def saved(rank: int, world: int, name: str, path: str) -> Trained:
    return fit_engine(rank, world, name, same=True, max_steps=HALF, save=path)


def resumed(rank: int, world: int, name: str, path: str) -> Trained:
    return fit_engine(rank, world, name, same=True, ckpt_path=path)


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", NAMES)
def test_from_the_gpu_to_the_cpu_and_back(name: str, tmp_path: Path) -> None:
    expected, start = oracle(same=True), weights(Model())
    assert moved(oracle(same=True, max_steps=HALF), expected, start) > 0.1  # not by the first half alone
    path = tmp_path / "gpu.ckpt"
    run_card_ranks(2, saved, name, str(path))
    assert moved(oracle(same=True, ckpt_path=path), expected, start) <= PRECISIONS["32-true"]
    path = tmp_path / "cpu.ckpt"
    oracle(same=True, max_steps=HALF, callbacks=[Saves(path)])
    for trained in run_card_ranks(2, resumed, name, str(path)):
        assert moved(trained.weights, expected, start) <= PRECISIONS["32-true"]
