"""What objects look like now, to be put back into the same objects later (layer T).

    snapshot = Snapshot([module, *callbacks], leave=(Trainer,))
    ...                                                # steps append to lists, count, draw, update statistics
    snapshot.put_back()                                # the same list, with what it held

Everything that can be reached is visited once: attributes (of modules and of any other object), dicts, lists, sets,
deques, arrays, tensors, generators of random numbers. Objects keep their identity, so whoever else refers to one sees
it put back, too. Data sets are large and read only: of their tensors and arrays no copies are made.

Cannot be put back: files, iterators, what C libraries keep, variables of a Python module or in a function's closure.
"""

from __future__ import annotations

import array
import functools
import logging
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["Snapshot"]

_LARGEST = 100_000  # entries of a container that are looked into; of larger ones only which they are is noted
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, range, slice, Enum, torch.dtype, torch.device, torch.Size,
    np.dtype, np.generic, types.ModuleType, types.BuiltinFunctionType, types.CodeType, threading.Thread,
    logging.Logger, logging.Handler,
)  # fmt: skip
_MACHINERY = ("torch._", "torch.distributed")  # objects of these modules are torch's own business
_LIBRARIES = frozenset({"builtins", "torch", "lightning", "pytorch_lightning", "torchmetrics", "abc", "typing"})
_DATA = (Dataset, DataLoader, Sampler)
_Restore = Callable[[], object]


class Snapshot:
    """The state of everything that can be reached from some objects.

    Args:
        roots: the objects.
        data: further objects, which are taken for data sets.
        leave: types whose instances are not looked into, e.g. of what the objects belong to.
    """

    def __init__(
        self, roots: Iterable[object], *, data: Iterable[object] = (), leave: Sequence[type] = ()
    ) -> None:
        self._leave = (*leave, *_ATOMS)
        self._restore: list[_Restore] = []
        self._seen: dict[int, object] = {}  # held, or an id might be given to another
        pending = list(data)
        self._look_into(list(roots), pending)
        self._look_into(pending, None)

    def put_back(self) -> None:
        """Gives all objects visited the state that they had."""
        with torch.no_grad():
            for restore in self._restore:
                restore()

    def _look_into(self, pending: list[Any], data: list[object] | None) -> None:
        """Notes all that can be reached from ``pending``; data sets are put into ``data``, or this is the data."""
        while pending:
            value = pending.pop()
            if id(value) in self._seen or isinstance(value, self._leave):
                continue
            if data is not None and isinstance(value, _DATA):
                data.append(value)
                continue
            self._seen[id(value)] = value
            pending += self._keep(value, copies=data is not None)

    def _keep(self, value: Any, copies: bool) -> list[Any]:
        """Notes one object's own state; returns what it refers to."""
        if isinstance(value, Tensor):
            if copies and not is_lazy(value) and value.layout is torch.strided:
                self._restore.append(_Tensor(value))
            return list(vars(value).values())
        if isinstance(value, np.ndarray):
            if copies and value.flags.writeable:
                self._restore.append(_Array(value))
            return _few(value.ravel().tolist()) if value.dtype == object else []
        if (restore := _generator(value)) is not None:
            self._restore.append(restore)
            return []
        further = self._keep_contents(value, copies)
        if type(value).__module__.startswith(_MACHINERY):
            return further
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._restore.append(_Dict(attributes))
            further += attributes.values()
        for slot in _slots(type(value)):
            self._restore.append(_Slot(value, slot))
            further.append(slot.__get__(value) if _is_set(value, slot) else None)
        if isinstance(value, nn.Module):
            for kind in type(value).__mro__:
                further += self._keep_class(kind)
        return further

    def _keep_contents(self, value: Any, copies: bool) -> list[Any]:
        """Notes the entries of a container; returns what of them is to be looked into."""
        if isinstance(value, tuple | frozenset):
            return _few(value)
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, dict):
            self._restore.append(_Dict(value))
            return _few(dict.values(value))
        for kind in (list, deque, set):
            if isinstance(value, kind):
                self._restore.append(_Entries(value, kind))
                return _few(value)
        if isinstance(value, bytearray | array.array) and copies:
            self._restore.append(_Buffer(value))
        return []

    def _keep_class(self, kind: type) -> list[Any]:
        """Notes what a user's class holds for all of its instances: counters, lists."""
        if id(kind) in self._seen or kind.__module__.partition(".")[0] in _LIBRARIES:
            return []
        self._seen[id(kind)] = kind
        held = {name: value for name, value in vars(kind).items() if _is_plain(name, value)}
        self._restore.append(_Class(kind, held))
        return list(held.values())


