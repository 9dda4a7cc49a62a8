"""What a pipeline cannot do with a module, its layers or an optimizer, said as early as it is known (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetero.base.refusals import Refusals
from lightning_hetero.pipeline.fit.leader_step import acting_step
from lightning_hetero.pipeline.runtime.ownership.by_parameter import treats_each_by_itself
from lightning_hetero.pipeline.runtime.ownership.changes import ModuleChange
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided

REFUSALS = Refusals(
    no_wrapper="there is no DistributedDataParallel: gradients of a layer go to the ranks that hold the same layer",
    comm_hooks="communication hooks change DDP's all-reduce, which is not used here: gradients of a layer go to the"
    " ranks that hold the same layer. Drop ddp_comm_hook, ddp_comm_wrapper and ddp_comm_state",
    lbfgs="LBFGS needs inner products over all parameters, and each rank of a pipeline holds some of them only;"
    " use another optimizer, or one device",
    sync_batch_norm="SyncBatchNorm (the Trainer's sync_batchnorm=True, or a layer of the module) makes all ranks meet"
    " inside each BatchNorm, but in a pipeline they are never in the same layer at the same time. Set"
    " sync_batchnorm=False (in Hydra: trainer.sync_batchnorm=false): statistics are then of one micro-batch, so choose"
    " micro_batch_size= large enough; or use strategy='hetero_balanced'",
    zero="ZeroRedundancyOptimizer divides the optimizer's state among ranks that all have the whole model, but in a"
    " pipeline each rank has the parameters and the optimizer's state of its own layers only. Use the optimizer that it"
    " wraps",
    averaged_batch_norm="StochasticWeightAveraging with BatchNorm replaces the running statistics of all layers and"
    " renews them in one more epoch, but in a pipeline each rank has those of its own layers, and they would be of"
    " micro-batches. Use WeightAveraging, which averages the statistics, too, or GroupNorm, or"
    " strategy='hetero_balanced'",
)


def refuse_module(module: LightningModule) -> None:
    """Checks that Lightning runs the backward pass.

    Raises:
        TypeError: manual optimization, or a backward pass of the user's own.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise TypeError(
            f"{name} optimizes manually: it decides inside of training_step when gradients are there and a step is"
            " due, but in a pipeline several micro-batches are inside of it at a time. Use automatic optimization, or"
            " strategy='hetero_balanced', which supports manual optimization"
        )
    if is_overridden("backward", module):
        raise TypeError(
            f"{name} overrides backward(); in a pipeline each stage runs its own backward pass and there is no"
            " single one to replace. Remove it (scaling the loss in training_step does the same), or use"
            " strategy='hetero_balanced'"
        )


def warn_undivided(backbone: Undivided) -> None:
    """Says what the user gets where no layers are known, and what to name."""
    rank_zero_warn(
        "hetero_pipeline divides the batch only, by speed: each device trains the whole model, as in data parallelism,"
        f" because {backbone.reason}"
    )


