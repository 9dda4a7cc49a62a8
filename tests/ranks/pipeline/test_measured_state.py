"""State of layers in bytes: parameters, gradients, buffers, what optimizers keep; worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_hetero.pipeline.runtime.measure.memory import optimizer_bytes, state_bytes, state_copies, trained_bytes
from tests.ranks.pipeline.measured_kit import BYTES, F4, D


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
    optimizer = make(parameters)
    estimated = optimizer_bytes(parameters, state_copies(optimizer))
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
    assert estimated == optimizer_bytes(parameters, state_copies(optimizer)) == sum(v.nbytes for v in kept)


def test_settings_count_per_group_and_strangers_cost_nothing() -> None:
    a, b, c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
    groups = [{"params": a.parameters(), "momentum": 0.9}, {"params": b.parameters()}]
    optimizer = optim.SGD(groups, lr=0.1)
    assert [optimizer_bytes(m.parameters(), state_copies(optimizer)) for m in (a, b, c)] == [BYTES, 0.0, 0.0]


def test_what_cannot_be_tried_is_taken_for_adam() -> None:
    class Picky(optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise OSError("not without its hardware")

    parameters = list(nn.Linear(D, D).parameters())
    assert optimizer_bytes(parameters, state_copies(Picky(parameters, lr=0.1))) == 2 * BYTES
    assert optimizer_bytes(parameters, state_copies(None)) == 0.0


def test_parameters_gradients_buffers_and_ties() -> None:
    layer = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))
    layer[2].weight = layer[0].weight  # pyright: ignore
    trained = BYTES + D * F4 + 2 * D * F4
    buffers = 2 * D * F4 + 8
    assert trained_bytes(layer) == trained
    assert state_bytes(layer, state_copies(optim.Adam(layer.parameters()))) == 4 * trained + buffers
    layer[0].requires_grad_(False)
    assert trained_bytes(layer) == 3 * D * F4
    assert state_bytes(layer, state_copies(optim.Adam(layer.parameters()))) == BYTES + 4 * 3 * D * F4 + buffers
