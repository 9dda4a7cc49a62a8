"""State of layers in bytes: parameters, gradients, buffers, what optimizers keep; worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn, optim

from lightning_hetero.pipeline.runtime.measure.memory import optimizer_bytes, state_bytes, trained_bytes
from tests.ranks.pipeline.measured_kit import BYTES, F4, D


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (None, 0),
        (optim.SGD, 0),
        (lambda ps: optim.SGD(ps, lr=0.1), 0),
        (lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9), 1),
        (optim.Adam, 2),
        (lambda ps: optim.AdamW(ps), 2),
        (lambda ps: optim.AdamW(ps, amsgrad=True), 3),
        (lambda ps: optim.RMSprop(ps, momentum=0.5, centered=True), 3),
        (lambda ps: optim.Adagrad(ps), 1),
        (optim.Adadelta, 2),
        (lambda ps: 5.0, None),
    ],
)
def test_optimizer_state_estimated_and_measured(optimizer: Any, copies: int | None) -> None:
    parameters = list(nn.Linear(D, D).parameters())
    assert optimizer_bytes(parameters, optimizer) == (5.0 if copies is None else copies * BYTES)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.SGD(ps, lr=0.1),
        lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: optim.Adam(ps),
        lambda ps: optim.Adam(ps, amsgrad=True),
        lambda ps: optim.NAdam(ps),
        lambda ps: optim.RAdam(ps),
        lambda ps: optim.Adamax(ps),
        lambda ps: optim.Adagrad(ps),
        lambda ps: optim.Adadelta(ps),
        lambda ps: optim.ASGD(ps),
        lambda ps: optim.Rprop(ps),
        lambda ps: optim.RMSprop(ps),
        lambda ps: optim.RMSprop(ps, momentum=0.9, centered=True),
    ],
)
def test_what_is_estimated_of_an_instance_is_what_a_step_makes(make: Callable[..., optim.Optimizer]) -> None:
    parameters = list(nn.Linear(D, D).parameters())
    assert optimizer_bytes(parameters, make(parameters)) == optimizer_bytes(parameters, make)


def test_settings_count_per_group_and_strangers_cost_nothing() -> None:
    a, b, c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
    groups = [{"params": a.parameters(), "momentum": 0.9}, {"params": b.parameters()}]
    optimizer = optim.SGD(groups, lr=0.1)
    assert [optimizer_bytes(list(m.parameters()), optimizer) for m in (a, b, c)] == [BYTES, 0.0, 0.0]


def test_an_unknown_optimizer_is_refused_and_can_be_measured() -> None:
    parameters = list(nn.Linear(D, D).parameters())
    with pytest.raises(ValueError, match=r"Adafactor keeps is not known .* optimizer=lambda parameters"):
        optimizer_bytes(parameters, optim.Adafactor)
    assert 0 < optimizer_bytes(parameters, lambda ps: optim.Adafactor(ps)) < BYTES  # factors of the weight's moments
    with pytest.raises(ValueError, match="optimizer='adam' must be an optimizer, a class"):
        optimizer_bytes(parameters, "adam")  # pyright: ignore[reportArgumentType]

    class Mine(optim.AdamW):
        """Derived ones are as their base."""

    assert optimizer_bytes(parameters, Mine) == 2 * BYTES


def test_parameters_gradients_buffers_and_ties() -> None:
    layer = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))
    layer[2].weight = layer[0].weight  # pyright: ignore
    trained = BYTES + D * F4 + 2 * D * F4
    buffers = 2 * D * F4 + 8
    assert trained_bytes(layer) == trained
    assert state_bytes(layer, optim.Adam) == 4 * trained + buffers
    layer[0].requires_grad_(False)
    assert trained_bytes(layer) == 3 * D * F4
    assert state_bytes(layer, optim.Adam) == BYTES + 4 * 3 * D * F4 + buffers
