"""Modules as users write them, trained through the cut by a pipeline of one process, or directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetero.pipeline.runtime.step.cut import BackboneCall, BackboneCut, graphs_to_retain
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.resumable import Done, ResumableStep, Suspended
from tests.ranks.pipeline.resumable_kit import resumable

D = 5


# ---- models: what users write ----------------------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, backbone, head; subclasses change ``training_step``."""

    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        self.backbone = self.make_backbone()
        self.to(self.dtype)

    def make_backbone(self) -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def cut(self) -> BackboneCut:
        return BackboneCut(self.backbone)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(self.embed(batch))).square().mean()


class Skip(Net):
    """Uses the graph before the backbone twice, at two places."""

    def training_step(self, batch: Tensor) -> Tensor:
        z = self.embed(batch)
        x = z.tanh()
        return self.head(self.backbone(x) * x + z).square().mean()


class SkipOfLeaf(Net):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(batch) + batch).square().mean()


class InPlace(Net):
    """What a leaf that requires a gradient would not allow."""

    def training_step(self, batch: Tensor) -> Tensor:
        y = self.backbone(self.embed(batch))
        y *= 2.0
        return self.head(F.leaky_relu(y, inplace=True)).square().mean()


class Twice(Net):
    """The second call takes what the first returned; both share the embedding."""

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).tanh()
        y = self.backbone(x)
        z = self.backbone(y * x)
        return (self.head(z).square() + y.sum(1, keepdim=True)).mean()


class TwoWithoutLink(Net):
    """Contrastive learning: two views through one encoder."""

    def training_step(self, batch: Tensor) -> Tensor:
        a, b = self.backbone(self.embed(batch)), self.backbone(self.embed(-batch))
        return (self.head(a) * self.head(b)).mean()


class Nested(Net):
    """Nested tuples in, a dict with an integer tensor and a number out."""

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, xs: tuple[Tensor, tuple[Tensor, Tensor]], scale: float = 1.0, *, mask: Any) -> dict[str, Any]:
            a, (b, i) = xs
            return {"a": self.layer(a) * scale, "rest": [self.layer(a) + b * mask["m"], i + 1], "unused": a * 2, "n": 3}

    def make_backbone(self) -> nn.Module:
        return Nested.Backbone()

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        out = self.backbone((x, (batch, torch.arange(D))), 0.5, mask={"m": x.detach(), "none": None})
        assert out["n"] == 3 and out["rest"][1].tolist() == [1, 2, 3, 4, 5]
        return self.head(out["a"] + out["rest"][0]).square().mean()


class Autocast(Net):
    """The precision plugin's block around the step is the caller's; this one is the step's own, held open."""

    dtype = torch.float32

    def training_step(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.backbone(self.embed(batch))).square().mean()


class Checkpoints(Net):
    def before(self, x: Tensor) -> Tensor:
        return F.dropout(self.embed(x).tanh(), 0.4)

    def after(self, y: Tensor) -> Tensor:
        return F.dropout(self.head(F.dropout(y, 0.4)), 0.4)

    def training_step(self, batch: Tensor) -> Tensor:
        x = checkpoint(self.before, batch.requires_grad_(), use_reentrant=False)
        y = checkpoint(self.after, self.backbone(x), use_reentrant=False)
        return y.square().mean()


# ---- a pipeline of one process, and a direct run ---------------------------------------------------------------


class Stage:
    """Computes the backbone on what a step hands out, apart from the step's graph."""

    def __init__(self, net: Net) -> None:
        self.forward = net.backbone
        self.pending: list[tuple[BackboneCall, list[Tensor]]] = []

    def reply(self, call: BackboneCall) -> Any:
        with torch.set_grad_enabled(call.grad_enabled):
            autocast = call.autocast
            with torch.autocast("cpu", dtype=autocast.get("cpu", torch.bfloat16), enabled="cpu" in autocast):
                args, kwargs = call.route.call(0).arguments((), dict(enumerate(call.inputs)), torch.device("cpu"))
                outputs = self.forward(*args, **kwargs)
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if call.grad_enabled:
            self.pending.append((call, tensors))
        return call.reply(outputs)

    def backward(self, loss: Tensor) -> None:
        keep, *keeps = graphs_to_retain(loss, [call for call, _ in self.pending])
        loss.backward(retain_graph=keep)
        for (call, outputs), keep in zip(reversed(self.pending), keeps, strict=True):
            grads = call.output_grads()
            pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
            inputs = call.inputs
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
            call.backward([x.grad for x in inputs], retain_graph=keep)


def batches(net: Net, number: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(9)
    return [torch.randn(3 + k, D, generator=g, dtype=net.dtype) for k in range(number)]


def direct(net: Net, data: Sequence[Tensor]) -> list[Tensor]:
    losses = []
    for k, batch in enumerate(data):
        seed, calls = stream_seed(0, k), count(1)
        seed_streams(seed)
        behind = net.backbone.register_forward_hook(
            lambda *_, seed=seed, calls=calls: seed_streams(stream_seed(seed, next(calls)))
        )
        loss = net.training_step(batch)
        behind.remove()
        loss.backward()
        losses.append(loss.detach())
    return losses


def piped(net: Net, data: Sequence[Tensor], carrier: ExitStack, step: Callable[..., Any] | None = None) -> list[Tensor]:
    """All steps are in flight together; they go on in turns, from the last to the first."""
    step = step or net.training_step
    losses: dict[int, Tensor] = {}
    stages = [Stage(net) for _ in data]
    with net.cut():
        steps = [
            resumable(carrier, lambda batch=batch: step(batch), stream_seed(0, k))
            for k, batch in enumerate(data)
        ]
        outcomes = {k: step.start() for k, step in enumerate(steps)}
        while outcomes:
            for k, outcome in sorted(outcomes.items(), reverse=True):
                if isinstance(outcome, Done):
                    losses[k] = outcomes.pop(k).value
                else:
                    outcomes[k] = steps[k].resume(stages[k].reply(outcome.value))
    for k, stage in enumerate(stages):
        stage.backward(losses[k])
    return [losses[k].detach() for k in range(len(data))]


def gradients(net: Net) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


def assert_same(got: Any, expected: Any, exactly: bool = True) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-12, "atol": 1e-15}
    torch.testing.assert_close(got, expected, **tolerance)


def suspended(carrier: ExitStack, body: Callable[[nn.Module], Any]) -> tuple[ResumableStep, BackboneCall]:
    backbone = nn.Identity()
    with BackboneCut(backbone):
        step = resumable(carrier, lambda: body(backbone), 0)
        call = step.start()
    assert isinstance(call, Suspended) and isinstance(call.value, BackboneCall)
    return step, call.value
