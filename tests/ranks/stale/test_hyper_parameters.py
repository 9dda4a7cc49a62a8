"""Which numbers of the optimizers travel with a push."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.runtime.hyper_parameters import CLIP_NORM, HyperParameters

pytestmark = pytest.mark.usefixtures("float64")


def test_numeric_entries_travel_and_nothing_else() -> None:
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def make() -> list[torch.optim.Optimizer]:
        adam = torch.optim.Adam([{"params": [p], "lr": 0.1}, {"params": [q], "lr": torch.tensor(0.2)}])
        return [adam, torch.optim.SGD([q], lr=1, momentum=0.5)]

    here, there = make(), make()
    mine, theirs = HyperParameters(here), HyperParameters(there)
    assert mine.digest == theirs.digest
    torch.optim.lr_scheduler.StepLR(here[0], 1)  # adds initial_lr to the worker's groups only
    here[0].param_groups[0].update(lr=0.3, betas=(0.5, 0.6), amsgrad=True)
    here[0].param_groups[1]["lr"].fill_(0.4)
    here[1].param_groups[0].update(lr=0.7, nesterov=True, weight_decay=0.25)
    numbers = torch.zeros(mine.size)
    mine.write(numbers, [(0, 0.0), (CLIP_NORM, 1.5)])
    assert theirs.apply(numbers.tolist()) == [(0, 0.0), (CLIP_NORM, 1.5)]
    first, second = there[0].param_groups
    assert (first["lr"], first["betas"], first["amsgrad"]) == (0.3, (0.5, 0.6), True)
    assert isinstance(second["lr"], Tensor) and float(second["lr"]) == pytest.approx(0.4)
    other = there[1].param_groups[0]
    assert (other["lr"], other["nesterov"], other["weight_decay"]) == (0.7, True, 0.25)
    assert "initial_lr" not in first


def test_what_only_the_server_changes_stays_its_own() -> None:
    """Schedule-free optimizers count in their groups; a worker's never moves, and must not set the server's back."""

    class Counting(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.defaults["k"] = 0
            for group in self.param_groups:
                group["k"] = 0

    p = nn.Parameter(torch.zeros(1))
    here, there = [Counting([p])], [Counting([p])]
    mine, theirs = HyperParameters(here), HyperParameters(there)
    there[0].param_groups[0]["k"] = 41
    here[0].param_groups[0]["lr"] = 0.05
    numbers = torch.zeros(mine.size)
    mine.write(numbers, [(0, 0.0)])
    theirs.apply(numbers.tolist())
    assert there[0].param_groups[0]["k"] == 41
    assert there[0].param_groups[0]["lr"] == 0.05
