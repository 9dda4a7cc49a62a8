"""What stands on this rank for a tensor that other ranks hold: never touched in silence (layer T).

    what code does with it                       rank that holds the tensor     another rank: the stand-in
    p.clamp_(-1, 1), p.copy_(...), p.grad.mul_   does it                        nothing: it is done there
    p.grad.sub_(p.grad.mean()), clone, deepcopy  does it                        a stand-in for the result
    p + other, other.add_(p), stack([p, other])  has a stand-in for ``other``   error
    p.norm().item(), torch.save, numpy, if p > 0 has the value                  error
    any of these in ``training_step``            (only leaders run it)          error

So an operation on one parameter that runs on all ranks is right, and whatever mixes parameters, or wants a value, is an
error on some rank. If all ranks run the same code, nothing wrong can come of it: a stand-in for a result says that the
other rank has the result. If that is not so, the other rank had a stand-in among the operands, and has one for the
result, which it can neither read nor write into a tensor that it holds.

Subclasses made by ``_make_wrapper_subclass`` and ``__torch_dispatch__`` are torch's way for tensors without memory;
checked with torch 2.13 by `tests/ranks/pipeline/test_stand_ins.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_STEPS = {"training_step", "validation_step", "test_step", "predict_step"}
_TRAINED: Any = Tensor.requires_grad  # a descriptor
_NO_GRADIENTS = {"optimizer_step", "optimizer_zero_grad"}  # an optimizer skips what has none


@dataclass(slots=True)
class Here:
    """What runs on this rank at present.

    Attributes:
        rank: this one.
        hook: returns the name of the hook that runs; None: it is not known.
        gradients: whether parameters have gradients, between a backward pass and the next ``zero_grad``.
        made: stand-ins that user code has made from others, by their ids, as long as they live.
    """

    rank: int
    hook: Callable[[], str | None] = lambda: None
    gradients: bool = False
    made: weakref.WeakValueDictionary[int, StandIn] = field(default_factory=weakref.WeakValueDictionary)


@dataclass(frozen=True, slots=True)
class Held:
    """What a stand-in stands for.

    Attributes:
        name: of the tensor.
        ranks: that hold it.
        kind: its class.
        here: what runs on this rank.
    """

    name: str
    ranks: tuple[int, ...]
    kind: type[Tensor]
    here: Here

    def __str__(self) -> str:
        *others, last = map(str, self.ranks)
        return f"{self.name} is held by rank {', '.join(others)}{' or ' if others else ''}{last}"


class StandIn(Tensor):
    """Has the shape, dtype, device and attributes of a tensor that others hold, and no memory.

    ``is_meta`` is True, so that code of the user can leave it out.

    Attributes:
        held: what it stands for.
    """

    held: Held
    own = frozenset({"held", "gradient"})  # attributes that are not of the tensor it stands for

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _Operation(func, args, kwargs or {}).result()

    # ---- what torch asks without an operation ------------------------------------------------------------------

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        self.check_step("data = ...")  # the rank that holds it sets its own

    @property
    def grad(self) -> Tensor | None:
        here = self.held.here
        if not (here.gradients and self.requires_grad and self.is_leaf) or here.hook() in _NO_GRADIENTS:
            return None
        if "gradient" not in vars(self):
            held = replace(self.held, name=f"{self.held.name}.grad")
            vars(self)["gradient"] = _made(StandIn, self, held, trained=False, device=self.device)
        return vars(self)["gradient"]

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        pass  # as `data`

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return _TRAINED.__get__(self)

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        if trained != self.requires_grad and (hook := self.held.here.hook()) in _STEPS:
            raise RuntimeError(
                f"{hook} on rank {self.held.here.rank} has changed requires_grad of {self.held.name}, of a layer that"
                " another rank runs: in a pipeline only the first rank of each group runs it. Change it in"
                " on_train_batch_start, which all ranks run, or use strategy='hetero_balanced'"
            )
        _TRAINED.__set__(self, trained)

    def requires_grad_(self, mode: bool = True) -> StandIn:
        self.requires_grad = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        self.check_step("deepcopy")
        copy = _made(type(self), self, self.held, trained=self.requires_grad, device=self.device)
        self.held.here.made[id(copy)] = memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("pickle, as torch.save does")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.held}, of shape {tuple(self.shape)}>"

    # ---- errors ------------------------------------------------------------------------------------------------

    def check_step(self, what: str) -> None:
        """Raises RuntimeError in a step, which its leader alone runs."""
        if self.held.here.hook() in _STEPS:
            self.refuse(what)

    def refuse(self, what: str) -> NoReturn:
        """Raises RuntimeError: names the tensor, the ranks, the hook and the ways out.

        Args:
            what: is done with it.
        """
        here = self.held.here
        hook = here.hook()
        where = f" in {hook}" if hook else ""
        out = (
            "only the leader of a group runs a step, and only the backbone's layers may use their weights there. For a"
            " penalty on weights use the optimizer's weight_decay"
            if hook in _STEPS
            else "code that runs on all ranks may change each parameter separately, or a copy made of it after set-up"
            " (deepcopy in on_fit_start); it cannot read values, mix parameters or run layers. For norms use"
            " gradient_clip_val, clip_grad_norm_ or grad_norm on all ranks; for averages Lightning's WeightAveraging;"
            " to save trainer.save_checkpoint on all ranks; after trainer.fit the model is whole"
        )
        raise RuntimeError(
            f"{self.held} in this pipeline, and rank {here.rank} has no values of it for {what}{where}: {out}; or use"
            " strategy='hetero_balanced', where each rank has the whole model"
        )


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: StandIn, *_: Any, **__: Any) -> NoReturn:
        self.refuse(what)

    return refuse


for _name in ("__format__", "__float__", "__int__", "numpy", "__array__", "__dlpack__", "tolist", "data_ptr"):
    setattr(StandIn, _name, _refusing(_name.strip("_")))
StandIn.untyped_storage = _refusing("storage")  # type: ignore[method-assign]


def stand_in_for(tensor: Tensor, name: str, ranks: Sequence[int], here: Here, *, device: torch.device) -> StandIn:
    """Returns what stands for a parameter or buffer; an instance of its class, too, without its attributes.

    Args:
        tensor: the real one.
        name: of it.
        ranks: that hold it.
        here: of this rank.
        device: of this rank's layers, which the stand-in names as its own.
    """
    held = Held(name, tuple(ranks), type(tensor), here)
    return _made(_class_of(type(tensor)), tensor, held, trained=tensor.requires_grad, device=device)


@cache
def _class_of(kind: type[Tensor]) -> type[StandIn]:
    return StandIn if kind is Tensor else type("StandIn", (StandIn, kind), {})


def _made(kind: type[StandIn], shaped: Tensor, held: Held, *, trained: bool, device: torch.device) -> StandIn:
    found: StandIn = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        kind, shaped.shape, strides=shaped.stride(), dtype=shaped.dtype, device=device, requires_grad=trained
    )
    found.held = held
    return found


# ---- operations --------------------------------------------------------------------------------------------------


class _Operation:
    """One of torch's with stand-ins among its arguments.

    Args:
        func: the operator.
        args, kwargs: of its call.
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._first = next(t for t in tensors if isinstance(t, StandIn))
        self._real = [t for t in tensors if not isinstance(t, StandIn)]

    def result(self) -> Any:
        """Returns what the operation returns on this rank.

        Raises:
            RuntimeError: it needs what this rank has not.
        """
        if self._name.startswith("new_"):  # of a tensor they take only what a stand-in has
            return self._with(lambda t: torch.empty(0, dtype=t.dtype, device=t.device))
        self._first.check_step(self._name)
        if self._func.namespace != "aten":  # collectives
            self._first.refuse(self._name)
        if self._name.startswith("_foreach_") and self._real and len(self._lists[0]) > 1:
            return self._each()
        if self._name == "equal" and self._args[0].shape != self._args[1].shape:
            return False
        schema = self._func._schema
        positional = zip(schema.arguments, self._args, strict=False)
        by_name = ((a, self._kwargs[a.name]) for a in schema.arguments if a.name in self._kwargs)
        written = [value for a, value in (*positional, *by_name) if a.alias_info is not None and a.alias_info.is_write]
        if written:
            if not all(isinstance(tensor, StandIn) for tensor in pytree.tree_leaves(written)):
                self._first.refuse(self._name)
            self._draw()
            return tuple(written) if len(schema.returns) > 1 else written[0] if schema.returns else None
        if any(t.dim() or not self._first.dim() for t in self._real):
            self._first.refuse(f"{self._name} with other tensors")
        found = self._shapes()
        self._draw()
        return pytree.tree_map(self._stand_in, found)

    def _draw(self) -> None:
        """Draws what the real tensor's rank draws, so that what is drawn later is the same on all ranks."""
        if torch.Tag.nondeterministic_seeded in self._func.tags:
            self._with(lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device))

    def _shapes(self) -> Any:
        try:
            found = self._with(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
        except Exception:
            found = None
        if found is None or not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found)):
            self._first.refuse(self._name)
        return found

    def _stand_in(self, shaped: Tensor) -> StandIn:
        found = _made(StandIn, shaped, self._first.held, trained=False, device=self._first.device)
        found.held.here.made[id(found)] = found
        return found

    def _with(self, turn: Callable[[Tensor], Tensor]) -> Any:
        """Runs the operation with other tensors instead of all that it is given, on their device."""
        args, kwargs = pytree.tree_map(
            lambda leaf: turn(leaf) if isinstance(leaf, Tensor) else leaf, (tuple(self._args), self._kwargs)
        )
        if kwargs.get("device") is not None:
            kwargs["device"] = turn(self._first).device
        return self._func(*args, **kwargs)

    @property
    def _lists(self) -> list[Any]:
        return [value for value in self._args if isinstance(value, list | tuple)]

    def _each(self) -> Any:
        """Runs an operation on lists of tensors for each place separately, and together where all is on this rank."""
        places = range(len(self._lists[0]))
        apart = [i for i in places if any(isinstance(each[i], StandIn) for each in self._lists)]
        here = [i for i in places if i not in set(apart)]
        found: dict[int, Any] = {}
        for chosen in (here, *([i] for i in apart)):
            if chosen:
                found.update(zip(chosen, self._at(chosen) or (), strict=False))
        return [found[i] for i in places] if self._func._schema.returns else None

    def _at(self, places: Sequence[int]) -> Any:
        def some(value: Any) -> Any:
            return [value[i] for i in places] if isinstance(value, list | tuple) else value

        return self._func(*map(some, self._args), **self._kwargs)


# ---- what is no more --------------------------------------------------------------------------------------------


class _Left(Tensor):
    """A tensor that another one has replaced, where user code keeps a reference."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        left = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Left))
        raise RuntimeError(
            f"a reference to {vars(left)['_left']} was kept from before the pipeline's layers were divided, or divided"
            " again, and leads to nothing now: take tensors from the module when they are needed (self.parameters(),"
            " self.net[0].weight); or use strategy='hetero_balanced'"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{vars(self)['_left']} before the layers were divided>"


@cache
def _left_by(kind: type[Tensor]) -> type[Tensor]:
    return type("Left", (_Left, kind), {})


def leave(tensor: Tensor, name: str) -> None:
    """Frees the memory of a tensor that has been replaced, even where references are kept, and harms no view.

    Code that uses the reference gets an error.

    Args:
        tensor: a parameter or buffer.
        name: of it.
    """
    tensor.grad = None
    tensor.data = tensor.data.new_empty(0)
    vars(tensor).clear()
    vars(tensor)["_left"] = name
    tensor.__class__ = _left_by(type(tensor))