def _few(entries: Any) -> list[Any]:
    return list(entries) if len(entries) <= _LARGEST else []


def _is_plain(name: str, value: object) -> bool:
    """Whether a class's attribute is a value, and no method, property or the like."""
    return not (name.startswith("__") or callable(value) or hasattr(value, "__get__"))


def _slots(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (v for v in vars(base).values() if isinstance(v, types.MemberDescriptorType))


def _is_set(owner: object, slot: Any) -> bool:
    try:
        slot.__get__(owner)
    except AttributeError:
        return False
    return True


def _generator(value: Any) -> _Restore | None:
    """Returns what puts a generator of random numbers back; None for all else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return functools.partial(setattr, bits, "state", bits.state)
    return None


# ---- what is noted of one object -------------------------------------------------------------------------------


class _Dict:
    """The keys and values of a dict, or of an object's attributes, in order."""

    def __init__(self, target: dict[Any, Any]) -> None:
        # The methods of the builtin class: a subclass's own may do something else. (OrderedDict has an order besides.)
        self._kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        self._target, self._items = target, list(self._kind.items(target))

    def __call__(self) -> None:
        now = list(self._kind.items(self._target))
        if not _same([x for item in now for x in item], [x for item in self._items for x in item]):
            self._kind.clear(self._target)
            for key, value in self._items:
                self._kind.__setitem__(self._target, key, value)


class _Entries:
    """The entries of a list, a deque or a set."""

    def __init__(self, target: Any, kind: Any) -> None:
        self._target, self._kind, self._entries = target, kind, list(kind.__iter__(target))

    def __call__(self) -> None:
        if not _same(list(self._kind.__iter__(self._target)), self._entries):
            self._kind.clear(self._target)
            (set.update if self._kind is set else self._kind.extend)(self._target, self._entries)


class _Slot:
    """One attribute of an object without a dict of them."""

    def __init__(self, owner: object, slot: Any) -> None:
        self._owner, self._slot = owner, slot
        self._held = (slot.__get__(owner),) if _is_set(owner, slot) else ()

    def __call__(self) -> None:
        if self._held:
            self._slot.__set__(self._owner, *self._held)
        elif _is_set(self._owner, self._slot):
            self._slot.__delete__(self._owner)


class _Class:
    """The values of a class."""

    def __init__(self, kind: type, held: dict[str, Any]) -> None:
        self._kind, self._held = kind, held

    def __call__(self) -> None:
        for name in [n for n, v in vars(self._kind).items() if _is_plain(n, v) and n not in self._held]:
            delattr(self._kind, name)
        for name, value in self._held.items():
            if vars(self._kind).get(name) is not value:
                setattr(self._kind, name, value)


class _Buffer:
    """The values of a bytearray or an array."""

    def __init__(self, target: Any) -> None:
        self._target, self._values = target, target[:]

    def __call__(self) -> None:
        self._target[:] = self._values


class _Array:
    """The values of a NumPy array."""

    def __init__(self, target: np.ndarray) -> None:
        self._target, self._values = target, target.copy()

    def __call__(self) -> None:
        if self._target.shape == self._values.shape:  # else somebody has resized it, who must know
            np.copyto(self._target, self._values)


class _Tensor:
    """A tensor's values, in which memory they are, its gradient, and whether it wants one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._memory = tensor.data  # the same memory, and a count of its own of changes in place
        self._values = None if tensor.is_meta else self._memory.clone()
        self._attributes = dict(vars(tensor))
        self._leaf, self._trained = tensor.is_leaf, tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        self._grad_values = None if self._grad is None else self._grad.detach().clone()

    def __call__(self) -> None:
        tensor = self._tensor
        with torch.inference_mode(tensor.is_inference()):
            _overwrite(self._memory, self._values)
            if self._grad is not None:
                _overwrite(self._grad.detach(), self._grad_values)
        if self._leaf:
            if not _same_memory(tensor, self._memory):
                tensor.data = self._memory
            if tensor.is_leaf and tensor.requires_grad != self._trained:
                tensor.requires_grad_(self._trained)
            if tensor.grad is not self._grad:
                tensor.grad = self._grad
        vars(tensor).clear()
        vars(tensor).update(self._attributes)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.device, a.shape, a.stride(), a.dtype) == (b.device, b.shape, b.stride(), b.dtype) and (
        a.is_meta or a.data_ptr() == b.data_ptr()
    )


def _overwrite(target: Tensor, values: Tensor | None) -> None:
    if values is not None and not torch.equal(target, values):  # NaN is not equal to itself: written again
        target.copy_(values)


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
