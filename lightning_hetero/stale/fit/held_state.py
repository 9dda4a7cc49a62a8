"""Optimizers whose state the parameter server has: no code reads an empty one, or writes one that is lost (layer L)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

_WAY_OUT = (
    "the parameter server has the state of the optimizers while hetero_stale trains: trainer.save_checkpoint writes it,"
    " and after the fit rank 0 has it. To read or change it in between, use strategy='hetero_balanced'"
)


class _HeldState(defaultdict[Any, Any]):
    """Replaces an optimizer's ``state``; every use raises.

    Args:
        owner: name of the optimizer's class.
        own: the rank's state before and after.
    """

    def __init__(self, owner: str, own: Any) -> None:
        super().__init__(dict)
        self.owner, self.own = owner, own

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"the state of {self.owner} is used on a rank: {_WAY_OUT}")


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__reduce_ex__",
    "get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy",
):  # fmt: skip
    setattr(_HeldState, _name, _HeldState._refuse)


def hold(optimizers: Sequence[Optimizer]) -> None:
    """From here on every use of the optimizers' state raises, until it is `released`."""
    for optimizer in optimizers:
        if not isinstance(optimizer.state, _HeldState):
            optimizer.state = _HeldState(type(optimizer).__name__, optimizer.state)


def release(optimizers: Sequence[Optimizer]) -> None:
    """The optimizers have the rank's own state again; idempotent."""
    for optimizer in optimizers:
        if isinstance(optimizer.state, _HeldState):
            optimizer.state = optimizer.state.own


@contextmanager
def released(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, the optimizers that are held have the rank's own state."""
    held = [optimizer for optimizer in optimizers if isinstance(optimizer.state, _HeldState)]
    release(held)
    try:
        yield
    finally:
        hold(held)


def check_held(optimizer: Optimizer) -> None:
    """Raises RuntimeError if somebody has given a rank's optimizer another state."""
    if not isinstance(optimizer.state, _HeldState):
        raise RuntimeError(
            f"{type(optimizer).__name__} was given another state on a rank, e.g. by load_state_dict or by a reset:"
            f" {_WAY_OUT}"
        )