def refuse_no_optimizer(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Checks that there is something to step.

    Raises:
        TypeError: there is not.
    """
    if not any(group.get("params") for optimizer in optimizers for group in optimizer.param_groups):
        raise TypeError(
            "configure_optimizers returned none; a pipeline trains in automatic optimization, which needs one. To run a"
            " model without training it, use trainer.validate, test or predict"
        )


@contextmanager
def changed_late(rank: int) -> Iterator[None]:
    """Inside, an error is that of a module which has been changed: adds the rank and the ways out."""
    try:
        yield
    except RuntimeError as error:
        error.args = (
            f"on rank {rank} the module is another one than when its layers were divided: {error}. In a pipeline each"
            " rank has a part of it. It is divided before training, and again if all ranks change it in on_fit_start,"
            " on_train_start, on_train_epoch_start or on_train_epoch_end. Change it there, or build it so in"
            " configure_model, or use strategy='hetero_balanced'",
        )
        raise


def refuse_change(
    change: ModuleChange, strangers: Sequence[Tensor] = (), *, in_between: bool, copies: bool = False
) -> None:
    """Checks that a module which has been changed can be divided again.

    Args:
        change: of the module.
        strangers: parameters of optimizers that the module has not and never had.
        in_between: no batch has been trained since.
        copies: callbacks average the weights in copies of it.

    Raises:
        RuntimeError: it cannot, with the names.
    """
    names = ", ".join(change.names[:8])
    if strangers:
        shapes = [tuple(parameter.shape) for parameter in strangers[:5]]
        raise RuntimeError(f"an optimizer has parameters of shapes {shapes} that are not the module's")
    if change.trained and not in_between:
        raise RuntimeError(f"it was changed between two batches, or around a validation: {names}")
    if change.trained and copies:
        raise RuntimeError(f"{names} were changed, but not in the copy in which a callback averages weights")


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer], backbone: Backbone) -> None:
    """Checks that each parameter can be stepped where it is, under any plan that divides the layers.

    Raises:
        TypeError: an optimizer's step of one parameter depends on others' gradients.
    """
    if isinstance(backbone, Undivided):
        return
    for optimizer in optimizers:
        if not treats_each_by_itself(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__}.step of one parameter depends on the gradients of others, such as by a"
                " norm over all of them, and in a pipeline each rank has those of its own layers only. Use an optimizer"
                " that treats each parameter separately (gradient_clip_val clips by the norm of the whole model), or"
                " strategy='hetero_balanced'"
            )


# ---- what layers keep of a forward pass for code outside of them, which in a pipeline is on another rank ----------
#
#     net[3].register_forward_hook(lambda m, a, y: kept.append(y))     net[3].aux_loss = ... in its forward
#     net[3] runs on rank 1: so there it is                            training_step runs on rank 0: it finds nothing
#
# A hook that returns something changes what the layer returns; one that returns nothing keeps something.

_KINDS = {"register_forward_hook": "_forward_hooks", "register_forward_pre_hook": "_forward_pre_hooks"}
_OUT = (
    "let the layer return it as part of its output, or leave the layer out of the backbone; or use"
    " strategy='hetero_balanced'"
)


@contextmanager
def layers_alike(backbone: Backbone, elsewhere: Callable[[], Container[int]]) -> Iterator[Callable[[Backbone], None]]:
    """Inside, code that would see or change layers on one rank only is an error where it runs.

    That is a forward hook on a layer, or inside of one, that returns nothing, and one that is registered in a step
    (those of torch itself are left out, such as of `torch.nn.utils.weight_norm`); and an attribute that a training
    step changes, of a layer that another rank runs.

    Args:
        backbone: its layers, under whatever plan.
        elsewhere: returns the ids of the modules in layers that other ranks run for this one.

    Yields:
        What is called when the layers are others.
    """
    if isinstance(backbone, Undivided):
        yield lambda _: None
        return
    names: dict[int, str] = {}
    with ExitStack() as undo:

        def watch(backbone: Backbone) -> None:
            names.clear()
            for name, layer in zip(backbone.names, backbone.layers, strict=True):
                for path, part in layer.named_modules():
                    names[id(part)] = f"{name}.{path}" if path else name
                    for kind in _KINDS.values():
                        check(part, kind)

        def check(part: nn.Module, kind: str) -> None:
            hooks = getattr(part, kind)
            for key, hook in hooks.items():
                if not isinstance(hook, _Returns) and not str(getattr(hook, "__module__", "")).startswith("torch."):
                    hooks[key] = _Returns(hook, names[id(part)])
                    undo.callback(lambda key=key, hook=hook: hooks.update({key: hook} if key in hooks else {}))

        def checking(stock: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def register(part: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
                if id(part) in names and acting_step() is not None:
                    raise RuntimeError(
                        f"the forward hook {_name(hook)} of {names[id(part)]} is registered inside of a step, and in a"
                        f" pipeline the layer may be on another rank, where it is not: {_OUT}"
                    )
                handle = stock(part, hook, *args, **kwargs)
                if id(part) in names:
                    check(part, kind)
                return handle

            return register

        def changing(stock: Callable[..., None]) -> Callable[..., None]:
            def change(part: nn.Module, name: str, value: Any) -> None:
                if acting_step() == "training_step" and id(part) in elsewhere() and not _same(part, name, value):
                    raise RuntimeError(
                        f"training_step on rank {torch.distributed.get_rank()} has changed {names[id(part)]}.{name}, of"
                        " a layer that another rank runs: in a pipeline only the first rank of each group runs"
                        " training_step. Change it in on_train_batch_start, which all ranks run, or use"
                        " strategy='hetero_balanced'"
                    )
                stock(part, name, value)

            return change

        def replace(method: str, make: Callable[[Any], Any]) -> None:
            stock = getattr(nn.Module, method)
            undo.callback(setattr, nn.Module, method, stock)
            setattr(nn.Module, method, make(stock))

        watch(backbone)
        for method, kind in _KINDS.items():
            replace(method, partial(checking, kind=kind))
        replace("__setattr__", changing)
        yield watch


def _same(part: nn.Module, name: str, value: Any) -> bool:
    was = getattr(part, name, None)
    try:
        return was is value or bool(was == value)
    except (RuntimeError, ValueError):  # arrays of several numbers
        return False


class _Returns:
    """A hook that must return something.

    Args:
        hook: of the user.
        layer: that it is on.
    """

    def __init__(self, hook: Callable[..., Any], layer: str) -> None:
        self._hook, self._layer = hook, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._hook(*args, **kwargs)
        if returned is None:
            raise RuntimeError(
                f"the forward hook {_name(self._hook)} of {self._layer} returns nothing, so what it keeps is where the"
                " layer is, and in a pipeline training_step may run on another rank, which does not see it. If a step"
                f" reads what it keeps, {_OUT}. If none does, let the hook return the layer's output (of a pre-hook:"
                " its arguments)"
            )
        return returned


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def refuse_kept(backbone: Backbone) -> None:
    """Checks that layers keep nothing of a forward pass that a loss could be made from.

    Args:
        backbone: after its first batch.

    Raises:
        RuntimeError: a module in a layer does; names it.
    """
    if isinstance(backbone, Undivided):
        return
    for name, layer in zip(backbone.names, backbone.layers, strict=True):
        for path, part in layer.named_modules():
            if part._forward_pre_hooks:  # torch's own reparametrisations keep the weight that they compute
                continue
            for attribute, value in vars(part).items():
                if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value)):
                    where = f"{name}.{path}" if path else name
                    raise RuntimeError(
                        f"{where} keeps a tensor of its forward pass as its attribute {attribute!r}, and in a pipeline"
                        f" training_step may run on another rank, which does not see it: {_OUT}"
                    )
