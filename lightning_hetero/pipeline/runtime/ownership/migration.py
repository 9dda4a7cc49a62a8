"""Layers change hands between two training batches, with all that belongs to them; in two phases (layer T).

    stage     every rank says what it is about to send, and where it stands: one ticket for all
              tensors travel into new ones, from host to host; every rank confirms
              until here nothing has changed, and a rank that cannot do its part cancels it for all
    commit    new tensors take their place, what is elsewhere now loses its memory: without a message

What belongs to a layer: its parameters with the state that any optimizer has for them, by name; its buffers; what its
modules return as ``get_extra_state``; the same of copies of the model, such as averaged weights. A tensor that has
several names (tied weights) is one tensor here. Random streams are seeded by step, micro-batch and layer; schedulers
and settings of optimizers are the same on all ranks: these need not travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.runtime.ownership.owner_groups import as_bytes, together
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership, named
from lightning_hetero.pipeline.runtime.ownership.pruning import like, prune, put_in_place
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here
from lightning_hetero.transport.objects import Wait, gathered, packed, unpacked


class CancelledError(RuntimeError):
    """A migration was given up on all ranks, and nothing has changed on any; says why."""


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor, or the extra state of one module, goes to one rank.

    Attributes:
        name: of the tensor, its first one; or the path of the module.
        source, target: ranks.
        extra: whether it is a module's extra state.
    """

    name: str
    source: int
    target: int
    extra: bool = False


def moves(old: Ownership, new: Ownership, module: nn.Module) -> list[TensorMove]:
    """Returns what must travel so that all holders under a new plan have what they hold, the same on all ranks.

    What the target does not have is sent. If several ranks hold a tensor, the one with least to send so far sends it.
    Buffers come from the lowest group, and its new rank gets them even where it holds the layer: other groups'
    statistics may differ.

    Args:
        old, new: of the same module.
        module: for the sizes of its tensors, which may be on meta.
    """
    found: list[TensorMove] = []
    loads = Counter[int]()
    for name, tensor in old.tensors(module).items():
        owners, trained = old.owners(name), name in old.parameters
        for target in _targets(old.holders(name), owners, new.holders(name), new.owners(name), trained):
            source = min(owners, key=lambda rank: (loads[rank], rank)) if trained else owners[0]
            loads[source] += tensor.nbytes
            found.append(TensorMove(name, source, target))
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            before, after = old.owners_of_key(path), new.owners_of_key(path)
            found += [TensorMove(path, before[0], t, extra=True) for t in _targets(before, before, after, after, False)]
    return found


def _targets(
    holders: Sequence[int], owners: Sequence[int], new_holders: Sequence[int], new_owners: Sequence[int],
    trained: bool,
) -> list[int]:  # fmt: skip
    targets = [rank for rank in new_holders if rank not in holders]
    if not trained and new_owners[0] in holders and new_owners[0] != owners[0]:
        targets.append(new_owners[0])
    return targets


