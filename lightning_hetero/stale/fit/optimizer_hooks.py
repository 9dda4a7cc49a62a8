"""Ends the optimizers' own steps on a rank: gradients are pushed instead, the server steps (layer L).

The optimizers stay where users, schedulers and callbacks know them: only what ``step`` and ``zero_grad`` *do* changes,
by attributes on the instances, until the fit ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.stale.fit.dry_run import refuse_step_hooks
from lightning_hetero.stale.fit.held_state import check_held

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_hetero.stale.fit.tick_loop import TickLoop

__all__ = ["redirect_steps"]


def redirect_steps(
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    loop: TickLoop,
    *,
    call: Callable[[int, str], None],
    warn_once: Callable[[str], None],
) -> Callable[[], None]:
    """Lets ``loop`` know what the optimizers are asked for; returns the undo function.

    What a class has besides the API of `torch.optim.Optimizer`, such as the ``eval`` of schedule-free optimizers, works
    on state and parameters, which the server has: it is called there, between two batches, when all ranks ask for it.

    Args:
        module: whose manual optimization may zero gradients in other ways than through an optimizer.
        optimizers: in the order of `configure_optimizers`.
        loop: is told `stepped` and `zeroed`.
        call: has the server call a method of an optimizer, by number and name; for all ranks at once.
        warn_once: shows a message once.
    """
    facades = module.optimizers()
    facades = facades if isinstance(facades, list) else [facades]
    undone = ExitStack()
    for index, (facade, optimizer) in enumerate(zip(facades, optimizers, strict=True)):
        replaced = {
            **_redirected(index, optimizer, loop),
            **{name: _asked(index, name, optimizer, loop, call) for name in _own_methods(type(optimizer))},
        }
        for name, method in replaced.items():
            undone.enter_context(patched(optimizer, name, method))
            if name != "step":
                undone.enter_context(patched(facade, name, method))  # otherwise it calls the class's
    if module.automatic_optimization:
        run = module.trainer.precision_plugin.optimizer_step
        watched = _push_what_is_not_stepped(module, optimizers, loop, partial(run, model=module))
    else:
        watched = _watch_zeroing(optimizers, loop, warn_once)

    undone.callback(watched)
    return undone.close


def _redirected(index: int, optimizer: Any, loop: TickLoop) -> dict[str, Callable[..., Any]]:
    """What ``step`` and ``zero_grad`` do on a rank."""
    zero_grad = optimizer.zero_grad

    def push_instead(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(
                f"step({', '.join(f'{name}=...' for name in kwargs)}) of {type(optimizer).__name__}: the parameter"
                " server steps, and what a rank passes to a step cannot reach it: put it into the optimizer's"
                " param_groups, or use strategy='hetero_balanced'"
            )
        check_held(optimizer)
        refuse_step_hooks(optimizer)
        if not loop.running_step:  # by the user, around Lightning's wrapper and the precision plugin
            return loop.step(index, optimizer, closure or _nothing, lambda _, closure: optimizer.step(closure))
        output = closure() if closure is not None else None
        loop.stepped()
        optimizer._opt_called = True  # what torch's schedulers look for before they warn
        return output

    def note_and_zero(*args: Any, **kwargs: Any) -> Any:
        loop.zeroed(index)
        before = versions(optimizer) if own_zeroing else ()
        output = zero_grad(*args, **kwargs)
        if own_zeroing and versions(optimizer) != before:
            raise RuntimeError(
                f"{type(optimizer).__name__}.zero_grad changes parameters, which the parameter server has: use"
                " strategy='hetero_balanced'"
            )
        return output

    def versions(optimizer: Any) -> Any:
        return [(p.data_ptr(), p._version) for group in optimizer.param_groups for p in group["params"]]

    own_zeroing = not _is_of_torch(type(optimizer).zero_grad)

    # Schedulers made later, e.g. by a callback, must neither wrap it as a method nor miss their own wrapper.
    vars(push_instead)["_wrapped_by_lr_sched"] = True
    return {"step": push_instead, "zero_grad": note_and_zero}


def _nothing() -> None:
    """A step without a closure."""


def _is_of_torch(function: Callable[..., Any]) -> bool:
    return function.__module__.split(".")[0] == "torch"


def _own_methods(cls: type[Optimizer]) -> list[str]:
    """Names of the public methods that a class has besides the API of `torch.optim.Optimizer`."""
    found = inspect.getmembers(cls, inspect.isfunction)
    return [n for n, f in found if not (n.startswith("_") or hasattr(Optimizer, n) or _is_of_torch(f))]


def _asked(
    index: int, name: str, optimizer: Optimizer, loop: TickLoop, call: Callable[[int, str], None]
) -> Callable[..., None]:
    """What an optimizer's own method does on a rank."""
    title = f"{type(optimizer).__name__}.{name}"

    def ask(*args: Any, **kwargs: Any) -> None:
        if loop.in_step or args or kwargs:
            raise RuntimeError(
                f"{title}(){' inside a batch' if loop.in_step else ' with arguments'}: parameters and state are in the"
                " parameter server, which calls an optimizer's own methods without arguments, between two batches, when"
                " all ranks ask for it. A step is step() alone. Or use strategy='hetero_balanced'"
            )
        call(index, name)

    return ask


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
