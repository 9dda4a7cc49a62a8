"""The optimizers on a rank, whose steps and state the parameter server has (layer L).

    before the fit   their step is tried on a copy: what asks a rank for more than gradients is refused
    during it        ``step`` pushes instead, by attributes on the instances; every use of their state raises
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.stale.fit.held_state import check_held

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_hetero.stale.fit.step_loop import StepLoop

# ---- tried on a copy ---------------------------------------------------------------------------------------

_INSTEAD = "Use strategy='hetero_balanced', whose ranks step themselves"


def refuse_unusual_steps(optimizers: Iterable[Optimizer]) -> None:
    """Refuses an optimizer whose step asks a rank for more than gradients.

    Raises:
        TypeError: with the reason.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        refuse_step_hooks(optimizer)
        if isinstance(optimizer, SparseAdam):
            raise TypeError(f"{name} needs sparse gradients, and the parameter server has dense ones. {_INSTEAD}")
        plain, state, _ = _try(optimizer, closure=False)
        with_closure, _, calls = _try(optimizer, closure=True)
        if with_closure and not plain:
            raise TypeError(
                f"{name}.step() needs a closure, and the parameter server, which makes the step, has the gradients of a"
                f" batch and cannot compute them again. {_INSTEAD}"
            )
        if with_closure and calls > 1:
            raise TypeError(
                f"{name}.step(closure) computes the loss {calls} times per step, and here the step is made in the"
                f" parameter server, once the gradients of the whole batch are there. {_INSTEAD}"
            )
        if more := sorted(state - {"state", "param_groups"}):
            raise TypeError(
                f"{name}.state_dict() has {', '.join(map(repr, more))} besides 'state' and 'param_groups': the"
                f" parameter server, which has the state, could not bring that home. {_INSTEAD}"
            )


def refuse_step_hooks(optimizer: Optimizer) -> None:
    """Raises TypeError if hooks around the step of an optimizer are registered: a rank makes none."""
    found = [name for name in ("pre", "post") if getattr(optimizer, f"_optimizer_step_{name}_hooks", None)]
    if found:
        raise TypeError(
            f"register_step_{found[0]}_hook of {type(optimizer).__name__}: the step is made in the parameter server, so"
            f" what the hook does would be lost on the ranks. Do it in on_train_batch_end, or: {_INSTEAD[0].lower()}"
            f"{_INSTEAD[1:]}"
        )


def _try(optimizer: Optimizer, *, closure: bool) -> tuple[bool, set[str], int]:
    """Returns whether a step of a copy works, the entries of its state then, and how often it called its closure."""
    calls = 0
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
            warnings.simplefilter("ignore")
            trial, parameters = _copied(optimizer)

            def gradients() -> Tensor:
                nonlocal calls
                calls += 1
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 0.1) if parameter.requires_grad else None
                return torch.ones(())

            gradients()
            calls = 0
            step: Callable[..., Any] = type(optimizer).step
            if getattr(step, "hooked", False):  # torch's wrapper calls everybody's hooks, also those of all optimizers
                step = getattr(step, "__wrapped__", step)
            step(trial, gradients) if closure else step(trial)
            return True, set(trial.state_dict()), calls
    except Exception:
        return False, set(), calls


def _copied(optimizer: Optimizer) -> tuple[Optimizer, list[nn.Parameter]]:
    """Returns a copy without state and hooks, and its parameters, which have one entry each."""
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tiny = nn.Parameter(torch.ones([1] * p.ndim, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
            memo[id(p)] = tiny
            parameters.append(tiny)
    own = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    for name, value in own.items():
        if name.endswith("_hooks"):
            memo[id(value)] = OrderedDict()
    trial = memo[id(optimizer)] = object.__new__(type(optimizer))
    trial.__dict__.update({name: copy.deepcopy(value, memo) for name, value in own.items()})
    return trial, parameters


# ---- redirected --------------------------------------------------------------------------------------------


def redirect_steps(
    module: LightningModule, optimizers: Sequence[Optimizer], loop: StepLoop, *, call: Callable[[int, str], None],
    warn_once: Callable[[str], None],
) -> Callable[[], None]:  # fmt: skip
    """Lets ``loop`` know what the optimizers are asked for; returns the undo function.

    What a class has besides the API of `torch.optim.Optimizer`, such as the ``eval`` of schedule-free optimizers, works
    on state and parameters, which the server has: it is called there, between two batches, when all ranks ask for it.

    Args:
        module: whose manual optimization may zero gradients in other ways than through an optimizer.
        optimizers: in the order of `configure_optimizers`.
        loop: learns of `stepped` and `zeroed`.
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
        _push_what_is_not_stepped(module, optimizers, loop, undone)
    else:
        _watch_zeroing(optimizers, loop, warn_once, undone)
    return undone.close


def _redirected(index: int, optimizer: Any, loop: StepLoop) -> dict[str, Callable[..., Any]]:
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
            return loop.step(index, optimizer, closure or (lambda: None), lambda _, closure: optimizer.step(closure))
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


def _is_of_torch(function: Callable[..., Any]) -> bool:
    return function.__module__.split(".")[0] == "torch"


def _own_methods(cls: type[Optimizer]) -> list[str]:
    """Names of the public methods that a class has besides the API of `torch.optim.Optimizer`."""
    found = inspect.getmembers(cls, inspect.isfunction)
    return [n for n, f in found if not (n.startswith("_") or hasattr(Optimizer, n) or _is_of_torch(f))]


def _asked(
    index: int, name: str, optimizer: Optimizer, loop: StepLoop, call: Callable[[int, str], None]
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
    module: LightningModule, optimizers: Sequence[Optimizer], loop: StepLoop, undone: ExitStack
) -> None:
    """Ends the batch of an ``optimizer_step`` of the user's that leaves out the step."""
    original = module.optimizer_step

    @wraps(original)
    def step_or_push(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if loop.in_step:
            loop.accumulated(optimizers[0])
        return output

    undone.enter_context(patched(module, "optimizer_step", step_or_push))


def _watch_zeroing(
    optimizers: Sequence[Optimizer], loop: StepLoop, warn_once: Callable[[str], None], undone: ExitStack
) -> None:
    """Takes note of ``module.zero_grad()``, of the LightningModule or a part of it."""
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

    undone.callback(setattr, nn.Module, "zero_grad", zero_grad)
    nn.Module.zero_grad = note_and_zero
