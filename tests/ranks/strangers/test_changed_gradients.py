"""User code that changes or reads gradients, and code that communicates inside a step, where each rank has a part."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradients
from torch.utils.data import DataLoader

from tests.ranks.kit import Toy, regression, weights
from tests.ranks.strangers import kit

pytestmark = pytest.mark.ranks

SAMPLES = 16


class Edited(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def by_hand(self, batch: Any, edit: Any = None) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if edit is not None:
            edit()
        optimizer.step()

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ClipsInHook(Edited):
    """Clips with torch's function before the step (PL#6328)."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip()


class ClipsLater(Edited):
    """The same with a limit that is not reached."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 100.0)


class OverridesClipping(Edited):
    """Overrides Lightning's hook and does not end in clip_gradients (PL#14598)."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip()


class ClipsByHand(Edited):
    """Manual optimization with torch's function, as most recipes have it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.by_hand(batch, self.clip)


class ClipsInStep(Edited):
    """An ``optimizer_step`` that runs the closure, clips, and steps."""

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:  # type: ignore[override]
        optimizer_closure()
        self.clip()
        optimizer.step()


class Signs(Edited):
    """Signs of gradients, past autograd's counter."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad.data.sign_()


class Noise(Callback):
    """Noise on gradients, as in differentially private or annealed training."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for p in pl_module.parameters():
            p.grad = p.grad + 0.1 * torch.randn_like(p.grad)


class Spikes(Edited):
    """Leaves out steps whose gradient is large."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for p in self.parameters():
            assert p.grad is not None
            p.grad.mul_(float(norm < 1e2))


class Reduces(Edited):
    """Sums the ranks' losses by torch itself (PL#6200)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach().clone())
        return loss


class ReducesWithGradients(Edited):
    """Features of all ranks in a contrastive loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return all_reduce_with_gradients(self.loss(batch))


class ReducesInHook(Edited):
    """The norm of all ranks."""

    def on_after_backward(self) -> None:
        dist.barrier()


REFUSED: dict[str, tuple[Any, list[Callback], str]] = {
    "hook": (ClipsInHook, [], "ClipsInHook.on_before_optimizer_step changes the gradients"),
    "hook, later": (ClipsLater, [], "ClipsLater.on_before_optimizer_step changes the gradients"),
    "override": (OverridesClipping, [], "OverridesClipping.configure_gradient_clipping changes the gradients"),
    "by hand": (ClipsByHand, [], "what is between backward and step (net.0.weight) changes"),
    "in the step": (ClipsInStep, [], "what is between backward and step (net.0.weight) changes"),
    "sign": (Signs, [], "Signs.on_after_backward changes the gradients"),
    "noise": (Edited, [Noise()], "Noise.on_before_optimizer_step changes the gradients"),
    "spikes": (Spikes, [], "Spikes.on_before_optimizer_step changes the gradients"),
    "all_reduce": (Reduces, [], "communicates with other ranks (allreduce) inside training_step"),
    "all_reduce, differentiable": (ReducesWithGradients, [], "communicates with other ranks"),
    "barrier": (ReducesInHook, [], "communicates with other ranks (barrier)"),
}


def fit(rank: int, world: int, engine: str, module: Any, callbacks: Any = (), **kwargs: Any) -> None:
    batch = SAMPLES if engine == "single" else SAMPLES // 2
    options: dict[str, Any] = {"max_epochs": 2, **kwargs}
    by_engine = {"balanced": kit.UNEVEN, "stale": {"policy": "bsp"}}
    trainer = kit.trainer(rank, world, engine, by_engine, callbacks=[*callbacks], **options)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=batch))


def refused(rank: int, world: int, engine: str) -> dict[str, str]:
    said: dict[str, str] = {}
    for name, (make, callbacks, _) in REFUSED.items():
        try:
            fit(rank, world, engine, make(), callbacks)
        except (TypeError, RuntimeError) as error:
            said[name] = str(error)
    return said


@pytest.mark.stock_ddp(
    "gradients_clipped", "stale", refused="a rank has the gradients of its part; `clip_gradients` works"
)  # fmt: skip
@pytest.mark.stock_ddp("all_gather_step", "stale", refused="ranks do not meet inside a batch")
def test_what_does_not_add_up_over_parts_is_refused() -> None:
    for said in kit.ends(refused, "stale"):
        for name, (*_, words) in REFUSED.items():
            assert words in said.get(name, "not refused"), name
            assert "hetero_balanced" in said[name]


class Linear(Edited):
    """What adds up: gradients centred, masked and scaled, a penalty by hand, NaN replaced; Lightning's clipping."""

    def on_after_backward(self) -> None:
        for name, p in self.net.named_parameters():
            assert p.grad is not None
            p.grad.nan_to_num_()
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
            if name == "0.bias":
                p.grad = p.grad * 0.3 + 0.01 * p.detach()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")


class LinearByHand(Edited):
    """Scaled by one number, and a part frozen, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.by_hand(batch, self.edit)

    def edit(self) -> None:
        first, second, *rest = self.parameters()
        first.grad = None
        assert second.grad is not None
        second.grad.zero_()
        for p in rest:
            assert p.grad is not None
            p.grad.div_(2.0)


class LogsNorms(Edited):
    """Lightning's own recipe for gradient norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = max(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)


def adds_up(rank: int, world: int, engine: str) -> list[Edited]:
    modules = [Linear(), LinearByHand()]
    for module in modules:
        fit(rank, world, engine, module)
    return modules


@functools.cache
def oracles() -> list[Edited]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return adds_up(0, 1, "single")


def right(rank: int, world: int, engine: str) -> Any:
    ended = [weights(module) for module in adds_up(rank, world, engine)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(rank, world, engine, LogsNorms(), max_epochs=1)
    told = [str(w.message) for w in caught if "sees the gradients of this rank's part" in str(w.message)]
    return ended, told


@pytest.mark.stock_ddp("gradients_linear", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_what_adds_up_over_parts_is_right(engine: str) -> None:
    ranks = kit.ends(right, engine)
    for ended, _ in ranks:
        assert max(map(kit.off, ended, oracles())) < 1e-9
    told = [words for _, words in ranks for words in words]
    assert bool(told) == (engine == "stale") and all("LogsNorms.on_before_optimizer_step" in words for words in told)
