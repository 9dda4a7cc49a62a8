"""Code that touches parameters of another stage: right where it treats each by itself on all ranks, else an error."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from lightning.pytorch.utilities import grads as lightning_grads
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.pipeline.fit import gradients
from tests.ranks.kit import weights
from tests.ranks.pipeline.replan_kit import Scripted, heard
from tests.ranks.strangers.kit import ends, everyone, refusal, trainer, two_stages

EXACT = 1e-9
STAGES = two_stages(0, 2, 5, micro_samples=8)


class Toy(LightningModule):
    """Two stages of linear layers, float64; a global batch of 16 per epoch."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=source, dtype=torch.float64)
        self.noted: list[Any] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.net(x) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def data(batch_size: int) -> DataLoader:
    source = torch.Generator().manual_seed(4)
    x, y = (torch.randn(16, n, generator=source, dtype=torch.float64) for n in (3, 2))
    return DataLoader(TensorDataset(x, y * 3), batch_size)


def fitted(make: Callable[[], Toy], where: tuple[int, int, str], plan: Any = STAGES, **options: Any) -> Toy:
    """The module after three epochs; callbacks are made by ``callbacks()``."""
    rank, world, engine = where
    module = make()
    callbacks = options.pop("callbacks", list)()
    options = {"max_epochs": 3, "log_every_n_steps": 1, **options}
    pipeline = {"backbone": "net", **(plan if "plan" in plan else {"plan": plan})}
    fits = trainer(rank, world, engine, {"pipeline": pipeline}, callbacks=callbacks, **options)
    torch.manual_seed(5)
    fits.fit(module, data(16 if engine == "single" else 8))
    module.noted += [dict(fits.callback_metrics)]
    return module


# ---- right ------------------------------------------------------------------------------------------------------


class ClipsInHook(Toy):
    """PL#6328, PL#14598: torch's function in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append(float(clip_grad_norm_(self.parameters(), 0.3)))


class ClipsInstead(Toy):
    """PL#6328: the hook for it overridden, by another norm."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.noted.append(float(clip_grad_norm_(self.net.parameters(), 0.3, norm_type=float("inf"))))


class LogsNorms(Toy):
    """Lightning's own advice: `grad_norm` in `on_before_optimizer_step`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))


class Bounds(Toy):
    """PL#2382, WassersteinGAN#32: weights kept in bounds; here in three ways."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.clamp_(-0.8, 0.8)
            p.data.mul_(0.99)
            p.data = p.data / p.data.norm().clamp(min=1.0)
        torch._foreach_add_(list(self.net.parameters()), 0.01)


class TurnsGradients(Toy):
    """GSAM, gradient centralisation: each gradient changed by itself."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.sub_(p.grad.mean())
                p.grad = p.grad.clamp(-0.5, 0.5)


class DrawsAnew(Toy):
    """pytorch#13946-like advice: some layers begin anew after an epoch; what is drawn is the same on all ranks."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    nn.init.normal_(layer.bias)
        self.noted.append(sum(p.numel() for p in self.parameters() if p.requires_grad))


class RollsBack(Toy):
    """PL#2382: back to weights that were kept, when an epoch was no good."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.load_state_dict(self.kept)
        self.kept = copy.deepcopy(self.state_dict())


class TwoWeights(torch.optim.SGD):
    """PL#20441: keeps a mean of the weights in its state, for validation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", p.clone())
            mean.lerp_(p, 0.3)
        return loss


