"""More of strangers: what steps and hooks change of trainer, optimizer and layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.kit import weights
from tests.ranks.strangers.kit import ENGINES, ends, refusal, trainer
from tests.ranks.strangers.more_kit import Small, batches, fit, numbers, right, right_or_refused, unused


def rate_in_the_step(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#328, PL#17972 kind: warm-up by hand, in training_step."""

    class Warm(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.02 * (1 + self.trainer.global_step)
            return self.loss(batch)

    module = Warm()
    fit(rank, world, engine, module)
    return weights(module)


def rate_before_the_step(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2934 kind: warm-up by hand, in on_train_batch_start."""

    class Warm(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.02 * (1 + self.trainer.global_step)

    module = Warm()
    fit(rank, world, engine, module)
    return weights(module)


def schedule_in_the_step(rank: int, world: int, engine: str) -> dict[str, Any]:
    """voicepaw/so-vits-svc-fork#291 kind: training_step steps a scheduler, in automatic optimization."""

    class Stepped(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [
                {
                    "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
                    "interval": "epoch",
                    "frequency": 1000,
                }
            ]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step:
                self.lr_schedulers().step()
            return self.loss(batch)

    module = Stepped()
    fit(rank, world, engine, module)
    return weights(module)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, alpha: float) -> Any:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return -ctx.alpha * g, None


class Reverse(nn.Module):
    alpha = 0.1

    def forward(self, x: Any) -> Any:
        return Reversal.apply(x, self.alpha) * (1 + self.alpha)


def attribute_of_a_layer(rank: int, world: int, engine: str, where: str) -> dict[str, Any]:
    """DANN (wearepal/conduit#4): alpha of a gradient reversal grows; it is written in the step, or in a hook."""

    class Dann(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[3] = Reverse()

        def grow(self) -> None:
            self.net[3].alpha = 0.1 * (1 + self.trainer.global_step)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if where == "hook":
                self.grow()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "step":
                self.grow()
            return self.loss(batch)

    module = Dann()
    fit(rank, world, engine, module)
    return weights(module)


def frozen_in_the_step(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#18457 kind: training_step freezes a layer after two steps."""

    class Freezes(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 2:
                self.net[4].requires_grad_(False)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Freezes()
    unused(rank, world, engine, max_epochs=1).fit(module, batches(numbers(64), world))
    return weights(module)


def clip_changed(rank: int, world: int, engine: str, how: str) -> dict[str, Any]:
    """Lightning's documentation: the clip value depends on the epoch; or it is written on the trainer."""

    class Clips(Small):
        def on_train_epoch_start(self) -> None:
            if how == "trainer":
                self.trainer.gradient_clip_val = 0.1 * (1 + self.current_epoch)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if how == "docs":
                gradient_clip_val = 0.1 * (1 + self.current_epoch)
            self.clip_gradients(
                optimizer,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
            )

    module = Clips()
    fit(rank, world, engine, module, max_epochs=2, **({"gradient_clip_val": 5.0} if how == "trainer" else {}))
    return weights(module)


def own_backward(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's documentation: backward() is overridden."""

    class Twice(Small):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            (2 * loss).backward()

    module = Twice()
    fit(rank, world, engine, module)
    return weights(module)


def accumulated_by_hand(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2595, PL#5771: manual optimization that accumulates two batches without synchronising the first."""

    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
                self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    module = Manual()
    fit(rank, world, engine, module, batches(numbers(64), world))
    return weights(module)


def clamped_data(rank: int, world: int, engine: str, how: str) -> dict[str, Any]:
    """PL#2382, WassersteinGAN#32: WGAN's clamp, by p.data, in three spellings."""

    class Clamped(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            for p in self.parameters():
                if how == "data":
                    p.data.clamp_(-0.4, 0.4)
                elif how == "assign":
                    p.data = p.data.clamp(-0.4, 0.4)
                else:
                    with torch.no_grad():
                        p.copy_(p.clamp(-0.4, 0.4))

    module = Clamped()
    fit(rank, world, engine, module)
    return weights(module)


def loaded_at_the_start(rank: int, world: int, engine: str, when: str) -> dict[str, Any]:
    """PL#1982 kind: pretrained weights are loaded in a hook."""

    class Pretrained(Small):
        def load(self) -> None:
            g = torch.Generator().manual_seed(9)
            own = {
                k: torch.randn(v.shape, generator=g, dtype=torch.float64)
                for k, v in Small().net.state_dict().items()
            }
            self.net.load_state_dict(own)

        def on_fit_start(self) -> None:
            if when == "fit":
                self.load()

        def on_train_start(self) -> None:
            if when == "train":
                self.load()

    module = Pretrained()
    fit(rank, world, engine, module)
    return weights(module)


def device_of_parameters(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#19662 kind: hooks ask next(self.parameters()).device, numel(), size() and dtype."""
    told: dict[str, Any] = {}

    class Asks(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            first, last = next(self.parameters()), self.net[4].weight
            told["device"] = [str(first.device), str(last.device)]
            told["ones"] = float(
                torch.ones(2, device=first.device).sum() + torch.ones(2, device=last.device).sum()
            )
            told["numel"] = sum(p.numel() for p in self.parameters() if p.requires_grad)
            told["sizes"] = [tuple(p.size()) for p in self.parameters()]
            told["kinds"] = [
                isinstance(p, nn.Parameter) and p.is_floating_point() and p.dim() > 0
                for p in self.parameters()
            ]

    module = Asks()
    fit(rank, world, engine, module)
    return {**weights(module), **told}


def functional_inner_loop(rank: int, world: int, engine: str) -> dict[str, Any]:
    """learn2learn#197, MAML: an inner step by functional_call, the loss behind it."""

    class Maml(Small):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            params = dict(self.net.named_parameters())
            inner = (torch.func.functional_call(self.net, params, x) - y).square().mean()
            slopes = torch.autograd.grad(inner, tuple(params.values()), create_graph=True)
            moved = {
                k: p - 0.1 * g.mean() * 0 - 0.0 * g for (k, p), g in zip(params.items(), slopes, strict=True)
            }
            return (torch.func.functional_call(self.net, moved, x) - y).square().mean()

    module = Maml()
    fit(rank, world, engine, module)
    return weights(module)


def old_model_kept(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2026 kind, learning without forgetting: a copy of the network is kept at each epoch's start."""

    class Keeps(Small):
        def on_train_epoch_start(self) -> None:
            self.old = copy.deepcopy(self.net).requires_grad_(False)

        def loss(self, batch: Any) -> Any:
            x, y = batch
            out = self.net(x)
            return (out - y).square().mean() + 0.5 * (out - self.old(x)).square().mean()

    module = Keeps()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def loss_summed_over_ranks(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#6200 kind: on_train_batch_end sums losses over ranks, weighted by rows, with a collective of its own."""
    told: list[float] = []

    class Sums(Small):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            box = torch.stack([batch[1].sum(), torch.tensor(float(len(batch[0])), dtype=torch.float64)])
            if world > 1:
                dist.all_reduce(box)
            told.append(float(box[0]))

    module = Sums()
    fit(rank, world, engine, module, batches(numbers(48), world))
    return {"told": told}


def names_of_gradients(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#17212: names of parameters without gradient after backward: the usual search for unused ones."""
    told: list[str] = []

    class Searches(Small):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2).double()

        def on_after_backward(self) -> None:
            told[:] = [name for name, p in self.named_parameters() if p.grad is None]

    module = Searches()
    unused(rank, world, engine, max_epochs=1).fit(module, batches(numbers(), world))
    return {"told": told}


def copy_at_the_start(rank: int, world: int, engine: str, when: str) -> dict[str, Any]:
    """fairscale#1061 kind: a frozen copy of the network, made in a hook before the first batch, teaches it."""

    class Taught(Small):
        def take(self) -> None:
            with torch.no_grad():
                self.old = copy.deepcopy(self.net).requires_grad_(False)

        def setup(self, stage: str) -> None:
            if when == "setup":
                self.take()

        def on_fit_start(self) -> None:
            if when == "fit":
                self.take()

        def on_train_start(self) -> None:
            if when == "train":
                self.take()

        def loss(self, batch: Any) -> Any:
            x, y = batch
            out = self.net(x)
            return (out - y).square().mean() + 0.5 * (out - self.old(x + 1)).square().mean()

    module = Taught()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


@pytest.mark.stock_ddp("rates_in_hooks")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("situation", "how"),
    [
        (rate_before_the_step, []),
        (attribute_of_a_layer, ["hook"]),
        (clip_changed, ["trainer"]),
        (clip_changed, ["docs"]),
        (loaded_at_the_start, ["fit"]),
        (loaded_at_the_start, ["train"]),
    ],
)
@pytest.mark.short(
    "pipeline", "rate_before_the_step", "attribute_of_a_layer", "clip_changed-how2", "loaded_at_the_start-how5"
)  # fmt: skip
def test_set_in_hooks(situation: Any, how: list[Any], engine: str) -> None:
    right(situation, engine, *how)


IN_STEPS = [(rate_in_the_step, []), (schedule_in_the_step, [])]
OF_LAYERS = [(attribute_of_a_layer, ["step"]), (frozen_in_the_step, [])]


@pytest.mark.stock_ddp("rates_in_step", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
@pytest.mark.parametrize(("situation", "how"), [*IN_STEPS, *OF_LAYERS])
def test_set_in_steps(situation: Any, how: list[Any], engine: str) -> None:
    right(situation, engine, *how)


@pytest.mark.stock_ddp("rates_in_step", "pipeline", refused="one rank of each group runs it")
@pytest.mark.parametrize(("situation", "how"), IN_STEPS)
def test_settings_changed_in_steps_are_refused(situation: Any, how: list[Any]) -> None:
    assert "has changed 'lr' of parameter group 0" in refusal(situation, "pipeline", *how)


@pytest.mark.parametrize(("situation", "how"), OF_LAYERS)
def test_layers_of_others_changed_in_steps_are_refused(situation: Any, how: list[Any]) -> None:
    assert ", of a layer that another rank runs" in refusal(situation, "pipeline", *how)


@pytest.mark.stock_ddp("backward", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
@pytest.mark.parametrize("situation", [own_backward, accumulated_by_hand])
def test_backward_by_hand(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("weights_set_batch", "balanced", "pipeline")
@pytest.mark.stock_ddp("weights_set_batch", "stale", refused="the server has them")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["data", "assign", "copy"])
@pytest.mark.short("assign")
def test_clamped(engine: str, how: str) -> None:
    assert bool(right_or_refused(clamped_data, engine, how)) == (engine == "stale")


@pytest.mark.stock_ddp("gradients_of_gradients", "balanced", "stale")
@pytest.mark.stock_ddp("gradients_of_gradients", "pipeline", refused="the layers are on several ranks")
@pytest.mark.parametrize("engine", ENGINES)
def test_inner_loop(engine: str) -> None:
    if engine == "pipeline":
        assert "torch.autograd.grad cannot go through it" in refusal(functional_inner_loop, engine)
    else:
        right(functional_inner_loop, engine)


@pytest.mark.stock_ddp("copies", "balanced", "stale")
@pytest.mark.stock_ddp("copies", "pipeline", differs="refused where it is made later than in `setup`")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("situation", "how"),
    [(old_model_kept, []), (copy_at_the_start, ["setup"]), (copy_at_the_start, ["train"])],
)
@pytest.mark.short("old_model_kept", "pipeline")
def test_copies(situation: Any, how: list[Any], engine: str) -> None:
    refused = engine == "pipeline" and how != ["setup"]
    assert bool(right_or_refused(situation, engine, *how)) == refused


@pytest.mark.stock_ddp("parameters_asked")
@pytest.mark.parametrize("engine", ENGINES)
def test_devices_asked(engine: str) -> None:
    right(device_of_parameters, engine)


@pytest.mark.stock_ddp("all_gather_hook", "balanced", "stale")
@pytest.mark.parametrize(
    "engine", ["balanced", "stale"]
)  # pipeline: members have no batch, and no others' gradients
@pytest.mark.parametrize("situation", [loss_summed_over_ranks, names_of_gradients])
def test_looked_at_after_batches(situation: Any, engine: str) -> None:
    right(situation, engine)


class NeedsHooks(Small):
    """PL#2026 kind: training_step needs what a hook has made."""

    def on_train_start(self) -> None:
        self.scale = 2.0

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) * self.scale


def made_in_a_hook(rank: int, world: int, engine: str) -> None:
    trainer(rank, world, engine, {"pipeline": {"backbone": "net"}}).fit(
        NeedsHooks(), batches(numbers(), world)
    )


def test_a_step_tried_before_hooks_says_so() -> None:
    """Nothing is measured with a plan given, so nothing is tried."""
    assert "make what it needs in __init__, setup" in refusal_of(made_in_a_hook, "pipeline")


def refusal_of(situation: Any, engine: str) -> str:
    with pytest.raises((AttributeError, RuntimeError)) as raised:
        ends(situation, engine)
    return str(raised.value)
