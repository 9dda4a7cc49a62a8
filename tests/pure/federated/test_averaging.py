"""The arithmetic of an average: by hand, to the bit where nothing differs, and what FedProx makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hetero.federated.runtime.averaging import add_proximal_, complete, kept_states


def test_the_proximal_term_is_the_gradient_of_its_loss() -> None:
    weight, average = torch.tensor([3.0], requires_grad=True), torch.tensor([1.0])
    (weight**2).sum().backward()
    add_proximal_([weight, torch.tensor([9.0], requires_grad=True)], [average, average], 0.5)
    assert weight.grad is not None and weight.grad.tolist() == [6.0 + 0.5 * 2.0]


def stepped(kind: type[torch.optim.Optimizer], *, used: bool = True, **options: object) -> torch.optim.Optimizer:
    net = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    optimizer = kind(net.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    x = torch.ones(1, 2)
    (net[0](x) + (net[1](x) if used else 0.0)).sum().backward()
    optimizer.step()
    return optimizer


def test_states_are_listed_alike_and_missing_ones_are_zeros() -> None:
    both, one = stepped(torch.optim.Adam), stepped(torch.optim.Adam, used=False)
    wanted = kept_states([both])
    assert len(wanted) == 6 and len(kept_states([one])) == 3
    complete([one], wanted)
    assert kept_states([one]) == wanted
    parameter = one.param_groups[0]["params"][1]
    assert float(one.state[parameter]["step"]) == 0.0 and not one.state[parameter]["exp_avg"].any()
    one.step()  # goes on with it
    assert kept_states([stepped(torch.optim.SGD)]) == {}


def test_what_has_no_average_is_refused_by_name() -> None:
    optimizer = stepped(torch.optim.SGD, momentum=0.9)
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["codes"] = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"the state of SGD cannot be averaged: 'codes' is a tensor of torch\.uint8"):
        kept_states([optimizer])
    optimizer.state[parameter]["codes"] = [1, 2]
    with pytest.raises(TypeError, match=r"'codes' is a list.*another optimizer"):
        kept_states([optimizer])