class Swaps(Toy):
    """PL#20441, prodigy#18."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return TwoWeights(self.parameters(), lr=0.2)

    @torch.no_grad()
    def on_train_end(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for p in self.parameters():
            p.copy_(optimizer.state[p]["mean"])


class ChangesLayer(Toy):
    """pytorch#127964-like: a forward hook that changes what a layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].register_forward_hook(self.halve)

    @staticmethod
    def halve(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y * 0.5


class Thaws(BaseFinetuning):
    """PL#20340: a new group of parameters in mid-run."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:3])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[:3], optimizer, lr=0.1)


class Unfrozen(Toy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[3:].parameters(), lr=0.2)


def thaws() -> list[Callback]:
    return [Thaws()]


RIGHT: dict[str, tuple[Callable[[], Toy], Callable[[], list[Callback]]]] = {
    "clipped in a hook": (ClipsInHook, list),
    "clipped instead": (ClipsInstead, list),
    "norms logged": (LogsNorms, list),
    "bounds": (Bounds, list),
    "gradients turned": (TurnsGradients, list),
    "drawn anew": (DrawsAnew, list),
    "rolled back": (RollsBack, list),
    "two weights": (Swaps, list),
    "hook that returns": (ChangesLayer, list),
    "group thawed": (Unfrozen, thaws),
}


def right(rank: int, world: int, engine: str) -> dict[str, tuple[dict[str, Tensor], list[Any]]]:
    """What each kind ends with, and what it has noted."""
    fits = {kind: fitted(make, (rank, world, engine), callbacks=callbacks) for kind, (make, callbacks) in RIGHT.items()}
    return {kind: (weights(module), module.noted) for kind, module in fits.items()}


@pytest.mark.stock_ddp(
    "gradients_clipped", "gradients_linear", "weights_set_batch", "weights_set_epoch", "schedule_free",
    "BaseFinetuning", "pipeline"
)  # fmt: skip
def test_what_treats_each_parameter_by_itself_on_all_ranks_is_right() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = right(0, 1, "single")
    for found in ends(right, "pipeline"):
        for kind, (ours, noted) in found.items():
            (one, (*told, want)), own = oracle[kind], noted.pop()
            torch.testing.assert_close(ours, one, rtol=0, atol=EXACT, msg=kind)
            assert own.keys() == want.keys(), kind
            assert all(torch.allclose(own[k].double(), want[k].double()) for k in want), kind
            assert noted == pytest.approx(told), kind
    assert lightning_grads.grad_norm.__code__.co_filename == lightning_grads.__file__


class Average(Callback):
    """lightning-bolts' and LightlySSL's kind: a copy made when a fit starts, averaged by hand, kept in checkpoints."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = copy.deepcopy(pl_module.net)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for old, new in zip(self.copy.parameters(), pl_module.net.parameters(), strict=True):
            old.mul_(0.7).add_(new, alpha=0.3)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.copy.state_dict()


class Saves(Average):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def averaged(rank: int, world: int, engine: str, moved: bool) -> tuple[dict[str, Tensor], int]:
    """lightning-bolts#857: an average of one's own."""
    script = Scripted({1: two_stages(0, 4, 5)})
    plan = {"plan": STAGES, "controller": script} if moved else STAGES
    with patch("lightning_hetero.pipeline.strategy.LyapunovController", Scripted), heard(at_once=True):
        fitted(Toy, (rank, world, engine), plan, callbacks=lambda: [Saves("ours.ckpt")])
    if world > 1:
        torch.distributed.barrier()
    return torch.load("ours.ckpt", weights_only=True)["average"], len(script.withdrawn)


def test_an_average_by_hand_is_right_and_whole_in_checkpoints_and_keeps_the_layers_where_they_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, _ = averaged(0, 1, "single", False)
    for moved in (False, True):
        ended = ends(averaged, "pipeline", moved)
        for average, _ in ended:
            torch.testing.assert_close(average, want, rtol=0, atol=EXACT)
        assert [withdrawn for _, withdrawn in ended] == [moved, 0]


class Prints(Toy):
    """PL#6144-like: pictures and prints from rank 0's part of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero:
            self.noted.append("train")
        self.draw()
        return super().training_step(batch, batch_idx)

    @rank_zero_only
    def draw(self) -> None:
        self.noted.append("drawn")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 0:
            self.noted.append(float(batch[0].sum()))

    def val_dataloader(self) -> DataLoader:
        return data(4)


def printed(rank: int, world: int, engine: str) -> list[list[Any]]:
    turned = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 5], "samples": 16, "micro_samples": 16}]}
    return everyone(fitted(Prints, (rank, world, engine), turned, max_epochs=2).noted)


@pytest.mark.stock_ddp("rank_zero", "pipeline")
def test_rank_zeros_part_of_a_step_is_done_once_on_whatever_rank_leads() -> None:
    (noted, *_) = ends(printed, "pipeline")
    every = [entry for rank in noted for entry in rank if not isinstance(entry, dict)]
    assert every.count("train") == every.count("drawn") == 2
    (first,) = {entry for entry in every if isinstance(entry, float)}
    assert every.count(first) == 2 and first == pytest.approx(float(next(iter(data(8)))[0][::2][:4].sum()), abs=9.0)


# ---- refused ----------------------------------------------------------------------------------------------------


class Teacher(Toy):
    """fairscale#1061, DeepSpeed#2056, pytorch#117742: a teacher beside the student, averaged in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.mul_(0.8).add_(new, alpha=0.2)


class Penalty(Toy):
    """lightning-bolts PR#216: a penalty on all weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch) + 0.02 * sum(p.abs().sum() for p in self.parameters())


class ClampsInStep(Toy):
    """PL#2382, in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for p in self.parameters():
            p.data.clamp_(-1, 1)
        return self.loss(*batch)


class AtBatchEnd(Toy):
    """Something with all weights in a hook."""

    def __init__(self, what: Callable[[Toy], Any]) -> None:
        super().__init__()
        self.what = what

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.what(self)


class AfterBackward(AtBatchEnd):
    def on_after_backward(self) -> None:
        self.what(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def at_end(what: Callable[[Toy], Any]) -> Callable[[], Toy]:
    return lambda: AtBatchEnd(what)


def skips_nan(module: Toy) -> None:
    """PL#4956: gradients dropped where some are not finite."""
    if not all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None):
        module.zero_grad()


def logs_norm(module: Toy) -> None:
    module.log("norm", sum(p.detach().norm() for p in module.parameters()))  # type: ignore[arg-type]


def foreach_averages(module: Toy) -> None:
    own = [torch.zeros_like(p) if p.is_meta else torch.zeros(p.shape).double() for p in module.parameters()]
    torch._foreach_lerp_(own[2:] + own[:2], [p.data for p in module.parameters()][:2] * 3, 0.5)


def norm_by_hand(module: Toy) -> None:
    norms = [p.grad.norm() for p in module.parameters() if p.grad is not None]
    module.noted.append(torch.stack(norms).norm())


class Kept(Toy):
    """A list of parameters made in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = {"all": list(self.net.parameters())}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append([float(p.norm()) for p in self.mine["all"]])


class Features(Toy):
    """pytorch#127964, DeepSpeed#2435: a loss from what a forward hook has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.net[3].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, y: Tensor) -> None:
        self.features.append(y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.features.clear()
        loss = self.loss(*batch)
        return loss + 0.1 * torch.stack(self.features).pow(2).mean()


class FeaturesForNow(Toy):
    """The same with a hook that is there during the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: list[Any] = []
        handle = self.net[3].register_forward_hook(lambda module, args, y: found.append(y))
        loss = self.loss(*batch)
        handle.remove()
        return loss + torch.stack(found).pow(2).mean()


class Balanced(nn.Linear):
    """A mixture of experts' kind: the layer keeps a loss of its own."""

    aux_loss: Any = 0.0

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        self.aux_loss = y.pow(2).mean()
        return y


class Auxiliary(Toy):
    """tutel#158-like: the layers' own losses added up in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = Balanced(5, 5).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch) + 0.1 * self.net[2].aux_loss  # type: ignore[operator]


class Sharp(torch.optim.SGD):
    """Takes the gradient a second time."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Clipping(torch.optim.SGD):
    """LAMB's kind: a norm over all gradients inside of the step."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()
        return loss


class Optimized(Toy):
    """PL#17650, davda54/sam#31; prodigy#18."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1)  # type: ignore[call-arg]


class TwoSteps(Toy):
    """PL#17650: the hook calls the closure twice."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class DrawsOnZero(Toy):
    """PL#15860: a picture on rank 0."""

    @rank_zero_only
    def on_train_epoch_end(self) -> None:
        self.noted.append(self.net(torch.ones(2, 3, dtype=torch.float64)))


class NormOnZero(Toy):
    """A norm on rank 0 alone, which it would wait for."""

    @rank_zero_only
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2), rank_zero_only=True)


