"""A worker on a link that only takes notes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.transport.base import Ask, Reply, Request, Say
from lightning_hetero.transport.flags import PushFlag
from lightning_hetero.transport.link import RemoteLink
from tests.ranks.stale.kit import Pusher


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def weight_of(model: Any) -> nn.Parameter:
    return model[0].weight


class Note(RemoteLink):
    """Accepts everything; keeps what was pushed."""

    def __init__(self, layout: FlatLayout) -> None:
        self.rank, self.layout = 0, layout
        self.gradient = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        self.calls: list[str] = []
        self.ready_now: list[tuple[int, int]] = []
        self.pushes: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.version = 0
        self.published = torch.zeros(layout.bytes, dtype=torch.uint8)
        self.reads = 0
        self.reply: Reply = Reply(kind=Say.ASSIGNED, assignment=1, numbers=(0, 4))

    def open_slot(self) -> None:
        assert not self.calls or self.calls[-1] == "closed", "opened twice"
        self.calls.append("open")
        self.ready_now = []

    def ready(self, start: int, stop: int) -> None:
        self.calls.append("ready")
        self.ready_now.append((start, stop))

    def close_slot(self) -> int:
        self.calls.append("closed")
        return self.calls.count("closed")

    def call(self, request: Request) -> Reply:
        self.requests.append(request)
        if request.kind is Ask.PUSH:
            layout = self.layout
            flags, buffers = (f.tolist() for f in layout.flags_of(self.gradient))
            gradients: list[Tensor | None] = []
            for i, entry in enumerate(layout.parameters):
                pool = entry.empty().copy_(layout.gradient_of(self.gradient, i))
                gradients.append(pool if flags[i] else None)
            values = [
                layout.buffer_of(self.gradient, i).clone() if f else None for i, f in enumerate(buffers)
            ]
            self.pushes.append({"gradients": gradients, "buffers": values, "ready": list(self.ready_now)})
            if not request.flags & PushFlag.FINAL:
                return Reply(kind=Say.APPLIED)
        return self.reply

    def read_parameters(self, into: Tensor) -> int:
        self.reads += 1
        into.copy_(self.published)
        return self.version

    def newest_version(self) -> int:
        return self.version

    def read_state(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


def start(
    overlap: bool | None = True, device: str = "cpu", **options: Any
) -> tuple[nn.Sequential, Note, Pusher]:
    model = mlp().to(device)
    optimizers = sgd(model)
    layout = FlatLayout.of(
        list(model.named_parameters()), list(model.named_buffers()), optimizers=optimizers
    )
    link = Note(layout)
    worker = Pusher(
        link, layout, list(model.parameters()), lambda: list(model.buffers()), optimizers, overlap=overlap,
        **options,
    )  # fmt: skip
    link.published.copy_(worker.weights.area)
    return model, link, worker


def backward(model: nn.Module, scale: float = 1.0) -> None:
    torch.manual_seed(3)
    inputs = torch.randn(6, 5).to(next(model.parameters()).device)
    (scale * model(inputs).square().sum()).backward()


def pushed(model: nn.Module, link: Note) -> bool:
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return same(link.pushes[-1]["gradients"], expected)


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


def now(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().cpu().clone() for p in model.parameters()]
