"""A late contribution moves the mean that it missed; whatever is missing in it counts as zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_hetero.stale.runtime.memory.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.accumulator import GradientSum, Spares
from lightning_hetero.stale.runtime.serve.kept_mean import KeptMean

LAYOUT = FlatLayout.of([("a", torch.zeros(2)), ("b", torch.zeros(1)), ("c", torch.zeros(1))])


def slot_of(*gradients: list[float] | None) -> Tensor:
    slot = torch.zeros(LAYOUT.slot_bytes, dtype=torch.uint8)
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            LAYOUT.codec.encode(torch.tensor(gradient), LAYOUT.gradient_of(slot, i), LAYOUT.parameters[i], None)
    return slot


def values(tensors: list[Tensor | None]) -> list[list[float] | None]:
    return [None if t is None else t.tolist() for t in tensors]


def test_means_and_changes_by_hand() -> None:
    mean = KeptMean(LAYOUT, 3.0)
    mean.keep(0, torch.tensor([1.0, 2.0]))
    changes: list[Tensor | None] = [None] * 3
    for slot, weight in ((slot_of([5.0, 2.0], [8.0], None), 1.0), (slot_of(None, [2.0], None), 4.0)):
        part = mean.count(weight)
        for i in range(2):
            given = LAYOUT.gradient_of(slot, i).any()
            mean.complete(i, slot if given else None, part, changes)
        mean.complete(2, None, part, changes)
    # a: (3 (1, 2) + 1 (5, 2) + 4 (0, 0)) / 8;  b: (3 0 + 1 8 + 4 2) / 8;  c: nobody ever had a gradient
    assert mean.weight == 8.0
    assert values(mean.values) == [[1.0, 1.0], [2.0], None]
    assert values(changes) == [[0.0, -1.0], [2.0], None]


def test_what_counts_nothing_changes_nothing() -> None:
    mean, changes = KeptMean(LAYOUT, 2.0), list[Tensor | None]([None] * 3)
    mean.keep(0, torch.tensor([1.0, 2.0]))
    mean.complete(0, slot_of([9.0, 9.0]), mean.count(0.0), changes)
    assert (mean.weight, values(mean.values)[0], values(changes)[0]) == (2.0, [1.0, 2.0], [0.0, 0.0])


@pytest.mark.parametrize("fresh", [True, False])
def test_a_pool_adds_changes_after_its_mean_is_kept(fresh: bool) -> None:
    pool = GradientSum(LAYOUT, Spares(LAYOUT))
    parameter = torch.nn.Parameter(torch.zeros(2))
    if fresh:
        pool.add(0, slot_of([4.0, 6.0]), pool.count(2.0, 2, 1.0))
    pool.changes[0] = torch.tensor([1.0, 1.0])
    pool.mean = KeptMean(LAYOUT, 2.0)
    pool.sum_up([0], pool.factor(None))
    pool.change(0)
    pool.give_to(0, parameter)
    kept = [4.0, 6.0] if fresh else None
    assert values(pool.mean.values)[0] == kept
    assert parameter.grad is not None and parameter.grad.tolist() == ([5.0, 7.0] if fresh else [1.0, 1.0])