def prunes() -> list[Callback]:
    """PL#7505."""
    return [ModelPruning("l1_unstructured", amount=0.3)]


REFUSED: dict[str, tuple[Callable[[], Toy], str, Callable[[], list[Callback]]]] = {
    "teacher": (Teacher, r"net.2.weight is held by rank 1 .*rank 0 has no values.*add_ in on_train_batch_end", list),
    "penalty": (Penalty, "net.2.weight is held by rank 1 .*in training_step.*weight_decay", list),
    "clamped in a step": (ClampsInStep, "net.2.weight is held by rank 1 .*in training_step", list),
    "norm logged": (at_end(logs_norm), "is held by rank .*in on_train_batch_end.*clip_grad_norm_", list),
    "saved": (at_end(lambda m: torch.save(m.state_dict(), "a.pt")), "is held by rank .*save_checkpoint", list),
    "vector": (at_end(lambda m: parameters_to_vector(m.parameters())), "is held by rank", list),
    "histogram": (at_end(lambda m: [p.detach().cpu().numpy() for p in m.parameters()]), "for numpy", list),
    "compared": (at_end(lambda m: [bool((p > 0).any()) for p in m.parameters()]), "is held by rank", list),
    "printed": (at_end(lambda m: [f"{p.mean():.3f}" for p in m.parameters()]), "is held by rank", list),
    "list of floats": (at_end(lambda m: torch.tensor([p.sum() for p in m.parameters()])), "is held by rank", list),
    "lists": (at_end(foreach_averages), "is held by rank .*_foreach_lerp_", list),
    "gradients not finite": (lambda: AfterBackward(skips_nan), r"net.\d.weight.grad is held by rank .*on_after", list),
    "norm of gradients": (lambda: AfterBackward(norm_by_hand), "grad is held by rank", list),
    "kept list": (Kept, "reference to net.*hetero_balanced", list),
    "pruned": (Toy, "is held by rank", prunes),
    "picture": (DrawsOnZero, "is held by rank 1 .*in on_train_epoch_end", list),
    "features": (Features, "forward hook .* of net.3 returns nothing", list),
    "features for now": (FeaturesForNow, "of net.3 is registered inside of a step", list),
    "kept by a layer": (Auxiliary, "net.2 keeps a tensor .*'aux_loss'", list),
    "two passes": (lambda: Optimized(Sharp), "closure a second time", list),
    "mixes gradients": (lambda: Optimized(Clipping), "Clipping.step of one parameter depends", list),
    "two steps": (TwoSteps, "closure a second time", list),
    "norm on rank 0": (NormOnZero, r"rank 0 asks for it, and rank\(s\) \[1\] did not", list),
}  # fmt: skip


