"""Ends the optimizers' own steps on a rank: gradients are pushed instead, the server steps (layer L).

The optimizers stay where users, schedulers and callbacks know them: only what ``step`` and ``zero_grad`` *do* changes,
by attributes on the instances, until the fit ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_hetero.stale.fit.tick_loop import TickLoop

__all__ = ["redirect_steps"]


def redirect_steps(
    module: LightningModule, optimizers: Sequence[Optimizer], loop: TickLoop, warn_once: Callable[[str], None]
) -> Callable[[], None]:
    """Lets ``loop`` know what the optimizers are asked for; returns the undo function.

    Args:
        module: whose manual optimization may zero gradients in other ways than through an optimizer.
        optimizers: in the order of `configure_optimizers`.
        loop: is told `stepped` and `zeroed`.
        warn_once: shows a message once.
    """
    before = [(vars(o).get("step"), vars(o).get("zero_grad")) for o in optimizers]
    for index, optimizer in enumerate(optimizers):
        _redirect(index, optimizer, loop)
    facades = module.optimizers()
    facades = facades if isinstance(facades, list) else [facades]
    for facade, optimizer in zip(facades, optimizers, strict=True):
        vars(facade)["zero_grad"] = optimizer.zero_grad  # otherwise it calls the class's
    if module.automatic_optimization:
        run = module.trainer.precision_plugin.optimizer_step
        watched = _push_what_is_not_stepped(module, optimizers, loop, partial(run, model=module))
    else:
        watched = _watch_zeroing(optimizers, loop, warn_once)

    def undo() -> None:
        watched()
        for facade in facades:
            vars(facade).pop("zero_grad", None)
        for optimizer, (step, zero_grad) in zip(optimizers, before, strict=True):
            for name, value in (("step", step), ("zero_grad", zero_grad)):
                vars(optimizer).pop(name, None)
                if value is not None:
                    setattr(optimizer, name, value)

    return undo


def _redirect(index: int, optimizer: Any, loop: TickLoop) -> None:
    zero_grad = optimizer.zero_grad

    def push_instead(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(
                f"step({', '.join(f'{name}=...' for name in kwargs)}) of {type(optimizer).__name__}: the parameter"
                " server steps, and what a rank passes to a step cannot reach it: put it into the optimizer's"
                " param_groups, or use strategy='hetero_balanced'"
            )
        if not loop.running_step:  # by the user, around Lightning's wrapper and the precision plugin
            return loop.step(index, optimizer, closure or _nothing, lambda _, closure: optimizer.step(closure))
        output = closure() if closure is not None else None
        loop.stepped()
        optimizer._opt_called = True  # what torch's schedulers look for before they warn
        return output

    def note_and_zero(*args: Any, **kwargs: Any) -> Any:
        loop.zeroed(index)
        return zero_grad(*args, **kwargs)

    # Schedulers made later, e.g. by a callback, must neither wrap it as a method nor miss their own wrapper.
    vars(push_instead)["_wrapped_by_lr_sched"] = True
    optimizer.step = push_instead
    optimizer.zero_grad = note_and_zero


def _nothing() -> None:
    """A step without a closure."""


def _push_what_is_not_stepped(
    module: LightningModule, optimizers: Sequence[Optimizer], loop: TickLoop, run: Callable[..., Any]
) -> Callable[[], None]:
    """Ends the batch of an ``optimizer_step`` of the user's that leaves out the step; returns the undo function."""
    original = module.optimizer_step

    @wraps(original)
    def step_or_push(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if loop.in_step:
            loop.accumulated(0, optimizers[0], run)
        return output

    module.optimizer_step = step_or_push

    def undo() -> None:
        vars(module).pop("optimizer_step", None)

    return undo


def _watch_zeroing(
    optimizers: Sequence[Optimizer], loop: TickLoop, warn_once: Callable[[str], None]
) -> Callable[[], None]:
    """Takes note of ``module.zero_grad()``, of the LightningModule or a part of it; returns the undo function."""
    zero_grad = nn.Module.zero_grad

    def note_and_zero(self: nn.Module, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        zeroed = {id(p) for p in self.parameters()}
        for index, optimizer in enumerate(optimizers):
            owned = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
            if owned & zeroed:
                loop.zeroed(index)
                if owned - zeroed:
                    warn_once(
                        f"{type(self).__name__}.zero_grad() zeroes only a part of optimizer {index}'s parameters;"
                        " in the parameter server all of them are zeroed. Call optimizer.zero_grad() instead"
                    )

    def undo() -> None:
        nn.Module.zero_grad = zero_grad

    nn.Module.zero_grad = note_and_zero
    return undo
