"""What a user's step leaves on its module besides parameters and buffers: lists, counters, results (layer T).

    attributes = Attributes(module)
    ...                                # the step appends to a list, counts, fills a dict
    changes = attributes.changes()     # picklable: what has been appended, counted, filled in since it was asked last
    apply_changes(module, changes)     # does the same to the module of another rank

    shadow = Shadow(module)            # attributes for steps that belong to another rank
    with shadow.worn(): ...            # self.kept.append(x) fills the shadow's list, not the module's

Looked into are the module, its submodules of a user's own classes, and there lists, tuples, dicts, sets, deques,
tensors, numbers and objects of a user's own classes. What other objects keep, e.g. of a library, is not seen.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Path = tuple[Any, ...]
"""Name of the submodule, of its attribute, then keys, indices and names."""

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_LARGEST = 1_000_000  # entries of a tensor that is copied
_DEEPEST = 6  # parts of a path
_LONGEST = 64  # entries of a list that are looked into, whatever they are
_OWN = frozenset(vars(nn.Module()))  # attributes of torch's


class Change(NamedTuple):
    """One change of an attribute, or of a part of it.

    Attributes:
        path: to it.
        kind: ``"extend"`` a list, ``"update"`` a set, ``"set"`` to a value, ``"delete"``.
        value: the new entries, or the new value.
        before: the number or tensor that it was, where it was set.
    """

    path: Path
    kind: Literal["extend", "update", "set", "delete"]
    value: Any = None
    before: Any = None


def name_of(path: Path) -> str:
    """Returns an attribute as a user writes it.

    >>> name_of(("head", "kept", "pred", 0))
    "self.head.kept['pred'][0]"
    """
    module, attribute, *keys = path
    return ".".join(filter(None, ("self", module, attribute))) + "".join(f"[{key!r}]" for key in keys)


def value_at(module: nn.Module, path: Path) -> Any:
    """Returns what is there now; None if there is nothing."""
    value: Any = module.get_submodule(path[0])
    try:
        for key in path[1:]:
            value = _within(value)
            if isinstance(value, Mapping) and key not in value:  # a default dict would make it
                return None
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def apply_changes(module: nn.Module, changes: Sequence[Change]) -> None:
    """Makes changes of another rank's module."""
    for change in changes:
        *way, last = change.path
        where = _within(value_at(module, tuple(way)) if len(way) > 1 else module.get_submodule(way[0]))
        if change.kind == "set":
            where[last] = change.value
        elif change.kind == "delete":
            where.pop(last, None)
        elif change.kind == "extend":
            where[last].extend(change.value)
        else:
            where[last].update(change.value)


def numbers_of(
    module: nn.Module, ignore: Iterable[str] = (), *, without: Iterable[nn.Module] | None = None
) -> dict[Path, Any]:
    """Returns the module's own attributes that are numbers, and those in dicts of them.

    Args:
        module: without its submodules.
        ignore: names of attributes that are not the user's.
        without: also buffers, and those of submodules of the user's own classes, but not of these.
    """
    found: dict[Path, Any] = {}
    ignored = _OWN.union(ignore)
    for name, part in [("", module)] if without is None else _places(module, without):
        held = vars(part) if without is None else {**vars(part), **part._buffers}
        for key in (key for key in held if key not in ignored):
            entries = held[key].items() if isinstance(held[key], dict) else ()
            candidates = {(name, key): held[key], **{(name, key, k): value for k, value in entries}}
            found.update({path: value for path, value in candidates.items() if _is_number(value)})
    return found


def values_of(module: nn.Module, ignore: Iterable[str] = ()) -> dict[Path, Any]:
    """Returns what a step may go on from: numbers and tensors, also in dicts, in objects, and numbers in lists."""
    found: dict[Path, Any] = {}
    ignored = _OWN.union(ignore)
    for name, part in _places(module):
        pending = [((name, key), value) for key, value in vars(part).items() if key not in ignored]
        while pending:
            path, value = pending.pop()
            if _is_number(value) or (type(value) is Tensor and value.numel() <= _LARGEST and not value.is_meta):
                found[path] = value
            elif len(path) < _DEEPEST and isinstance(value, list) and len(value) <= _LONGEST:
                pending += [((*path, i), entry) for i, entry in enumerate(value) if not isinstance(entry, Tensor)]
            elif len(path) < _DEEPEST and (isinstance(value, dict) or _is_object(value)):
                pending += [((*path, key), entry) for key, entry in _within(value).items()]
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_meta and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(value: Any) -> Any:
    """Returns what holds the parts of a value by key: itself, or its attributes."""
    return value if isinstance(value, list | tuple | Mapping | deque) else vars(value)


