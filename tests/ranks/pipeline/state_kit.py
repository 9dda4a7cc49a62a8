"""What one rank has of a model and its optimizers, beside the same model undivided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState, load_mapped
from lightning_hetero.pipeline.runtime.ownership.owner_groups import share_initial
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.ownership.pruning import prune
from lightning_hetero.types import PipelinePlan
from tests.ranks.pipeline.ownership_kit import Counted, Model, frozen, same

OPTIMIZERS: dict[str, Callable[[Model], list[Optimizer]]] = {
    "Adam": lambda m: [torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True)],
    "two, one without the frozen": lambda m: [
        torch.optim.SGD(
            [{"params": list(m.embed.parameters())}, {"params": [m.unused], "lr": 0.5}], lr=0.1, momentum=0.9
        ),
        torch.optim.AdamW([p for p in m.net.parameters() if p.requires_grad], fused=True),
    ],
    "Adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)],
}


class Divided:
    """What a rank has of a model and its optimizers, beside the same undivided."""

    def __init__(self, rank: int, the_plan: PipelinePlan, kind: str) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.model, self.whole = Model(seed=rank), Model(seed=0)
        self.held = Ownership(self.model, self.model.layers, the_plan, rank=rank)
        share_initial(self.model, self.held, world)
        mine, theirs = self.held.tensors(self.model), self.held.tensors(self.whole)
        assert all(same(mine[name], theirs[name]) for name in mine if self.held.holds(name))
        self.optimizers, self.references = OPTIMIZERS[kind](self.model), OPTIMIZERS[kind](self.whole)
        prune(self.model, self.optimizers, self.held)
        self.state = WholeState(self.model, self.held, group=world)

    def train(self, steps: int, seed: int) -> None:
        """Updates both with the same gradients; what else a step changes is copied."""
        for step in range(steps):
            generator = torch.Generator().manual_seed(seed + step)
            self.whole.zero_grad()
            self.whole.loss(torch.randn(8, 6, generator=generator, dtype=torch.float64)).backward()
            mine, theirs = self.held.tensors(self.model), self.held.tensors(self.whole)
            for name in filter(self.held.holds, mine):
                if name in self.held.parameters:
                    gradient = theirs[name].grad
                    mine[name].grad = None if gradient is None else gradient.clone()
                else:
                    mine[name].copy_(theirs[name])
            for number, layer in enumerate(self.model.layers):
                if isinstance(layer, Counted) and self.held.rank in self.held.owners_of_key(f"net.{number}.seen"):
                    layer.seen = self.whole.net[number].seen
            for optimizer in (*self.optimizers, *self.references):
                optimizer.step()

    def saved(self) -> dict[str, Any]:
        return {
            "state": self.state.state_dict(),
            "optimizers": [self.state.optimizer_state(optimizer) for optimizer in self.optimizers],
        }

    def expected(self) -> dict[str, Any]:
        return {
            "state": self.whole.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.references],
        }

    def load(self, path: str) -> None:
        checkpoint = load_mapped(path, weights_only=True)
        assert checkpoint is not None
        assert self.state.load_state_dict(checkpoint["state"]) == ([], [])
        for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            self.state.load_optimizer_state(optimizer, state)
            assert not any(p.is_meta for p in optimizer.state)
        self.whole.load_state_dict(checkpoint["state"])
        for optimizer, state in zip(self.references, frozen(checkpoint["optimizers"]), strict=True):
            optimizer.load_state_dict(state)
