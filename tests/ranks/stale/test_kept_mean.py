"""A late contribution moves the mean that it missed; whatever is missing in it counts as zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.accumulator import GradientSum, KeptMean, Spares

LAYOUT = FlatLayout.of([("a", torch.zeros(2)), ("b", torch.zeros(1)), ("c", torch.zeros(1))])


def values(tensors: list[Tensor | None]) -> list[list[float] | None]:
    return [None if t is None else t.tolist() for t in tensors]


def test_means_and_moves_by_hand() -> None:
    mean, pool = KeptMean(3.0, [torch.tensor([1.0, 2.0]), None, None]), GradientSum(LAYOUT, Spares(LAYOUT))
    for gradients, weight in (([[5.0, 2.0], [8.0], None], 1.0), ([None, [2.0], None], 4.0)):
        part = mean.count(weight)
        for i, gradient in enumerate(gradients):
            pool.move(i, mean.complete(i, None if gradient is None else torch.tensor(gradient), part))
    # a: (3 (1, 2) + 1 (5, 2) + 4 (0, 0)) / 8;  b: (3 0 + 1 8 + 4 2) / 8;  c: nobody ever had a gradient
    assert mean.weight == 8.0
    assert values(mean.values) == [[1.0, 1.0], [2.0], None]
    assert values(pool.moves) == [[0.0, -1.0], [2.0], None]


def test_what_counts_nothing_moves_nothing() -> None:
    mean = KeptMean(2.0, [torch.tensor([1.0, 2.0])])
    move = mean.complete(0, torch.tensor([9.0, 9.0]), mean.count(0.0))
    assert (mean.weight, values(mean.values), values([move])) == (2.0, [[1.0, 2.0]], [[0.0, 0.0]])


@pytest.mark.parametrize("fresh", [True, False])
def test_a_gradient_is_the_mean_and_the_moves(fresh: bool) -> None:
    pool, parameter = GradientSum(LAYOUT, Spares(LAYOUT)), torch.nn.Parameter(torch.zeros(2))
    if fresh:
        pool.wait([1, 0, 0], [torch.tensor([4.0, 6.0])], pool.count(2.0, 2, 1.0))
    pool.move(0, torch.tensor([1.0, 1.0]))
    pool.sum_up([0], pool.factor(None))
    pool.give_to(0, parameter)
    assert parameter.grad is not None and parameter.grad.tolist() == ([5.0, 7.0] if fresh else [1.0, 1.0])