def _places(module: nn.Module, without: Iterable[nn.Module] = ()) -> list[tuple[str, nn.Module]]:
    """Returns the module and its submodules of a user's own classes, by name, but not those within some layers.

    Without torchmetrics', whose states are combined over the ranks.
    """
    left = {id(part) for layer in without for part in layer.modules()}
    return [
        (name, part)
        for name, part in module.named_modules()
        if part is module
        or (id(part) not in left and _is_users(type(part)) and not hasattr(type(part), "metric_state"))
    ]


@cache
def _is_users(kind: type) -> bool:
    """Whether a class is from neither torch nor Python nor any installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    installed = {path for name in ("stdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
    return kind.__module__ not in sys.builtin_module_names and not (file and file.startswith(tuple(installed)))


class Attributes:
    """The attributes of a module as they were when `changes` was asked last.

    Args:
        module: with its submodules.
        ignore: names of attributes that are not the user's.
        without: submodules that are not looked into.
    """

    def __init__(self, module: nn.Module, ignore: Iterable[str] = (), *, without: Iterable[nn.Module] = ()) -> None:
        self._ignored = _OWN.union(ignore)
        self._places = _places(module, without)
        self._noted: list[dict[str, Any]] = []
        self.note()

    def note(self) -> None:
        """Takes the present attributes for those that were."""
        self._noted = [{key: _structure(value) for key, value in self._held(part).items()} for _, part in self._places]

    def changes(self) -> list[Change]:
        """Returns what is different now, and notes it."""
        found: list[Change] = []
        for (name, part), before in zip(self._places, self._noted, strict=True):
            _compare_keys(before, self._held(part), (name,), found)
        if found:
            self.note()
        return found

    def _held(self, part: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in vars(part).items() if key not in self._ignored}


class Shadow(Attributes):
    """Separate attributes for the steps of another rank, as the module's are now: containers are copies.

    Args:
        module, ignore: see `Attributes`.
    """

    def __init__(self, module: nn.Module, ignore: Iterable[str] = ()) -> None:
        self._module, ignored = module, _OWN.union(ignore)
        copies: dict[int, Any] = {}
        self._worn = [
            (part, {key: value if key in ignored else _copied(value, copies) for key, value in vars(part).items()})
            for _, part in _places(module)
        ]
        with self.worn():
            super().__init__(module, ignore)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Inside, the module has these attributes."""
        before = [vars(part) for part, _ in self._worn]
        try:
            for part, attributes in self._worn:
                object.__setattr__(part, "__dict__", attributes)
            yield
        finally:
            for (part, _), attributes in zip(self._worn, before, strict=True):
                object.__setattr__(part, "__dict__", attributes)

    def changes(self) -> list[Change]:
        with self.worn():
            return super().changes()

    def take(self, values: Mapping[Path, Any]) -> None:
        """Takes attributes as the other rank has them."""
        with self.worn():
            here = values_of(self._module, self._ignored)
            known = [Change(path, "set", value) for path, value in values.items() if path in here]
            apply_changes(self._module, known)
            self.note()


class Buffers(Attributes):
    """The buffers of a module and its submodules of a user's own classes, as they are now."""

    def changed(self) -> str | None:
        """Returns the name of one that has changed since; None if nothing has."""
        return next((name_of(change.path) for change in self.changes()), None)

    def _held(self, part: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in part._buffers.items() if value is not None and not value.is_meta}


# ---- what a value was ------------------------------------------------------------------------------------------


class _Then(NamedTuple):
    """A container, a tensor or an object before a change.

    Attributes:
        ref: the object or tensor itself; the entries of a list or a set.
        parts: what was in it, in this form; of a long list nothing. A tensor's version; of an inference tensor, which
            counts none, its values.
        kind: its type.
    """

    ref: Any
    parts: Any
    kind: type


