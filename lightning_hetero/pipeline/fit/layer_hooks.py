"""What layers keep of a forward pass for code outside of them, which in a pipeline is on another rank (layer L).

    net[3].register_forward_hook(lambda m, a, y: kept.append(y))     net[3].aux_loss = ... in its forward
    net[3] runs on rank 1: so there it is                            training_step runs on rank 0: it finds nothing

A hook that returns something changes what the layer returns; one that returns nothing keeps something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.fit.acting import acting_rank
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided

__all__ = ["hooks_return", "refuse_kept"]

_KINDS = {"register_forward_hook": "_forward_hooks", "register_forward_pre_hook": "_forward_pre_hooks"}
_OUT = (
    "let the layer return it as part of its output, or leave the layer out of the backbone; or use"
    " strategy='hetero_balanced'"
)


@contextmanager
def hooks_return(backbone: Backbone) -> Iterator[None]:
    """Inside, a forward hook on a layer, or inside of one, that returns nothing is an error when it is called.

    Those of torch itself, such as of `torch.nn.utils.weight_norm`, are left out.

    Args:
        backbone: its layers, under whatever plan.
    """
    if isinstance(backbone, Undivided):
        yield
        return
    names = {
        id(part): f"{name}.{path}" if path else name
        for name, layer in zip(backbone.names, backbone.layers, strict=True)
        for path, part in layer.named_modules()
    }
    undo: list[Callable[[], None]] = []

    def check(part: nn.Module, kind: str) -> None:
        hooks = getattr(part, kind)
        for key, hook in hooks.items():
            if not isinstance(hook, _Returns) and not str(getattr(hook, "__module__", "")).startswith("torch."):
                hooks[key] = _Returns(hook, names[id(part)])
                undo.append(lambda key=key, hook=hook: hooks.update({key: hook} if key in hooks else {}))

    def checking(method: str) -> Any:
        stock = getattr(nn.Module, method)

        def register(part: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
            if id(part) in names and acting_rank() is not None:
                raise RuntimeError(
                    f"the forward hook {_name(hook)} of {names[id(part)]} is registered inside of a step, and in a"
                    f" pipeline the layer may be on another rank, where it is not: {_OUT}"
                )
            handle = stock(part, hook, *args, **kwargs)
            if id(part) in names:
                check(part, _KINDS[method])
            return handle

        setattr(nn.Module, method, register)
        return stock

    for layer in backbone.layers:
        for part in layer.modules():
            for kind in _KINDS.values():
                check(part, kind)
    stock = {method: checking(method) for method in _KINDS}
    try:
        yield
    finally:
        for method, function in stock.items():
            setattr(nn.Module, method, function)
        for restore in undo:
            restore()


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
