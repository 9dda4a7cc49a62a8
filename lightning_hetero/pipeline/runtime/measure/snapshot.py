"""Objects are copied deeply before a rehearsal, and get their state back from the copies (layer T).

    snapshot = Snapshot([module, *callbacks], shared=[trainer])
    ...                                                # steps append to lists, count, draw, update statistics
    snapshot.put_back()                                # the same list, with what it held

`copy.deepcopy` knows which object has become which copy: each object gets back what its copy holds, and keeps its
identity, so other references to it see it put back, too. What cannot be copied (files, locks, tensors with a graph)
is unchanged, and so is what can only be reached through it. Data sets are large and read only: of them attributes
and generators of random numbers are put back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MemberDescriptorType
from typing import Any
from weakref import getweakrefs

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_hetero.measure.device import save_generator

_DATA = (Dataset, DataLoader, Sampler)
_MACHINERY = ("torch._", "torch.distributed")  # objects of these modules are torch's own business
_LIBRARIES = frozenset({"builtins", "torch", "lightning", "pytorch_lightning", "torchmetrics", "abc", "typing"})


class Snapshot:
    """The state of some objects.

    Args:
        owners: modules, with all their submodules, and other objects.
        data: data sets and loaders.
        shared: what is not copied wherever it is met, e.g. what the objects belong to.
        leave: types of tensors that do not change.
    """

    def __init__(
        self, owners: Iterable[object], *, data: Iterable[object] = (), shared: Iterable[object] = (),
        leave: tuple[type[Tensor], ...] = (),
    ) -> None:  # fmt: skip
        self._undo: list[Callable[[], object]] = []
        parts = _parts(owners)
        sets = _data_sets([*data, *(v for part in parts for v in vars(part).values() if isinstance(v, _DATA))])
        self._copied: list[object] = []  # of which there are copies
        kept = (*parts, *sets, *shared, *(proxy for part in parts for proxy in getweakrefs(part)))
        self._memo: dict[int, Any] = {id(x): x for x in kept if x is not None}
        self._memo[id(self._memo)] = self._copied  # where `copy.deepcopy` keeps them
        modules = [part for part in parts if isinstance(part, nn.Module)]
        for tensor in (t for m in modules for t in (*m._parameters.values(), *m._buffers.values())):
            if tensor is not None and id(tensor) not in self._memo:
                self._memo[id(tensor)] = tensor
                if not isinstance(tensor, leave):
                    self._undo.append(_TensorState(tensor))
        for one in sets:
            self._undo.append(partial(_refill, vars(one), dict(vars(one))))
            self._undo += [put for value in vars(one).values() if (put := save_generator(value, value)) is not None]
        for part in parts:
            self._undo.append(partial(_refill, vars(part), dict(vars(part))))
            for value in vars(part).values():
                self._copy(value)
        for kind in {kind: 0 for module in modules for kind in type(module).__mro__}:
            self._keep_class(kind)
        copies = [self._memo[id(x)] for x in self._copied]
        originals = {id(y): x for x, y in zip(self._copied, copies, strict=True)}
        for x, y in zip(self._copied, copies, strict=True):
            self._undo += _restores(x, y, originals)

    def put_back(self) -> None:
        """Gives all objects the state that they had."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def _copy(self, value: object) -> None:
        """Copies a value; of one that cannot be copied nothing is."""
        if type(value).__module__.startswith(_MACHINERY) and not isinstance(value, torch.Generator):
            return
        known, count = len(self._memo), len(self._copied)
        try:
            copy.deepcopy(value, self._memo)
        except Exception:
            while len(self._memo) > known:
                self._memo.popitem()
            del self._copied[count:]

    def _keep_class(self, kind: type) -> None:
        """Notes what a user's class holds for all of its instances: counters, lists."""
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            return
        held = {name: value for name, value in vars(kind).items() if _is_plain(name, value)}
        for value in held.values():
            self._copy(value)
        self._undo.append(partial(_put_back_class, kind, held))


