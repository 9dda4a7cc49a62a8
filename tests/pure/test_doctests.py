"""Runs the examples in the docstrings of the pure modules."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = (
    "lightning_hetero.cluster",
    "lightning_hetero.solvers",
    "lightning_hetero.predictors",
    "lightning_hetero.pipeline.decide",
    "lightning_hetero.plan",
    "lightning_hetero.doctor",
)


def _modules() -> list[str]:
    names = ["lightning_hetero.types"]
    for package in PACKAGES:
        module = importlib.import_module(package)
        names += [package, *(info.name for info in pkgutil.walk_packages(module.__path__, f"{package}."))]
    return names


@pytest.mark.parametrize("name", _modules())
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_solvers_have_examples() -> None:
    names = [name for name in _modules() if name.startswith("lightning_hetero.solvers")]
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in names) > 0
