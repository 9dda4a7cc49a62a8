"""More of strangers: gradients, optimizers and schedules."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR

from tests.ranks.kit import weights
from tests.ranks.strangers.kit import ENGINES, refusal
from tests.ranks.strangers.more_kit import Small, batches, fit, numbers, right, right_or_refused, unused


def gradient_penalty(rank: int, world: int, engine: str) -> dict[str, Any]:
    """pytorch#47562: a penalty on the gradient by the input, in automatic optimization."""

    class Penalised(Small):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            x = x.clone().requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return (out - y).square().mean() + 0.1 * slope.square().sum(1).mean()

    module = Penalised()
    fit(rank, world, engine, module)
    return weights(module)


def two_backwards(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#4976: manual_backward twice before one step."""

    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss((x, y)))
            self.manual_backward(0.5 * self.loss((x + 1, y)))
            optimizer.step()

    module = Manual()
    fit(rank, world, engine, module)
    return weights(module)


def toggled(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#5292, PL#5775: toggle_optimizer with two optimizers."""

    class Gan(Small):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
            with torch.no_grad():
                for p in self.critic.parameters():
                    p.fill_(0.3)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            generator, critic = self.optimizers()
            self.toggle_optimizer(generator)
            loss = -self.critic(self.net(x)).mean()
            generator.zero_grad()
            self.manual_backward(loss)
            generator.step()
            self.untoggle_optimizer(generator)
            self.toggle_optimizer(critic)
            loss = (self.critic(self.net(x).detach()) - self.critic(y)).tanh().mean()
            critic.zero_grad()
            self.manual_backward(loss)
            critic.step()
            self.untoggle_optimizer(critic)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.net.parameters(), 0.02),
                torch.optim.SGD(self.critic.parameters(), 0.1),
            ]

    module = Gan()
    unused(rank, world, engine, max_epochs=2).fit(module, batches(numbers(), world))
    return weights(module)


def hook_on_parameter(rank: int, world: int, engine: str, when: str) -> dict[str, Any]:
    """pytorch#8023: hooks of parameters change each gradient."""

    class Halved(Small):
        def __init__(self) -> None:
            super().__init__()
            if when == "init":
                self.halve()

        def halve(self) -> None:
            for p in self.parameters():
                p.register_hook(lambda g: g * 0.5)

        def on_fit_start(self) -> None:
            if when == "start":
                self.halve()

        def on_train_start(self) -> None:
            if when == "train":
                self.halve()

    module = Halved()
    fit(rank, world, engine, module)
    return weights(module)