class Migration:
    """The way of one rank's part of the model from one plan to the next.

    Args:
        module: the whole model, pruned by ``old``.
        copies: of it, pruned in the same way; parameters and buffers of these move, too.
        optimizers: over its parameters.
        old, new: which rank holds what, before and after.
        gradients: whether gradients that parameters have at present go with them.
        device: where this rank's layers are.
        group: over all ranks, one that takes CPU tensors (gloo).
        wait: for a collective.
        wait_for_peer: for sends and receives.
        here: what runs on this rank.

    Attributes:
        moves: see `moves`.
        sent_bytes: what goes from one rank to another, by (source, target); known after `stage`, the same on all.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], old: Ownership, new: Ownership, *,
        copies: Sequence[nn.Module] = (), gradients: bool = False, device: torch.device, group: dist.ProcessGroup,
        wait: Wait, wait_for_peer: Wait, here: Here | None = None,
    ) -> None:  # fmt: skip
        self._modules, self._optimizers = (module, *copies), tuple(optimizers)
        self._old, self._new = old, new
        self._gradients = gradients
        self._device, self._group = device, group
        self._wait, self._wait_for_peer = wait, wait_for_peer
        self._here = Here(old.rank) if here is None else here
        self._staged: dict[Any, Any] | None = None
        self.moves = moves(old, new, module)
        self.sent_bytes: dict[tuple[int, int], int] = {}

    @property
    def size_bytes(self) -> int:
        """What all ranks together send; 0 before `stage`."""
        return sum(self.sent_bytes.values())

    # ---- first phase -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def stage(self, ticket: object) -> None:
        """Brings what this rank is to hold into new tensors; collective. The old owners stay what they are.

        Args:
            ticket: where this rank stands, and what it is about to do; equal on all ranks, or nothing is done.

        Raises:
            CancelledError: on all ranks, if one of them could not do its part: which, and why.
            RuntimeError: the ranks have different tickets; or a peer is lost, or what ``wait`` raises.
        """
        rank = self._old.rank
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[Tensor]] = {}
        staged: dict[Any, Any] = {}
        text = packed(None)
        with self._together():
            refuse_copies(self._modules[0], self._optimizers, self._old, self._here)
            described: dict[int, Any] = {}
            for target in sorted({move.target for move in self.moves if move.source == rank}):
                described[target], outgoing[target] = _described(self._values(target), self._device)
            text = packed(described)
        offers = gathered((ticket, text), self._group, self._wait)
        others = [r for r, (theirs, _) in enumerate(offers) if theirs != offers[0][0]]
        if others:
            raise RuntimeError(
                f"ranks {others} are about to change to another plan, or at another batch, than rank 0:"
                f" {offers[others[0]][0]} and {offers[0][0]}; this is a bug of lightning_hetero"
            )
        manifests: list[dict[int, Any]] = [unpacked(text) for _, text in offers]
        with self._together():
            for source in (s for s, to in enumerate(manifests) if rank in to):
                values, incoming[source] = _rooms(manifests[source][rank], self._device)
                staged.update(values)
        self._transfer(outgoing, incoming)
        with self._together():  # all have what they are to hold
            self._staged = staged
        self.sent_bytes = {
            (source, target): sum(leaf.nbytes for leaf in pytree.tree_leaves(manifest) if _is_absent(leaf))
            for source, to in enumerate(manifests)
            for target, manifest in to.items()
        }

    def _together(self) -> AbstractContextManager[None]:
        return together(self._group, wait=self._wait, error=CancelledError)

    def _transfer(self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]) -> None:
        """Sends and receives all tensors at once, from host to host."""
        works = [
            dist.isend(as_bytes(tensor), target, group=self._group)
            for target, tensors in outgoing.items()
            for tensor in tensors
            if tensor.numel()
        ]
        rooms = [(source, room) for source, rooms in incoming.items() for room in rooms if room.numel()]
        landed = [as_bytes(room) for _, room in rooms]  # the room's own memory, if that is on the host and in order
        works += [dist.irecv(data, s, group=self._group) for (s, _), data in zip(rooms, landed, strict=True)]
        for work in works:
            assert work is not None
            self._wait_for_peer(work)
        for (_, room), data in zip(rooms, landed, strict=True):
            if data.data_ptr() != room.data_ptr():
                room.copy_(data.view(room.dtype).view(room.shape))

    def _values(self, target: int) -> dict[Any, Any]:
        """Returns what this rank sends to another, by kind, number of the module or optimizer, and name."""
        values: dict[Any, Any] = {}
        mine = [move for move in self.moves if move.source == self._old.rank and move.target == target]
        for number, module in enumerate(self._modules):
            tensors = self._old.tensors(module)
            for move in mine:
                if move.extra:
                    values["extra", number, move.name] = module.get_submodule(move.name).get_extra_state()
                else:
                    values["tensor", number, move.name] = tensors[move.name].detach(), tensors[move.name].requires_grad
        tensors = self._old.tensors(self._modules[0])
        for name in (move.name for move in mine if move.name in self._old.parameters):
            for number, optimizer in enumerate(self._optimizers):
                if tensors[name] in optimizer.state:
                    values["state", number, name] = optimizer.state[tensors[name]]
            if self._gradients and tensors[name].grad is not None:
                values["gradient", 0, name] = tensors[name].grad
        return values

    # ---- second phase ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self) -> None:
        """Lets what has come take its place, and gives free what others hold now; after `stage`, on all ranks."""
        assert self._staged is not None
        staged, self._staged = self._staged, None
        for number, module in enumerate(self._modules):
            optimizers = () if number else self._optimizers
            tensors = self._old.tensors(module)
            replaced: dict[int, tuple[Tensor, Tensor]] = {}
            states: list[tuple[Optimizer, Tensor, Any]] = []
            for name in [name for kind, of, name in staged if (kind, of) == ("tensor", number)]:
                (data, trained), before = staged["tensor", number, name], tensors[name]
                if not before.is_meta:  # the lowest group's statistics
                    before.copy_(data)
                    continue
                now = like(before, data).requires_grad_(trained)
                replaced[id(before)] = before, now
                if not number:
                    now.grad = staged.get(("gradient", 0, name))
                keys = [(optimizer, ("state", i, name)) for i, optimizer in enumerate(optimizers)]
                states += [(optimizer, now, staged[key]) for optimizer, key in keys if key in staged]
            put_in_place(module, optimizers, replaced)
            prune(module, optimizers, self._new, self._here, device=self._device)
            for optimizer, parameter, state in states:
                optimizer.state[parameter] = state
            for path in [path for kind, of, path in staged if (kind, of) == ("extra", number)]:
                module.get_submodule(path).set_extra_state(staged["extra", number, path])


def refuse_copies(module: nn.Module, optimizers: Sequence[Optimizer], old: Ownership, here: Here) -> None:
    """Refuses to move tensors of which the user has made copies, which would be where they were.

    Args:
        module, optimizers, old, here: as `Migration` has them.

    Raises:
        RuntimeError: there are such copies, or tensors that are new on some ranks only.
    """
    for optimizer in optimizers:  # state goes with the real parameter
        for parameter in [p for p in optimizer.state if p.is_meta]:
            del optimizer.state[parameter]
    if kept := sorted({copy.held.name for copy in here.made.values()}):
        raise RuntimeError(
            f"layers stay where they are, because somebody keeps copies of {', '.join(kept[:3])}, which do not go"
            " with them"
        )
    if new := sorted(named(module).keys() - old.layer_of.keys()):
        raise RuntimeError(f"layers stay where they are, because {', '.join(new[:3])} is new, on some ranks only")


# ---- what travels ---------------------------------------------------------------------------------------------------


def _described(values: dict[Any, Any], device: torch.device) -> tuple[dict[Any, Any], list[Tensor]]:
    """Returns values with tensors on the meta device instead of those that are sent, and these.

    What is on the host though the rank's layers are not, such as an optimizer's counter, stays in the values.

    Raises:
        TypeError: a tensor that is not dense.
    """
    tensors: list[Tensor] = []

    def described(leaf: Tensor) -> Tensor:
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta:
            raise TypeError(
                f"a tensor of layout {leaf.layout} on {leaf.device} and of shape {tuple(leaf.shape)} cannot be"
                " sent to another rank, only dense ones"
            )
        if leaf.device.type != device.type:
            return leaf
        tensors.append(leaf.detach())
        return torch.empty_like(tensors[-1], device="meta")

    return pytree.tree_map_only(Tensor, described, values), tensors


def _rooms(described: dict[Any, Any], device: torch.device) -> tuple[dict[Any, Any], list[Tensor]]:
    """Returns values as they were described, with new tensors for those that will come, and these."""
    rooms: list[Tensor] = []

    def room(leaf: Any) -> Any:
        if not _is_absent(leaf):
            return leaf
        rooms.append(torch.empty_like(leaf, device=device))
        return rooms[-1]

    return pytree.tree_map(room, described), rooms


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta
