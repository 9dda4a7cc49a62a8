"""User code that changes or reads gradients: on a rank they are those of a part of the batch (layer L).

A change that is linear in the gradients, such as a scale, a mask, or a mean taken off, gives the same whether it is
made to the parts or to their mean. Any other, such as clipping by hand or a sign, does not, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    stack, parameters = ExitStack(), list(module.parameters())
    callbacks = compat.trainer_callbacks(module.trainer)
    for owner, parent in ((module, LightningModule), *((callback, Callback) for callback in callbacks)):
        ours = type(owner).__module__.split(".")[0] in ("lightning", "lightning_hetero")
        for name in _HOOKS:
            if not ours and hasattr(parent, name) and is_overridden(name, owner, parent):
                title = f"{type(owner).__name__}.{name}"
                watched = _Watched(title, getattr(owner, name), module, counts, parameters, warn_once)
                stack.enter_context(patched(owner, name, _function(watched)))
    return stack.close


def _function(watched: _Watched) -> Callable[..., Any]:
    """A function is not copied with the module that it is an attribute of."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        return watched.call(*args, **kwargs)

    return hook


def _marks(parameters: Sequence[Parameter]) -> list[tuple[int, int] | None]:
    """What changes when a gradient is replaced, or changed in place."""
    return [None if (g := p.grad) is None else (id(g), g._version) for p in parameters]


class _Watched:
    """A hook in whose place it is called; refuses what is not linear, at the first change.

    What it changes is found by the gradients' versions, in its first call also by their values.
    """

    def __init__(
        self,
        title: str,
        hook: Callable[..., Any],
        module: LightningModule,
        counts: Callable[[], bool],
        parameters: Sequence[Parameter],
        warn_once: Callable[[str], None],
    ) -> None:
        self._title, self._hook, self._module, self._counts = title, hook, module, counts
        self._parameters, self.warn_once = parameters, warn_once
        self._first, self._linear = True, False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the hook."""
        if self._linear or not self._counts():
            return self._hook(*args, **kwargs)
        before = [_copy(p.grad) for p in self._parameters] if self._first else None
        marks = _marks(self._parameters)
        output = self._hook(*args, **kwargs)
        changed = marks != _marks(self._parameters)
        if before is not None:
            self._first = False
            changed = changed or not all(
                _same(old, p.grad) for old, p in zip(before, self._parameters, strict=True)
            )
        if changed:
            self._check_linear(args, kwargs)
            self._linear = True
        elif before is not None and _names_gradients(self._hook):
            self.warn_once(
                f"{self._title} sees the gradients of this rank's part of the batch: norms that it logs are not those"
                " of the whole, which only the parameter server has. strategy='hetero_balanced' has them"
            )
        return output

    def _check_linear(self, args: Any, kwargs: Any) -> None:
        """Calls the hook for other gradients: small and large ones, their sum, and none."""
        parameters = [p for p in self._parameters if p.grad is not None]
        present = [p.grad for p in parameters]
        whole = [g.detach() if g.layout is torch.strided else g.detach().to_dense() for g in present if g is not None]
        one = [torch.ones_like(g) if not g.any() else g.nan_to_num() for g in whole]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g).double().cpu() for g in one])))
        x = [g * (_SMALL / norm) for g in one]
        y = [0.7 * g.flatten().roll(1).view_as(g) for g in x]

        def of(factor: float, gradients: Sequence[Tensor]) -> list[Tensor]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = factor * gradient
            self._hook(*args, **kwargs)
            return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]

        try:
            with compat.unlogged(self._module), compat.metrics_frozen(self._module):
                none, small, first = of(0.0, x), of(1.0, x), of(_LARGE, x)
                second, both = of(_LARGE, y), of(_LARGE, [a + b for a, b in zip(x, y, strict=True)])
        finally:
            for parameter, gradient in zip(parameters, present, strict=True):
                parameter.grad = gradient
        for zero, a_small, a, b, sum_ in zip(none, small, first, second, both, strict=True):
            scale = torch.stack([t.abs().max() for t in (a - zero, b - zero)]).max()
            error = 1e-3 * scale + 1e-5 * _LARGE * zero.abs().max() * torch.finfo(zero.dtype).eps / 1e-7
            off = (sum_ - a - b + zero).abs().max(), ((a_small - zero) * _LARGE - a + zero).abs().max()
            if not (off[0] <= error and off[1] <= error):
                raise TypeError(f"{self._title} changes the gradients in a way that is not linear, {_WHY}")


def _names_gradients(hook: Callable[..., Any]) -> bool:
    """Whether a hook's code speaks of gradients, as ``p.grad`` and ``grad_norm`` do."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code is not None and any("grad" in name for name in _names(code))


def _names(code: CodeType) -> Iterator[str]:
    """Names that some code uses, also in what is defined inside."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names(inside)


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
        parameters: whose gradients.
        names: theirs, for messages.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str]) -> None:
        self._parameters, self._names = parameters, names
        self._marks: list[tuple[int, int] | None] | None = None
        self._left: list[Tensor | None] | None = None  # copies, while something is changed
        self._copies = True
        self._factors: dict[int, float] = {}

    def leave(self) -> None:
        """A backward pass has ended."""
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
        now = _marks(self._parameters)
        both = enumerate(zip(self._marks, now, strict=True))
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
