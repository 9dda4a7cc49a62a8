"""Every engine on GPUs trains what one process on the CPU trains: ranks share the cards there are, over gloo."""

from __future__ import annotations

import pytest

from tests.gpu.kit import PRECISIONS, Model, fit_engine, moved, oracle, weights
from tests.gpu.ranks import run_card_ranks

ENGINES = ("balanced", "stale", "federated", "pipeline 1x2", "pipeline 2x1", "pipeline")


def is_exact(world: int, name: str, precision: str) -> None:
    expected, _ = oracle()
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
