"""Checkpoints of the whole model, though no rank has it: the keys stock training writes, tensor by tensor (layer T).

    state_dict()    every rank: its own ``module.state_dict()``, stand-ins for others' tensors
                    group 0's owners ──one tensor after the other──► rank 0: files without a name, mapped into memory
    load            every rank reads its part of the whole state dict, which may be mapped, too

Each rank asks the module, so hooks of the user and states that are no tensors (``get_extra_state``) take part: a key
comes from the rank that owns the module it belongs to.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.runtime.ownership.file_tensors import empty_in_file
from lightning_hetero.pipeline.runtime.ownership.owner_groups import as_bytes, raise_together
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership

__all__ = ["OnRankZero", "WholeState"]

K = TypeVar("K", bound=Hashable)

PACKED_BYTES = 1 << 14
"""Smaller tensors of a rank travel in one message."""


class OnRankZero(dict[Any, Any]):
    """The state of the whole model on another rank than 0: without entries; one that is asked for is an error."""

    def __missing__(self, key: Any) -> Any:
        raise RuntimeError(
            f"{key!r} of a checkpoint is on rank 0 only, because in a pipeline each rank has its own layers: read and"
            " change it under `if self.trainer.is_global_zero`, or use strategy='hetero_balanced'"
        )


class WholeState:
    """Saves and loads a pruned model and its optimizers as if one process had them.

    All methods are collective, except loading.

    Args:
        module: the whole model, pruned.
        ownership: who holds what.
        group: over all ranks, one that takes CPU tensors (gloo).
        folder: where rank 0 keeps other ranks' tensors until they are written; on a disk, with room for the model.
            None: the system's folder for temporary files.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        *,
        group: dist.ProcessGroup,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.folder = folder
        self.group = group
        self._module = module
        self._ownership = ownership

    # ---- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what ``module.state_dict()`` of the whole model would be, on rank 0; elsewhere an `OnRankZero`.

        Tensors are on the CPU. Rank 0's own are not copied, as with stock torch; the others cost no memory.

        Raises:
            RuntimeError: on all ranks, if one could not make its part: which, and why.
        """
        # Not keep_vars: then a `state_dict` that somebody has overridden without arguments works, too.
        ownership = self._ownership

        def source(key: str) -> int:
            return (ownership.owners(key) if key in ownership.layer_of else ownership.owners_of_key(key))[0]

        return self._collect(self._module.state_dict, source, ownership.layer_of.keys())

    def collect_apart(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns, on rank 0, those tensors for which it has stand-ins, from ranks that have them; elsewhere {}.

        Args:
            values: this rank's, by any keys, which are the same on all ranks.

        Raises:
            RuntimeError: no rank has values for one of them.
        """
        apart: list[set[str] | None] = [None] * dist.get_world_size(self.group)
        own = {key for key, tensor in values.items() if tensor.is_meta}
        dist.all_gather_object(apart, own if self._ownership.rank == 0 else set(), group=self.group)
        if not (wanted := apart[0]):
            return {}
        return self._collect(lambda: {k: v for k, v in values.items() if k in wanted}, lambda _: 0, ())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` of the whole model would be, on rank 0; elsewhere an `OnRankZero`.

        Settings in ``param_groups`` are rank 0's; they are the same everywhere unless an optimizer derives them from
        its own parameters.

        Raises:
            RuntimeError: as `state_dict`.
            ValueError: the optimizer has a parameter that is not the module's.
        """
        ownership, by_id = self._ownership, self._by_id(optimizer)
        names: dict[int, str] = {}
        for index, parameter in enumerate(_parameters(optimizer)):
            if (
                by_id[id(parameter)] not in names.values()
            ):  # one that occurs again has its first index, as in torch
                names[index] = by_id[id(parameter)]
        whole: dict[str, Any] = {}

        def state() -> dict[Any, Any]:
            whole.update(optimizer.state_dict())
            return {k: v for k, v in whole["state"].items() if k not in names or ownership.holds(names[k])}

        def source(key: Any) -> int:
            return ownership.owners(names[key])[0] if key in names else ownership.leaders[0]

        collected = self._collect(state, source, names.keys())
        if ownership.rank != 0:
            return OnRankZero()
        order = {key: i for i, key in enumerate(names)}
        return {
            **whole,
            "state": {k: collected[k] for k in sorted(collected, key=lambda k: order.get(k, -1))},
        }

    # ---- loading -----------------------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Takes this rank's part of a whole model's state dict; not collective.

        Args:
            state: as from `state_dict`, or from stock torch; it may be mapped (`mapped.load_mapped`): only this rank's
                part is read.
            strict: as in torch.

        Returns:
            Missing and unexpected keys, of the whole model, as from torch.

        Raises:
            RuntimeError: keys or shapes do not fit, as from torch.
        """
        with warnings.catch_warnings():  # nothing is copied to stand-ins: on purpose
            warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
            return self._module.load_state_dict(state, strict=strict)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of a whole model's optimizer state; not collective.

        Args:
            optimizer: of this module, pruned.
            state: as from `optimizer_state`, or from stock torch. It is copied, as it may be mapped.

        Raises:
            ValueError: other numbers of groups or parameters, as from torch; a parameter that is not the module's.
        """
        by_id = self._by_id(optimizer)
        saved = (index for group in state["param_groups"] for index in group["params"])
        names = {index: by_id[id(p)] for index, p in zip(saved, _parameters(optimizer), strict=False)}
        mine = {
            key: pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
            for key, value in state["state"].items()
            if key not in names or self._ownership.holds(names[key])
        }
        optimizer.load_state_dict({**state, "state": mine})

    def _by_id(self, optimizer: Optimizer) -> dict[int, str]:
        """Returns the names of an optimizer's parameters."""
        by_id = {id(tensor): name for name, tensor in self._ownership.tensors(self._module).items()}
        for index, parameter in enumerate(_parameters(optimizer)):
            if id(parameter) not in by_id:
                raise ValueError(
                    f"parameter {index} of {type(optimizer).__name__}, of shape {tuple(parameter.shape)}, is not the"
                    " module's: make optimizers from the module's parameters, before the layers are divided"
                )
        return by_id

    # ---- from the owners to rank 0 -----------------------------------------------------------------------------

    def _collect(
        self, make: Callable[[], Mapping[K, Any]], source: Callable[[K], int], certain: Container[K]
    ) -> dict[K, Any]:
        """Returns all ranks' parts of a mapping as one, on rank 0; it keeps what ``make`` returned there besides.

        Args:
            make: this rank's part, in which what others hold is a stand-in or missing.
            source: the rank that a key is to come from.
            certain: keys that come from there only; others from any rank of group 0 that has values for them.
        """
        ownership, mine, offers = self._ownership, {}, b""
        problem: Exception | None = None
        whole: dict[K, Any] = {}
        try:
            made = make()
            whole = made if isinstance(made, dict) else dict(made)
            candidates = {
                key: value
                for key, value in whole.items()
                if (
                    source(key) == ownership.rank if key in certain else ownership.rank in ownership.groups[0]
                )
            }
            mine = {
                key: value for key, value in candidates.items() if not any(t.is_meta for t in _tensors(value))
            }
            offers = pickle.dumps({key: _described(value) for key, value in mine.items()})
        except Exception as error:
            problem = error
        raise_together(problem, self.group)
        gathered: list[bytes] = [b""] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, offers, group=self.group)
        offered: list[dict[K, Any]] = [pickle.loads(each) for each in gathered]
        chosen = {key: rank for rank in reversed(ownership.groups[0]) for key in offered[rank]}
        for key in chosen:
            if key in offered[source(key)]:
                chosen[key] = source(key)
        if ownership.rank == 0:
            return self._receive(whole, offered, chosen)
        raise_together(None, self.group)  # rank 0 has room for all
        keys = [key for key, rank in chosen.items() if rank == ownership.rank]
        specs = [spec for key in keys for spec in _specs(offered[ownership.rank][key])]
        tensors = dict(zip(specs, (t for key in keys for t in _tensors(mine[key])), strict=True))
        for bundle in _bundles(tensors):
            data = torch.cat([as_bytes(tensors[spec]) for spec in bundle])
            dist.send(data, 0, group=self.group)
        return OnRankZero()

    def _receive(
        self, whole: dict[K, Any], offered: Sequence[Mapping[K, Any]], chosen: Mapping[K, int]
    ) -> dict[K, Any]:
        problem: Exception | None = None
        places: dict[tuple[int, _TensorSpec], Tensor] = {}
        try:
            for key, rank in chosen.items():
                own = iter(_tensors(whole[key]) if rank == 0 else ())
                for spec in _specs(offered[rank][key]):
                    tensor = next(own, None)
                    if tensor is not None and tensor.device.type == "cpu":
                        places[rank, spec] = tensor
                    elif (rank, spec) not in places:
                        places[rank, spec] = empty_in_file(spec.shape, spec.dtype, self.folder)
                        if tensor is not None:
                            places[rank, spec].copy_(tensor)
            if lost := [key for key in whole if key not in chosen]:
                raise KeyError(
                    f"no rank of the pipeline has values for {lost[:5]}: all ranks must keep the same in their"
                    " checkpoints; or use strategy='hetero_balanced'"
                )
        except Exception as error:
            problem = error
        raise_together(problem, self.group)
        for sender in sorted({rank for rank, _ in places} - {0}):
            for bundle in _bundles([spec for rank, spec in places if rank == sender]):
                tensors = [places[sender, spec] for spec in bundle]
                if len(tensors) == 1:
                    dist.recv(as_bytes(tensors[0]), sender, group=self.group)  # straight into its memory
                    continue
                data = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8)
                dist.recv(data, sender, group=self.group)
                for tensor, piece in zip(tensors, data.split([t.nbytes for t in tensors]), strict=True):
                    as_bytes(tensor).copy_(piece)
        for key, rank in chosen.items():
            whole[key] = pytree.tree_map(
                lambda leaf, rank=rank: places[rank, leaf] if isinstance(leaf, _TensorSpec) else leaf,
                offered[rank][key],
            )
        return whole


# ---- values with tensors in them ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """Stands for a tensor in what a rank offers; views of the same memory have the same spec."""

    memory: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def _bundles(specs: Iterable[_TensorSpec]) -> list[list[_TensorSpec]]:
    """Returns what travels together: the small ones, such as an optimizer's counters; each other one alone."""
    specs = list(specs)
    small = [spec for spec in specs if 0 < spec.size_bytes < PACKED_BYTES]
    return [*([small] if small else []), *([spec] for spec in specs if spec.size_bytes >= PACKED_BYTES)]


def _described(value: Any) -> Any:
    """Returns the value with specs instead of tensors."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise TypeError(
                f"a {leaf.layout} tensor of shape {tuple(leaf.shape)} cannot be collected, only dense ones"
            )
        memory = (leaf.data_ptr(), *leaf.stride()) if leaf.numel() else (id(leaf),)
        return _TensorSpec(memory, leaf.shape, leaf.dtype)

    return pytree.tree_map(spec, value)


def _specs(described: Any) -> list[_TensorSpec]:
    return [leaf for leaf in pytree.tree_leaves(described) if isinstance(leaf, _TensorSpec)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
