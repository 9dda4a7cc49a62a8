"""Buffers that a rank has pushed: the server's take their place, also while the push waits."""

from __future__ import annotations

import torch

from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.transport.base import Reply, Request, Say, WorkerLink
from lightning_hetero.transport.seqlock import ParameterArea, Slot
from tests.ranks.stale.kit import Pusher


class Pooled(WorkerLink):
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
    worker = Pusher(Pooled(layout), layout, list(norm.parameters()), lambda: list(norm.buffers()))
    worker.pull()
    worker.claim(0, 0)
    norm(torch.randn(4, 3)).sum().backward()
    worker.push()
    assert norm.running_var is not None and bool((norm.running_var != 0).any())
    worker.pull()
    assert all(not bool(buffer.any()) for buffer in norm.buffers())  # as published: zeros
    worker.detach()
