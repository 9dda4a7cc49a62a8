"""The settings of the online controller: plain, checked, and buildable from outside."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from lightning_hetero import LyapunovController

GIVEN = {"v": 30, "budget": {"money_per_sample": 1e-6, "money_per_hour": 5}, "prices": [1, 2.5]}


def test_plain_frozen_and_picklable() -> None:
    settings = LyapunovController(**GIVEN)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert repr(settings) == repr(LyapunovController(**GIVEN))
    with pytest.raises(FrozenInstanceError):
        settings.v = 1.0  # type: ignore[misc]


def test_built_by_hydra_is_the_same_and_picklable() -> None:
    node = OmegaConf.create({"_target_": "lightning_hetero.LyapunovController", **GIVEN})
    built = instantiate(node)
    assert built == LyapunovController(**GIVEN)
    assert type(built.budget) is dict and type(built.prices) is tuple
    assert pickle.loads(pickle.dumps(built)) == built


def test_built_by_jsonargparse_is_the_same() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(LyapunovController, "controller")
    found = parser.parse_args(["--controller.budget={money_per_sample: 2e-6}", "--controller.prices=[1, 3]"])
    assert parser.instantiate(found).controller == LyapunovController(
        budget={"money_per_sample": 2e-6}, prices=[1, 3]
    )


def test_budgets_are_read_by_name() -> None:
    budgets = LyapunovController(**GIVEN).budgets()
    assert [(b.name, b.per_hour, b.limit) for b in budgets] == [
        ("money_per_hour", True, 5.0),
        ("money_per_sample", False, 1e-6),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"v": 0}, r"v=0 must be a finite number > 0"),
        ({"v": "much"}, "v='much'"),
        ({"bank": -1}, r"bank=-1 must be a finite number >= 0"),
        ({"rest_cost": 2}, r"rest_cost=2 must be a finite number >= 0 and <= 1"),
        ({"budget": {"money": 1}}, r"unknown keys \[.money.\]: it takes money_per_sample"),
        ({"budget": {"money_per_sample": 0}}, r"budget.money_per_sample=0 must be a finite number > 0"),
        ({"prices": []}, r"prices=\[\] must be a number, or one per rank"),
        ({"prices": [1, -1]}, r"prices\[1\]=-1"),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LyapunovController(**arguments)


@pytest.mark.parametrize(("name", "value"), [("budget", 1.0), ("structure", 1)])
def test_bad_types_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={value}"):
        LyapunovController(**{name: value})


def test_numbers_by_rank_must_be_as_many_as_ranks() -> None:
    with pytest.raises(ValueError, match="lists 2 ranks, but there are 3"):
        LyapunovController(**GIVEN).prices_of(3)