def hook_on_layer(rank: int, world: int, engine: str) -> dict[str, Any]:
    """pytorch#127964 kind: a forward hook scales a layer's output; a backward hook scales its gradient."""

    class Hooked(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[2].register_forward_hook(lambda m, i, out: out * 2)
            self.net[4].register_full_backward_pre_hook(lambda m, g: (g[0] * 3,))

    module = Hooked()
    fit(rank, world, engine, module)
    return weights(module)


def weight_norm(rank: int, world: int, engine: str) -> dict[str, Any]:
    """pytorch#22095 kind: weights computed from others by a parametrization."""

    class Normed(Small):
        def __init__(self) -> None:
            super().__init__()
            for layer in (self.net[0], self.net[4]):
                nn.utils.parametrizations.weight_norm(layer)

    module = Normed()
    fit(rank, world, engine, module)
    return weights(module)


def learned_loss_weights(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Uncertainty weights of several losses are parameters beside the network."""

    class Weighted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def loss(self, batch: Any) -> Any:
            x, y = batch
            out = self.net(x)
            losses = torch.stack([(out - y).square().mean(), (out + y).square().mean()])
            return (losses * (-self.log_vars).exp() + self.log_vars).sum()

    module = Weighted()
    fit(rank, world, engine, module)
    return weights(module)


def prototypes_normalised(rank: int, world: int, engine: str, when: str) -> dict[str, Any]:
    """SwAV (bolts#648): rows of the last layer are normalised before each batch; or its first gradients are dropped."""

    class Swav(Small):
        def normalise(self) -> None:
            with torch.no_grad():
                w = self.net[4].weight
                w.copy_(nn.functional.normalize(w.data.clone(), dim=1))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if when == "batch":
                self.normalise()

        def on_after_backward(self) -> None:
            if when == "cancel" and self.trainer.current_epoch == 0:
                for name, p in self.named_parameters():
                    if "net.4" in name:
                        p.grad = None

    module = Swav()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def clipped_by_unit(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#14598 kind: adaptive clipping of each parameter in configure_gradient_clipping."""

    class Agc(Small):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            for p in self.parameters():
                if p.grad is None:
                    continue
                limit = 0.05 * p.detach().norm()
                norm = p.grad.norm()
                if norm > limit:
                    p.grad.mul_(limit / norm)

    module = Agc()
    fit(rank, world, engine, module, gradient_clip_val=1.0)
    return weights(module)


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.slow, self.count = state["slow"], state["count"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for slow, group in zip(self.slow, self.param_groups, strict=True):
                for q, p in zip(slow, group["params"], strict=True):
                    q.add_(p.data - q, alpha=self.alpha)
                    p.data.copy_(q)
        return loss


def lookahead(rank: int, world: int, engine: str) -> dict[str, Any]:
    """lonePatient/lookahead_pytorch#3: an optimizer around another one, with weights of its own."""

    class Looking(Small):
        def configure_optimizers(self) -> Any:
            return Lookahead(torch.optim.Adam(self.parameters(), lr=0.05))

    module = Looking()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


class Lars(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norm, slope = p.norm(), p.grad.norm()
                    trust = torch.where(norm > 0, torch.where(slope > 0, norm / slope, 1.0), 1.0)
                    p.grad.mul_(0.1 * trust)
        super().step()
        return loss


def lars(rank: int, world: int, engine: str) -> dict[str, Any]:
    """bolts#648: LARS, which scales by norms of weights and gradients."""

    class Scaled(Small):
        def configure_optimizers(self) -> Any:
            return Lars(self.parameters(), lr=0.1, momentum=0.9)

    module = Scaled()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def adafactor(rank: int, world: int, engine: str) -> dict[str, Any]:
    """torch's Adafactor: factored moments."""

    class Factored(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters(), lr=0.05)

    module = Factored()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def warm_restarts(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2849, PL#2851: lr_scheduler_step with fractions of an epoch."""
    rates: list[float] = []

    class Restarted(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [
                {"scheduler": CosineAnnealingWarmRestarts(optimizer, 1, 2), "interval": "step"}
            ]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(self.trainer.global_step / self.trainer.num_training_batches)
            rates.append(scheduler.get_last_lr()[0])

    module = Restarted()
    fit(rank, world, engine, module, max_epochs=2)
    return {**weights(module), "rates": rates}


def two_groups_of_rates(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#4902: LambdaLR with a list of functions, and CosineAnnealingLR to estimated_stepping_batches after it."""

    class Grouped(Small):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.net[:2].parameters()},
                {"params": self.net[2:].parameters(), "lr": 0.05},
            ]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            first = LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
            second = CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
            return [optimizer], [{"scheduler": s, "interval": "step"} for s in (first, second)]

    module = Grouped()
    fits = fit(rank, world, engine, module, max_epochs=2)
    return {**weights(module), "lrs": [g["lr"] for g in fits.optimizers[0].param_groups]}


def zeroed_not_dropped(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's documentation: optimizer_zero_grad(set_to_none=False), and on_before_zero_grad."""
    norms: list[float] = []

    class Zeroed(Small):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            norms.append(float(len(norms)))

    module = Zeroed()
    fit(rank, world, engine, module)
    return {**weights(module), "calls": len(norms)}


def momentum_dropped(rank: int, world: int, engine: str, how: str) -> dict[str, Any]:
    """PL#9982, pytorch#37410: the optimizer's state is dropped, or made anew, at the start of an epoch."""

    class Dropped(Small):
        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch != 1:
                return
            optimizer = self.trainer.optimizers[0]
            if how == "clear":
                optimizer.state.clear()
            elif how == "default":
                optimizer.state = defaultdict(dict)
            elif how == "buffers":
                for value in optimizer.state.values():
                    value["momentum_buffer"].zero_()
            elif how == "load":
                empty = torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.5).state_dict()
                optimizer.load_state_dict(empty)
            else:
                self.trainer.strategy.setup_optimizers(self.trainer)

    module = Dropped()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def swapped_optimizer(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#18279: Adam first, SGD after an epoch, by assigning trainer.optimizers."""

    class Swapped(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 1:
                self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)]

    module = Swapped()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def regrouped(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#18279 kind: settings of a group are written in a hook."""

    class Regrouped(Small):
        def on_train_epoch_start(self) -> None:
            for group in self.trainer.optimizers[0].param_groups:
                group["weight_decay"] = 0.01 * self.trainer.current_epoch
                group["momentum"] = 0.5

    module = Regrouped()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


def momentum_read(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#4974 kind: a hook reads Adam's second moments while training."""
    read: list[float] = []

    class Read(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

        def on_train_epoch_end(self) -> None:
            state = self.trainer.optimizers[0].state
            read.append(float(sum(value["exp_avg_sq"].sum() for value in state.values())))

    module = Read()
    fit(rank, world, engine, module, max_epochs=2)
    return {**weights(module), "read": read}


def head_reset(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#2382 kind: the last layer is made anew at the start of each epoch."""

    class Reset(Small):
        def on_train_epoch_start(self) -> None:
            with torch.no_grad():
                nn.init.constant_(self.net[4].weight, 0.1)
                nn.init.zeros_(self.net[4].bias)

    module = Reset()
    fit(rank, world, engine, module, max_epochs=2)
    return weights(module)


@pytest.mark.stock_ddp("gradients_of_gradients", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_gradient_penalty(engine: str) -> None:
    right(gradient_penalty, engine)


@pytest.mark.stock_ddp("gradients_of_gradients", "pipeline", refused="the layers are on several ranks")
def test_gradient_penalty_in_a_pipeline() -> None:
    assert "torch.autograd.grad cannot go through it" in refusal(gradient_penalty, "pipeline")


@pytest.mark.stock_ddp("manual", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
@pytest.mark.parametrize("situation", [two_backwards, toggled])
def test_manual(situation: Any, engine: str) -> None:
    right(situation, engine)


@pytest.mark.stock_ddp("parametrized")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("situation", "how"),
    [(hook_on_parameter, ["init"]), (hook_on_parameter, ["train"]), (hook_on_layer, []),
     (weight_norm, []), (learned_loss_weights, [])],
)  # fmt: skip
@pytest.mark.short("hook_on_parameter-how0-pipeline", "hook_on_parameter-how1", "hook_on_layer", "weight_norm")
def test_hooks_and_parametrizations(situation: Any, how: list[Any], engine: str) -> None:
    right(situation, engine, *how)


@pytest.mark.stock_ddp("weights_set_batch", "balanced", "pipeline")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("situation", "how"),
    [(prototypes_normalised, ["batch"]), (prototypes_normalised, ["cancel"]), (head_reset, [])],
)
@pytest.mark.short("prototypes_normalised")
def test_weights_changed_in_hooks(situation: Any, how: list[Any], engine: str) -> None:
    refused = engine == "stale" and how == ["batch"]
    assert bool(right_or_refused(situation, engine, *how)) == refused


@pytest.mark.parametrize("engine", ENGINES)
def test_clipped_by_unit(engine: str) -> None:
    right_or_refused(clipped_by_unit, engine)


@pytest.mark.stock_ddp("lookahead", "balanced")
@pytest.mark.stock_ddp("lookahead", "stale", refused="the server could not give their weights back")
@pytest.mark.stock_ddp("lookahead", "pipeline", refused="they would need the weights of all layers")
@pytest.mark.parametrize("engine", ENGINES)
def test_lookahead(engine: str) -> None:
    assert bool(right_or_refused(lookahead, engine)) == (engine != "balanced")


@pytest.mark.stock_ddp("optimizers", "schedulers")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "situation", [lars, adafactor, warm_restarts, two_groups_of_rates, zeroed_not_dropped, regrouped]
)
@pytest.mark.short(
    "lars", "warm_restarts", "two_groups_of_rates", "zeroed_not_dropped", "regrouped-stale", "regrouped-pipeline"
)  # fmt: skip
def test_optimizers_and_schedules(situation: Any, engine: str) -> None:
    right(situation, engine)


STATES = [(momentum_dropped, [how]) for how in ("clear", "default", "buffers", "load")]
OTHERS = [(momentum_dropped, ["setup"]), (swapped_optimizer, [])]


@pytest.mark.stock_ddp("optimizer_state", "balanced")
@pytest.mark.stock_ddp("optimizer_state", "pipeline", differs="each rank has that of its own layers")
@pytest.mark.parametrize("engine", ["balanced", "pipeline"])
@pytest.mark.parametrize(("situation", "how"), [*STATES, *OTHERS])
@pytest.mark.short("how0-pipeline", "momentum_dropped-how3", "how4-pipeline", "swapped_optimizer")
def test_state_made_anew(situation: Any, how: list[Any], engine: str) -> None:
    right(situation, engine, *how)


@pytest.mark.stock_ddp("optimizer_state", "stale", refused="the server has it")
@pytest.mark.parametrize(("situation", "how"), [*OTHERS])
def test_other_optimizers_are_refused(situation: Any, how: list[Any]) -> None:
    assert "was given other optimizers" in refusal(situation, "stale", *how)


@pytest.mark.parametrize(("situation", "how"), [*STATES, (momentum_read, [])])
@pytest.mark.short("momentum_dropped-how0", "momentum_dropped-how2")
def test_state_used_on_a_rank_is_refused(situation: Any, how: list[Any]) -> None:
    assert right_or_refused(situation, "stale", *how)


def test_moments_read() -> None:
    """Under the pipeline a rank has those of its own layers: nobody can notice that code counts on all."""
    right(momentum_read, "balanced")