def _parts(owners: Iterable[Any]) -> list[Any]:
    """Returns objects with attributes, each once: all submodules of modules, also of those that an object refers to."""
    roots: list[Any] = []
    for owner in owners:
        held = () if isinstance(owner, nn.Module) else vars(owner).values()
        roots += [owner, *(value for value in held if isinstance(value, nn.Module))]
    kept = (r.modules() if isinstance(r, nn.Module) else [r] for r in roots)
    return list({id(part): part for parts in kept for part in parts}.values())


def _data_sets(pending: list[Any]) -> list[Any]:
    """Returns data sets, loaders and samplers, and what they are made of."""
    found: dict[int, Any] = {}
    while pending:
        one = pending.pop()
        if id(one) not in found and hasattr(one, "__dict__"):
            found[id(one)] = one
            pending += [value for value in vars(one).values() if isinstance(value, _DATA)]
    return list(found.values())


def _is_plain(name: str, value: object) -> bool:
    """Whether a class's attribute is a value, and no method or property."""
    return not (name.startswith("__") or callable(value) or hasattr(value, "__get__"))


def _put_back_class(kind: type, held: dict[str, Any]) -> None:
    for name in [n for n, v in vars(kind).items() if _is_plain(n, v) and n not in held]:
        delattr(kind, name)
    for name, value in held.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


# ---- from a copy to its original -------------------------------------------------------------------------------


def _restores(x: Any, y: Any, originals: dict[int, Any]) -> Iterator[Callable[[], object]]:
    """Yields what gives an object the state of its copy.

    Args:
        x, y: both.
        originals: of all copies, by their ids.
    """

    def back(value: Any) -> Any:
        return originals.get(id(value), value)

    if isinstance(x, Tensor):
        yield _TensorState(x, y)
    elif isinstance(x, np.ndarray):
        yield lambda: np.copyto(x, y) if x.shape == y.shape and x.dtype != object else None
    elif (put := save_generator(x, y)) is not None:
        yield put
    elif isinstance(x, dict):
        items = [(key, back(value)) for key, value in (OrderedDict if isinstance(y, OrderedDict) else dict).items(y)]
        yield partial(_refill, x, items)
    elif isinstance(x, list | deque | set):
        yield partial(_refill, x, [back(entry) for entry in y])
    elif isinstance(x, bytearray):
        yield lambda: x.__setitem__(slice(None), y)
    if isinstance(x, Tensor | np.ndarray):
        return
    if isinstance(held := getattr(y, "__dict__", None), dict):
        yield partial(_refill, vars(x), {key: back(value) for key, value in held.items()})
    if slots := _slots(y):
        yield partial(_put_slots, x, {name: back(value) for name, value in slots.items()})


def _refill(target: Any, entries: Any) -> None:
    """Puts the entries of a container back; methods of a subclass, which may do something else, are not asked."""
    kinds: tuple[Any, ...] = OrderedDict, dict, list, deque, set
    kind = next(k for k in kinds if isinstance(target, k))
    kind.clear(target)
    if kind in (OrderedDict, dict):
        for key, value in dict(entries).items():
            kind.__setitem__(target, key, value)
    else:
        getattr(kind, "update" if kind is set else "extend")(target, entries)


def _slots(x: object) -> dict[str, Any]:
    """Returns what an object's slots hold, those of its class apart from its ``__dict__``."""
    bases = [vars(base) for base in type(x).__mro__ if "__slots__" in vars(base)]
    names = [name for base in bases for name, held in base.items() if isinstance(held, MemberDescriptorType)]
    return {name: getattr(x, name) for name in names if hasattr(x, name)}


def _put_slots(x: object, slots: dict[str, Any]) -> None:
    for name in _slots(x).keys() - slots.keys():
        object.__delattr__(x, name)
    for name, value in slots.items():
        object.__setattr__(x, name, value)


class _TensorState:
    """A tensor's values, in which memory they are, its gradient, and whether it wants one.

    Args:
        tensor: whose.
        values: a copy of them that there is already.
    """

    def __init__(self, tensor: Tensor, values: Tensor | None = None) -> None:
        self._tensor = tensor
        dense = not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta
        self._memory = tensor.data  # the same memory, and a count of its own of changes in place
        self._values = (self._memory.clone() if values is None else values.detach()) if dense else None
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
