"""Every engine on GPUs trains what one process on the CPU trains: ranks share the cards there are, over gloo."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.gpu.kit import PRECISIONS, STEPS, Model, Trained, fit_engine, moved, of_kernels, oracle, weights
from tests.gpu.ranks import run_card_ranks
from tests.ranks.harness import ROOT
from tests.ranks.kit import regression

ENGINES = ("balanced", "stale", "federated", "pipeline 1x2", "pipeline 2x1", "pipeline")


def is_exact(world: int, name: str, precision: str) -> None:
    expected = oracle()
    for trained in run_card_ranks(world, fit_engine, name, precision):
        assert trained.on - {"meta"} == {"cuda"}  # a stage has the other layers without values
        assert moved(trained.weights, expected, weights(Model())) <= PRECISIONS[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks(name: str, precision: str) -> None:
    is_exact(2, name, precision)


@pytest.mark.parametrize("name", ["balanced", "stale", "federated", "pipeline 2x2", "pipeline 1x4"])
def test_four_ranks(name: str) -> None:
    is_exact(4, name, "32-true")


# ---- stale: the server is forked from a process that has used the GPU ----------------------------------------------

NOT_HERE = {
    "LBFGS": "is refused on several devices",
    "Muon": "takes matrices only",
    "Optimizer": "is their base",
    "SparseAdam": "takes sparse gradients only",
}
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in NOT_HERE
)


def with_optimizer(rank: int, world: int, optimizer: str) -> Trained:
    return fit_engine(rank, world, "stale", module=Model(optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stale_steps_with(optimizer: str) -> None:
    expected = oracle(Model(optimizer))
    for trained in run_card_ranks(2, with_optimizer, optimizer):
        assert moved(trained.weights, expected, weights(Model())) <= 1e-3  # some divide by what is close to nothing


# ---- what else a user does -----------------------------------------------------------------------------------------


def validated(rank: int, world: int, name: str) -> Trained:
    return fit_engine(rank, world, name, validate=True, val_check_interval=STEPS // 2, num_sanity_val_steps=2)


@pytest.mark.parametrize("name", ["balanced", "stale", "federated", "pipeline 1x2"])
def test_validation(name: str) -> None:
    expected = Model()
    oracle(expected)
    with torch.no_grad():
        loss = expected.loss(regression(40, seed=9, dtype=torch.float32).tensors)
    for trained in run_card_ranks(2, validated, name):
        assert trained.logged["val"] == pytest.approx(float(loss), rel=1e-4)
        assert math.isfinite(trained.logged["loss_epoch"])


def compiled(rank: int, world: int, name: str) -> Trained:
    module = Model()
    module.model.compile()
    return fit_engine(rank, world, name, module=module)


@of_kernels
@pytest.mark.parametrize("name", ["balanced", "stale"])
def test_compiled(name: str) -> None:
    expected = oracle()
    for trained in run_card_ranks(2, compiled, name, timeout_s=300.0):
        assert moved(trained.weights, expected, weights(Model())) <= 1e-4


class Convolutions(Model):
    """Layers for which cuDNN searches a way of computing, anew at each size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(6, 64), nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 8, 3, padding=1))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 1))

    def backbone(self, dropout: float = 0.0) -> nn.Module:
        return nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.ReLU())


def convolved(rank: int, world: int) -> Trained:
    return fit_engine(rank, world, "balanced", module=Convolutions(), benchmark=True)


@of_kernels
def test_searching_convolutions_at_every_size_is_told() -> None:
    for trained in run_card_ranks(2, convolved):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in trained.weights.values())
    assert any("benchmark" in text for text in run_card_ranks(2, convolved)[0].warned)


def test_auto_chooses_by_measuring() -> None:
    outcomes = run_card_ranks(2, fit_engine, "auto")
    assert len({trained.choice for trained in outcomes}) == 1
    for trained in outcomes:
        assert "without a warm-up" not in trained.choice, trained.choice
        assert trained.strategy != "AutoStrategy" and trained.on - {"meta"} == {"cuda"}
        assert not [text for text in trained.warned if "could not try" in text]


def test_pipeline_with_kernels_that_are_waited_for() -> None:
    expected = oracle()
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    for trained in run_card_ranks(2, fit_engine, "pipeline 1x2", timeout_s=60.0, environment=blocking):
        assert moved(trained.weights, expected, weights(Model())) <= PRECISIONS["32-true"]


def test_the_doctor_finds_the_cards() -> None:
    command = [sys.executable, "-m", "lightning_hetero.cli.doctor", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    findings = json.loads(ended.stdout)
    assert ended.returncode in (0, 1), ended.stderr
    assert torch.cuda.get_device_name(0) in ended.stdout or len(findings) > 0
