"""Small things that resuming and validating rest on: hooks of batches gone by, samples left, buffers put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero.stale.layout import FlatLayout
from lightning_hetero.stale.spans import leaving
from lightning_hetero.stale.worker import Worker
from lightning_hetero.transport.areas import ParameterArea, Slot
from lightning_hetero.transport.base import Link, Reply, Request, Say
from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer, stale
from tests.ranks.test_stale_resume_engines import Watched, pair

pytestmark = pytest.mark.ranks


class Counting(Callback):
    """Counts batches; looks at none, so it is called for every one of them."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1


class Looking(Callback):
    """Looks at batches, so it is called for those of its rank."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples.append(len(batch[0]))
        assert outputs["loss"] is not None


def counting_job(rank: int, world: int) -> tuple[int, list[int]]:
    counting, looking = Counting(), Looking()
    trainer = rank_trainer(rank, world, stale(policy="asp"), max_epochs=2, callbacks=[counting, looking])
    trainer.fit(Watched(rank, slow_s=0.05), pair()[0])
    return counting.batches, looking.samples


def test_hooks_that_look_at_no_batch_are_called_for_every_batch_on_every_rank() -> None:
    """Or the ranks would not come to save a checkpoint together."""
    ranks = run_ranks(2, counting_job)
    assert [batches for batches, _ in ranks] == [2 * 17] * 2
    assert all(0 < len(samples) <= 2 * 17 and min(samples) > 0 for _, samples in ranks)
    assert len(ranks[1][1]) < 2 * 17  # the slow rank was passed by


@pytest.mark.parametrize(
    ("ticks", "spans", "kept"),
    [
        (2, [[0, 8], [10, 18]], [[0, 8], [10, 18]]),  # two are free
        (3, [[0, 8], [9, 19]], [[0, 8], [9, 18]]),
        (4, [[0, 17], [18, 20]], [[0, 16]]),
        (2, [[0, 16], [18, 24]], [[0, 16], [18, 20]]),  # beyond the last batch that is trained
    ],
)  # fmt: skip
def test_each_batch_to_come_has_a_sample(ticks: int, spans: list[list[int]], kept: list[list[int]]) -> None:
    """The others may have gone on while a rank failed: then the last samples are trained again."""
    assert [list(span) for span in leaving(ticks, spans, 20)] == kept


class Pooled(Link):
    """A server that pools every push and never applies one."""

    def __init__(self, layout: FlatLayout) -> None:
        self.slot = Slot(torch.zeros(Slot.size(layout.slot_bytes), dtype=torch.uint8), layout.slot_bytes)
        self.gradient = self.slot.data
        self.area = ParameterArea(
            torch.zeros(ParameterArea.size(layout.bytes), dtype=torch.uint8), layout.bytes
        )
        self.area.publish(0, torch.zeros(layout.bytes, dtype=torch.uint8))

    def open_slot(self) -> None:
        self.slot.open()

    def ready(self, start: int, stop: int) -> None:
        pass

    def close_slot(self) -> int:
        return self.slot.close()

    def call(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        return Reply(kind=Say.GRANT, epoch=0, tick=0, version=0, lease=1, numbers=(0, 4))

    def read_parameters(self, into: torch.Tensor) -> int:
        return self.area.read(into)

    def newest_version(self) -> int:
        return self.area.newest()

    def read_state(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


def test_after_a_push_that_waits_in_the_pool_a_pull_brings_the_servers_buffers() -> None:
    """Else the rank's own running statistics would be validated, on this rank only."""
    norm = torch.nn.BatchNorm1d(3)
    layout = FlatLayout.of(list(norm.named_parameters()), list(norm.named_buffers()))
    worker = Worker(Pooled(layout), layout, list(norm.parameters()), list(norm.buffers()))
    worker.attach()
    worker.pull()
    worker.claim(0, 0)
    norm(torch.randn(4, 3)).sum().backward()
    worker.push()
    assert norm.running_var is not None and bool((norm.running_var != 0).any())
    worker.pull()
    assert all(not bool(buffer.any()) for buffer in norm.buffers())  # as published: zeros
    worker.detach()
