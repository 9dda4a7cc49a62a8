"""User code that changes or reads gradients: on a rank they are those of a part of the batch (layer L).

A change that is linear in the gradients, such as a scale, a mask, or a mean taken off, gives the same whether it is
made to the parts or to their mean. Any other, such as clipping by hand or a sign, does not, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_SMALL, _LARGE = 1e-3, 1e6  # norm of the gradients that a hook is tried with, and how many times that besides
_WHY = (
    "such as clipping, a sign or noise. On a rank they are those of its part of the batch, and parts changed so do not"
    " add up to the changed whole. The parameter server clips it: Trainer(gradient_clip_val=...), or"
    " self.clip_gradients in configure_gradient_clipping or training_step. Otherwise use strategy='hetero_balanced'"
)


def watch_gradient_hooks(
    module: LightningModule, counts: Callable[[], bool], warn_once: Callable[[str], None]
) -> Callable[[], None]:
    """Looks at what hooks of the user's make of the gradients; returns the undo function.

    Args:
        module: attached to its trainer.
        counts: whether this rank is in a step whose gradients count.
        warn_once: shows a message once.
    """
    stack = ExitStack()
    callbacks = compat.trainer_callbacks(module.trainer)
    for owner, parent in ((module, LightningModule), *((callback, Callback) for callback in callbacks)):
        ours = type(owner).__module__.split(".")[0] in ("lightning", "lightning_hetero")
        for name in _HOOKS:
            if not ours and hasattr(parent, name) and is_overridden(name, owner, parent):
                watched = _watched(f"{type(owner).__name__}.{name}", getattr(owner, name), module, counts, warn_once)
                stack.enter_context(patched(owner, name, watched))
    return stack.close


def _marks(parameters: Sequence[Parameter]) -> list[tuple[int, int] | None]:
    """What changes when a gradient is replaced, or changed in place."""
    return [None if (g := p.grad) is None else (id(g), g._version) for p in parameters]


def _watched(
    title: str, hook: Callable[..., Any], module: LightningModule, counts: Callable[[], bool],
    warn_once: Callable[[str], None],
) -> Callable[..., Any]:  # fmt: skip
    """Returns a hook in whose place it is called, which refuses what is not linear, at the first change.

    What the hook changes is found by the gradients' versions, in its first call also by their values.
    """
    parameters = list(module.parameters())
    first, linear = True, False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first, linear
        if linear or not counts():
            return hook(*args, **kwargs)
        before = [_copy(p.grad) for p in parameters] if first else []
        marks = _marks(parameters)
        output = hook(*args, **kwargs)
        if marks != _marks(parameters) or not all(map(_same, before, (p.grad for p in parameters))):
            held = [p for p in parameters if p.grad is not None]
            with compat.unlogged(module), compat.metrics_frozen(module):
                linear = _is_linear(held, lambda: hook(*args, **kwargs))
            if not linear:
                raise TypeError(f"{title} changes the gradients in a way that is not linear, {_WHY}")
        elif first and _names_gradients(hook):
            warn_once(
                f"{title} sees the gradients of this rank's part of the batch: norms that it logs are not those"
                " of the whole, which only the parameter server has. strategy='hetero_balanced' has them"
            )
        first = False
        return output

    return call


def _is_linear(parameters: Sequence[Parameter], change: Callable[[], Any]) -> bool:
    """Whether a change of gradients is linear: it is made to small and large ones, to their sum, and to zeros."""
    present = [p.grad for p in parameters]
    whole = [g.detach() if g.layout is torch.strided else g.detach().to_dense() for g in present if g is not None]
    one = [torch.ones_like(g) if not g.any() else g.nan_to_num() for g in whole]
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g).double().cpu() for g in one])))
    x = [g * (_SMALL / norm) for g in one]
    y = [0.7 * g.flatten().roll(1).view_as(g) for g in x]

    def changed(factor: float, gradients: Sequence[Tensor]) -> list[Tensor]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = factor * gradient
        change()
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]

    try:
        none, small, first, second = changed(0.0, x), changed(1.0, x), changed(_LARGE, x), changed(_LARGE, y)
        both = changed(_LARGE, [a + b for a, b in zip(x, y, strict=True)])
    finally:
        for parameter, gradient in zip(parameters, present, strict=True):
            parameter.grad = gradient
    for zero, a_small, a, b, sum_ in zip(none, small, first, second, both, strict=True):
        scale = torch.stack([t.abs().max() for t in (a - zero, b - zero)]).max()
        error = 1e-3 * scale + 1e-5 * _LARGE * zero.abs().max() * torch.finfo(zero.dtype).eps / 1e-7
        off = (sum_ - a - b + zero).abs().max(), ((a_small - zero) * _LARGE - a + zero).abs().max()
        if not (off[0] <= error and off[1] <= error):  # NaN is not linear either
            return False
    return True


def _names_gradients(hook: Callable[..., Any]) -> bool:
    """Whether a hook's code, or what it defines inside, speaks of gradients, as ``p.grad`` and ``grad_norm`` do."""
    waiting = [getattr(getattr(hook, "__func__", hook), "__code__", None)]
    for code in waiting:
        if isinstance(code, CodeType):
            if any("grad" in name for name in code.co_names):
                return True
            waiting += code.co_consts
    return False


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _same(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is new
    return old.layout is not torch.strided or torch.equal(old, new)


class GradientEdits:
    """Finds what the user's code does to gradients between its backward pass and the optimizer's step.

    That code cannot be called again, so only what is plain is let pass: gradients dropped, zeroed, or multiplied by one
    number in all batches.

    Args:
        module: whose parameters' gradients.
        looks: whether such code may be there; else nothing is looked at.
    """

    def __init__(self, module: LightningModule, *, looks: bool) -> None:
        self._names, self._parameters = zip(*module.named_parameters(), strict=True)
        self._looks = looks
        self._marks: list[tuple[int, int] | None] | None = None
        self._left: list[Tensor | None] | None = None  # copies, while something is changed
        self._copies = True
        self._factors: dict[int, float] = {}

    def leave(self) -> None:
        """A backward pass has ended."""
        if not self._looks:
            return
        self._marks = _marks(self._parameters)
        self._left = [_copy(p.grad) for p in self._parameters] if self._copies else None

    def forget(self) -> None:
        """The gradients are pushed, or dropped."""
        self._marks = self._left = None

    def check(self) -> None:
        """A step begins.

        Raises:
            TypeError: gradients were changed in a way that is not plain.
        """
        if self._marks is None:
            return
        both = enumerate(zip(self._marks, _marks(self._parameters), strict=True))
        changed = [i for i, (old, new) in both if old != new and new is not None]
        for i in changed:
            if not self._is_plain(i):
                raise TypeError(
                    f"what is between backward and step ({self._names[i]}) changes the gradients in a way that is not"
                    f" linear, {_WHY}"
                )
        self._copies = bool(changed)

    def _is_plain(self, i: int) -> bool:
        gradient = self._parameters[i].grad
        assert gradient is not None
        if not gradient.any():
            return True
        before = None if self._left is None else self._left[i]
        if before is None or before.layout is not torch.strided:
            return False
        old, new = before.flatten(), gradient.detach().flatten()
        factor = float(torch.vdot(old, new).real / torch.vdot(old, old).real)
        known = self._factors.setdefault(i, factor)
        return abs(factor - known) <= 1e-4 * abs(known) and torch.allclose(new, factor * old, rtol=1e-4)
