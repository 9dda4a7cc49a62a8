"""What becomes of the buffers that contributions push; which wins, what is late, and what a rank has meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_hetero.stale.runtime.buffers import PushedBuffers
from lightning_hetero.stale.runtime.layout import CHANGE, VALUE, FlatLayout
from tests.ranks.stale.kit import Pusher
from tests.ranks.stale.note import Note

pytestmark = pytest.mark.ranks

LAYOUT = FlatLayout.of(
    [],
    [
        ("norm.running_mean", torch.zeros(2)),
        ("norm.num_batches_tracked", torch.zeros((), dtype=torch.long)),
        ("calls", torch.zeros((), dtype=torch.long)),
        ("queue", torch.zeros(3)),
        ("ready", torch.zeros((), dtype=torch.bool)),
    ],
)
MEAN, TRACKED, CALLS, QUEUE, READY = range(5)


def slot(**given: tuple[int, float]) -> Tensor:
    made = torch.zeros(LAYOUT.slot_bytes, dtype=torch.uint8)
    for i, entry in enumerate(LAYOUT.buffers):
        flag, value = given.get(entry.name.rpartition(".")[2], (0, 0.0))
        LAYOUT.flags_of(made)[1][i] = flag
        LAYOUT.buffer_of(made, i).fill_(value)
    return made


def server() -> list[Tensor]:
    return [torch.ones(entry.shape, dtype=entry.dtype) for entry in LAYOUT.buffers]


def test_statistics_are_moved_by_all() -> None:
    buffers, pushed = server(), PushedBuffers(LAYOUT)
    pushed.add(slot(running_mean=(CHANGE, 1.0), num_batches_tracked=(CHANGE, 1)), samples=3, base=4, rank=1)
    pushed.add(slot(running_mean=(CHANGE, 5.0), num_batches_tracked=(CHANGE, 2)), samples=1, base=2, rank=0)
    pushed.apply(buffers, 1.0, {}, 5)
    assert buffers[MEAN].tolist() == [3.0, 3.0] and int(buffers[TRACKED]) == 3
    pushed.apply(buffers, 1.0, {}, 6)
    assert buffers[MEAN].tolist() == [3.0, 3.0]  # once


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_of_values_the_newest_parameters_and_then_the_lowest_rank_win(order: tuple[int, ...]) -> None:
    pushes = [
        (slot(queue=(VALUE, 7.0), calls=(CHANGE, 1)), 4, 1),
        (slot(queue=(VALUE, 8.0), calls=(CHANGE, 2)), 4, 2),
        (slot(queue=(VALUE, 9.0), calls=(CHANGE, 3)), 3, 0),  # late
    ]
    buffers, pushed, changed = server(), PushedBuffers(LAYOUT), dict[int, int]()
    for i in order:
        data, base, rank = pushes[i]
        pushed.add(data, samples=1, base=base, rank=rank)
    pushed.apply(buffers, 1.0, changed, 5)
    assert buffers[QUEUE].tolist() == [7.0] * 3 and int(buffers[CALLS]) == 2
    assert changed == {QUEUE: 5}


def test_a_late_value_does_not_turn_back_what_was_set_meanwhile_and_its_pointer_stays_with_it() -> None:
    buffers, pushed = server(), PushedBuffers(LAYOUT)
    late = slot(queue=(VALUE, 9.0), calls=(CHANGE, 1), ready=(VALUE, 0))
    pushed.add(late, samples=1, base=4, rank=0)
    pushed.apply(buffers, 1.0, {QUEUE: 5}, 6)
    assert [float(buffers[i].sum()) for i in (CALLS, QUEUE, READY)] == [1.0, 3.0, 1.0]
    pushed.add(late, samples=1, base=4, rank=0)
    pushed.apply(buffers, 1.0, {QUEUE: 4}, 7)  # nobody has
    assert [float(buffers[i].sum()) for i in (CALLS, QUEUE, READY)] == [2.0, 27.0, 0.0]


def test_a_counter_alone_counts_however_late_it_is() -> None:
    buffers, pushed = server(), PushedBuffers(LAYOUT)
    pushed.add(slot(calls=(CHANGE, 1)), samples=1, base=0, rank=0)
    pushed.apply(buffers, 1.0, {QUEUE: 5, CALLS: 5}, 6)
    assert int(buffers[CALLS]) == 2


def test_after_a_push_that_waits_in_the_pool_a_pull_brings_the_servers_buffers() -> None:
    """Else the rank's own running statistics would be validated, on this rank only."""
    norm = torch.nn.BatchNorm1d(3)
    layout = FlatLayout.of(list(norm.named_parameters()), list(norm.named_buffers()))
    worker = Pusher(Note(layout), layout, list(norm.parameters()), lambda: list(norm.buffers()))
    worker.pull()
    worker.claim(0, 0)
    norm(torch.randn(4, 3)).sum().backward()
    worker.push()
    assert norm.running_var is not None and bool((norm.running_var != 0).any())
    worker.pull()
    assert all(not bool(buffer.any()) for buffer in norm.buffers())  # as published: zeros
    worker.detach()
