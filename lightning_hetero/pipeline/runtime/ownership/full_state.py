"""Checkpoints of the whole model, though no rank trains it: the keys that stock training writes (layer T).

    state_dict()    every rank: its own ``module.state_dict()``, stand-ins for others' tensors
                    group 0's owners ──one rank after the other──► rank 0, in its memory
    load            every rank reads its part of the whole state dict, which may be mapped

Each rank asks the module, so hooks of the user and states that are no tensors (``get_extra_state``) take part: a key
comes from the rank that owns the module it belongs to.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.runtime.ownership.owner_groups import together
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.transport.objects import gathered, packed, receive, send
from lightning_hetero.transport.whole_files import whole_file


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
        ownership: which rank holds what.
        group: over all ranks, one that takes CPU tensors (gloo).
    """

    def __init__(self, module: nn.Module, ownership: Ownership, *, group: dist.ProcessGroup) -> None:
        self.group = group
        self._module = module
        self._ownership = ownership

    # ---- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what ``module.state_dict()`` of the whole model would be, on rank 0; elsewhere an `OnRankZero`.

        Tensors are on the CPU. Rank 0 needs memory for the whole of it; its own are not copied, as with stock torch.

        Raises:
            RuntimeError: on all ranks, if one could not make its part: which, and why.
        """
        # Not keep_vars: then a `state_dict` that is overridden without arguments works, too.
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
        apart = {key for key, tensor in values.items() if tensor.is_meta}
        if not (wanted := gathered(apart, self.group, dist.Work.wait)[0]):
            return {}
        return self._collect(lambda: {k: v for k, v in values.items() if k in wanted}, lambda _: 0, ())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` of the whole model would be, on rank 0; elsewhere an `OnRankZero`.

        Settings in ``param_groups`` are rank 0's; they are the same everywhere unless an optimizer derives them from
        its own parameters.

        Raises:
            RuntimeError: as `state_dict`.
        """
        ownership, by_id = self._ownership, self._by_id()
        names: dict[int, str] = {}
        for index, parameter in enumerate(_parameters(optimizer)):  # of a layer that was replaced, it is no more there
            if (name := by_id.get(id(parameter))) is not None and name not in names.values():
                names[index] = name  # one that occurs again has its first index, as in torch
        whole: dict[str, Any] = {}

        def state() -> dict[Any, Any]:
            whole.update(optimizer.state_dict())
            return {k: v for k, v in whole["state"].items() if k not in names or ownership.holds(names[k])}

        def source(key: Any) -> int:
            return ownership.owners(names[key])[0] if key in names else ownership.groups[0][0]

        collected = self._collect(state, source, names.keys())
        if ownership.rank != 0:
            return OnRankZero()
        order = {key: i for i, key in enumerate(names)}
        return {**whole, "state": {k: collected[k] for k in sorted(collected, key=lambda k: order.get(k, -1))}}

    # ---- loading -----------------------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Takes this rank's part of a whole model's state dict; not collective.

        Args:
            state: as from `state_dict`, or from stock torch; it may be mapped (`load_mapped`): only this rank's
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
            ValueError: other numbers of groups or parameters, as from torch.
        """
        by_id = self._by_id()
        saved = (index for group in state["param_groups"] for index in group["params"])
        names = {index: by_id.get(id(p)) for index, p in zip(saved, _parameters(optimizer), strict=False)}
        mine = {
            key: pytree.tree_map_only(Tensor, torch.clone, value)
            for key, value in state["state"].items()
            if (name := names.get(key)) is None or self._ownership.holds(name)
        }
        optimizer.load_state_dict({**state, "state": mine})

    def _by_id(self) -> dict[int, str]:
        """Returns the names of the module's parameters, by their ids."""
        return {id(tensor): name for name, tensor in self._ownership.tensors(self._module).items()}

    # ---- from the owners to rank 0 -----------------------------------------------------------------------------

    def _collect(
        self, make: Callable[[], Mapping[Any, Any]], source: Callable[[Any], int], certain: Container[Any]
    ) -> dict[Any, Any]:
        """Returns all ranks' parts of a mapping as one, on rank 0; it keeps what ``make`` returned there besides.

        Args:
            make: this rank's part, in which what others hold is a stand-in or missing.
            source: the rank that a key is to come from.
            certain: keys that come from there only; others from any rank of group 0 that has values for them.
        """
        rank, ranks = self._ownership.rank, self._ownership.groups[0]
        senders = [r for r in ranks if r != 0]
        whole: dict[Any, Any] = {}
        mine: dict[Any, Any] = {}
        data: Tensor | None = None
        with together(self.group):
            made = make()
            whole = made if isinstance(made, dict) else dict(made)
            for key, value in whole.items():
                offered = source(key) == rank if key in certain else rank in ranks
                if offered and not any(isinstance(t, Tensor) and t.is_meta for t in pytree.tree_leaves(value)):
                    mine[key] = value
            if rank in senders:
                data = packed({key: pytree.tree_map(_alone, value) for key, value in mine.items()}, tensors=True)
        if data is not None:
            send(data, 0, self.group)
        with together(self.group):
            if rank == 0:
                offers = {0: _on_host(mine)} | {sender: receive(sender, self.group) for sender in senders}
                chosen = {key: r for r in reversed(ranks) for key in offers[r]}
                chosen.update((key, source(key)) for key in chosen if key in offers.get(source(key), ()))
                whole.update((key, offers[r][key]) for key, r in chosen.items())
                if lost := [key for key in whole if key not in chosen]:
                    raise KeyError(
                        f"no rank of the pipeline has values for {lost[:5]}: all ranks must keep the same in their"
                        " checkpoints; or use strategy='hetero_balanced'"
                    )
        return whole if rank == 0 else OnRankZero()


