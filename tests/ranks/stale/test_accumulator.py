"""A pool sums what waits in slots in blocks, many slots at a time; nobody can tell by the result."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.serve import accumulator as pools
from lightning_hetero.stale.runtime.serve.accumulator import GradientSum, KeptMean, Spares, runs

SHAPES = {"bias": (3,), "scalar": (), "kernel": (4, 3, 5, 5), "half": (60,), "large": (7, 101), "last": (2, 2)}
WEIGHTS = (3.0, 5.0, 2.0, 7.0, 3.0)
ABSENT = {(0, "large"), (0, "half"), (2, "bias"), (3, "large"), *((c, "last") for c in range(5))}
INDEX = {name: i for i, name in enumerate(SHAPES)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BLOCK", 64)  # a multiple of what vector units take at a time, as the real one is


def layout_of(compression: Any) -> FlatLayout:
    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        made = torch.zeros(shape, dtype=torch.bfloat16 if name == "half" else torch.float32)
        return made.to(memory_format=torch.channels_last) if name == "kernel" else made

    return FlatLayout.of([(name, tensor(name, shape)) for name, shape in SHAPES.items()], compression=compression)


def gradients(contribution: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(contribution)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: g for name, g in made.items() if (contribution, name) not in ABSENT}


@pytest.mark.parametrize("groups", [(5,), (1, 1, 1, 1, 1), (2, 3), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_contributions_add_up_bit_by_bit_however_they_come(compression: Any, groups: tuple[int, ...]) -> None:
    layout = layout_of(compression)
    spares = Spares(layout)
    for i in range(len(SHAPES)):  # memory that was used before
        spares.give(i, spares.take(i).fill_(torch.nan))
    pool, slots, expected = GradientSum(layout, spares), [], dict[str, Tensor]()
    cut = runs(layout, range(len(SHAPES)))
    assert cut == [[0, 1], [2], [3], [4], [5]]
    ends = set(accumulate(groups))
    for c, weight in enumerate(WEIGHTS):
        slot, present = torch.zeros(layout.slot_bytes, dtype=torch.uint8), [0] * len(SHAPES)
        factor = pool.count(weight, 1, 1.0)
        for name, gradient in gradients(c).items():
            i = INDEX[name]
            layout.gradient_of(slot, i).copy_(gradient)
            present[i] = 1
            sent = layout.gradient_of(slot, i).clone()
            if name in expected:
                expected[name].add_(sent, alpha=factor)
            else:
                expected[name] = sent.float().mul_(factor)
        pool.wait(present, layout.values_of(slot), factor)
        slots.append(slot)
        if c + 1 in ends and c + 1 < len(WEIGHTS):
            for run in cut:
                pool.sum_up(run)
            pool.summed_up()
            assert not pool.waits
            for old in slots:
                old.fill_(255)  # written again by their workers
    divide = pool.factor(None)
    for run in cut:
        pool.sum_up(run, divide)
    assert pool.sums[INDEX["last"]] is None
    for name, total in expected.items():
        found = pool.sums[INDEX[name]]
        assert found is not None and torch.equal(found, total.mul_(divide)), name


def test_means_that_late_contributions_complete_and_their_moves_by_hand() -> None:
    """Whatever is missing in a contribution counts as zeros."""
    layout = FlatLayout.of([("a", torch.zeros(2)), ("b", torch.zeros(1)), ("c", torch.zeros(1))])
    mean, pool = KeptMean(3.0, [torch.tensor([1.0, 2.0]), None, None]), GradientSum(layout, Spares(layout))
    for gradients, weight in (([[5.0, 2.0], [8.0], None], 1.0), ([None, [2.0], None], 4.0)):
        part = mean.count(weight)
        for i, gradient in enumerate(gradients):
            pool.move(i, mean.complete(i, None if gradient is None else torch.tensor(gradient), part))
    # a: (3 (1, 2) + 1 (5, 2) + 4 (0, 0)) / 8;  b: (3 0 + 1 8 + 4 2) / 8;  c: nobody ever had a gradient
    assert mean.weight == 8.0
    assert [None if t is None else t.tolist() for t in mean.values] == [[1.0, 1.0], [2.0], None]
    assert [None if t is None else t.tolist() for t in pool.moves] == [[0.0, -1.0], [2.0], None]