RARE = ("clamped in a step", "vector", "compared", "printed", "norm of gradients")
"""Kinds whose ways others go, too: "penalty", "norm logged", "list of floats" and "gradients not finite"."""


def refused(rank: int, world: int, engine: str, kind: str) -> None:
    make, _, callbacks = REFUSED[kind]
    with patch.object(gradients, "PATIENCE_S", 0.3):
        fitted(make, (rank, world, engine), callbacks=callbacks, max_epochs=1)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in RARE)) for kind in REFUSED]
)
@pytest.mark.stock_ddp("optimizer_norm", "pipeline", refused="each rank has the gradients of its own layers")
@pytest.mark.stock_ddp(
    "moving_average", "pipeline", refused="the layers are on several ranks; use `WeightAveraging`"
)  # fmt: skip
@pytest.mark.stock_ddp("forward_hooks", "pipeline", refused="what they keep is where the layer is")
@pytest.mark.stock_ddp("closures", "pipeline", refused="there is one pass per step")
@pytest.mark.stock_ddp("ModelPruning", "pipeline", refused="it compares the weights of all layers")
def test_what_needs_parameters_of_another_rank_is_refused_by_name(kind: str) -> None:
    said = refusal(refused, "pipeline", kind)
    assert re.search(REFUSED[kind][1], said, re.S), said
    assert "hetero_balanced" in said, said


def undivided_so_far(rank: int, world: int, engine: str, kind: str) -> None:
    whole = {"groups": [{"ranks": [r], "cuts": [0, 5], "samples": 8, "micro_samples": 8} for r in range(2)]}
    make, _, callbacks = REFUSED[kind]
    fitted(make, (rank, world, engine), {"plan": whole, "controller": Scripted({})}, callbacks=callbacks)


@pytest.mark.parametrize("kind", ["features", "kept by a layer", "two passes", "mixes gradients"])
def test_what_another_plan_would_break_is_refused_under_a_plan_that_divides_nothing(kind: str) -> None:
    assert "hetero_balanced" in refusal(undivided_so_far, "pipeline", kind)