# ---- values with tensors in them ---------------------------------------------------------------------------------


def _alone(leaf: Any) -> Any:
    """Returns a tensor without what else is in its memory, which would be sent with it."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    return leaf if leaf.untyped_storage().nbytes() == leaf.nbytes else leaf.clone()


def _on_host(values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns values with their tensors on the CPU; what was one tensor under two keys is one there."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type == "cpu":
            return leaf
        return copies.setdefault((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype), leaf.cpu())

    return {key: pytree.tree_map(copied, value) for key, value in values.items()}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---- files -----------------------------------------------------------------------------------------------------------


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of this machine's file system, not a URL such as ``s3://...``."""
    return "://" not in str(path) and "::" not in str(path)


def save_streamed(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Writes a local checkpoint tensor by tensor; see `whole_file`.

    The same as Lightning's own `TorchCheckpointIO` writes, which collects the whole file in memory first, twice: of a
    pipeline that is the whole model and its optimizer, for which no rank need have room.

    Args:
        checkpoint: anything that `torch.save` takes.
        path: of the file; folders are made. An old file is replaced; where it is mapped, the old contents stay.

    Raises:
        OSError: no space, or the folder cannot be written to; an old file is still there then.
    """
    with whole_file(path) as file:
        torch.save(checkpoint, file)


def load_mapped(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any] | None:
    """Loads a checkpoint whose tensors stay in its file until they are read.

    So each rank can take its part of a whole model's checkpoint. Writing to the tensors changes nothing on disk. Copy
    what is kept: the file may be overwritten.

    Args:
        path: of the checkpoint.
        weights_only: as in `torch.load`; None: torch's default.

    Returns:
        The checkpoint, on the CPU; None if that is not possible: no local file, or not as `torch.save` writes it.

    Raises:
        pickle.UnpicklingError: as `torch.load`, e.g. it holds more than weights.
    """
    local = Path(path)
    if not local.is_file() or not zipfile.is_zipfile(local):
        return None
    options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
    return torch.load(local, map_location="cpu", mmap=True, **options)