def _structure(value: Any, depth: int = 4) -> Any:
    """Returns a value as it is now: containers as copies, all else itself."""
    if isinstance(value, _ATOMS) or depth == 0:
        return value
    if isinstance(value, Tensor):
        return _Then(value, value.detach().clone() if value.is_inference() else value._version, Tensor)
    if isinstance(value, list | deque | tuple):
        refs = list(value)
        parts = [_structure(entry, depth - 1) for entry in refs] if _looks_into(refs) else []
        return _Then(refs, parts, type(value))
    if isinstance(value, Mapping):
        return _Then(None, {key: _structure(entry, depth - 1) for key, entry in value.items()}, type(value))
    if isinstance(value, set):
        return _Then(frozenset(value), None, set)
    if _is_object(value):
        return _Then(value, {key: _structure(entry, depth - 1) for key, entry in vars(value).items()}, object)
    return value


def _looks_into(entries: Sequence[Any]) -> bool:
    """Whether entries are looked into: not where there are many that look like values."""
    return 0 < len(entries) <= _LONGEST or (len(entries) > 0 and isinstance(entries[0], list | dict | set | deque))


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a user's own class, whose attributes say what it is."""
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and not isinstance(value, nn.Module | type) and _is_users(type(value))


def _compare(old: Any, new: Any, path: Path, found: list[Change]) -> None:
    if not isinstance(old, _Then):
        if not (new is old or (isinstance(new, _ATOMS) and type(new) is type(old) and new == old)):
            found.append(Change(path, "set", new, old if isinstance(old, _ATOMS) else None))
    elif old.kind is Tensor:
        if old.ref is not new or _changed(old):
            found.append(Change(path, "set", new, None if old.ref is new else old.ref))
    elif old.kind is object and old.ref is new:
        _compare_keys(old.parts, vars(new), path, found)
    elif isinstance(old.ref, list):
        _compare_lists(old, new, path, found)
    elif isinstance(old.parts, dict) and type(new) is old.kind:
        _compare_keys(old.parts, new, path, found)
    elif old.kind is set and isinstance(new, set) and old.ref <= new:
        if len(new) > len(old.ref):
            found.append(Change(path, "update", new - old.ref))
    else:
        found.append(Change(path, "set", new))


def _changed(old: _Then) -> bool:
    return not torch.equal(old.ref, old.parts) if old.ref.is_inference() else old.ref._version != old.parts


def _compare_lists(old: _Then, new: Any, path: Path, found: list[Change]) -> None:
    count = len(old.ref)
    if type(new) is not old.kind or len(new) < count or (len(new) > count and old.kind is not list):
        found.append(Change(path, "set", new))
    elif old.parts:
        for i, (part, entry) in enumerate(zip(old.parts, new, strict=False)):
            _compare(part, entry, (*path, i), found)
    elif not all(map(is_, old.ref, new)):
        found.append(Change(path, "set", new))
        return
    if old.kind is list and type(new) is list and len(new) > count:
        found.append(Change(path, "extend", new[count:]))


def _compare_keys(old: Mapping[Any, Any], new: Mapping[Any, Any], path: Path, found: list[Change]) -> None:
    for key, value in new.items():
        if key in old:
            _compare(old[key], value, (*path, key), found)
        else:
            found.append(Change((*path, key), "set", value))
    found.extend(Change((*path, key), "delete") for key in old if key not in new)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a value whose containers are copies, and small tensors, too: they may be changed in place."""
    if isinstance(value, _ATOMS):
        return value
    if id(value) in copies:
        return copies[id(value)]
    kept: Any = value
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.numel() <= _LARGEST and not value.is_meta:
            kept = value.detach().clone()
    elif isinstance(value, tuple):
        parts = [_copied(entry, copies) for entry in value]
        if not all(map(is_, parts, value)):
            kept = value._make(parts) if hasattr(value, "_make") else type(value)(parts)  # type: ignore[attr-defined]
    elif isinstance(value, list | deque | set | dict) or _is_object(value):
        with suppress(Exception):  # e.g. of what holds a file: it stays the module's
            kept = copies[id(value)] = copy.copy(value)
    if kept is not value and not isinstance(kept, Tensor | tuple | set):
        inside = _within(kept)
        if isinstance(inside, list | deque) and not _looks_into(inside):
            return kept
        for key, entry in list(enumerate(inside) if isinstance(inside, list | deque) else inside.items()):
            inside[key] = _copied(entry, copies)
    copies[id(value)] = kept
    return kept
