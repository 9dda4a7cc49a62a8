"""The same values on all owners: at the start from rank 0, and buffers during training (layer T)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.transport.groups import close_connections, make_group
from lightning_hetero.transport.objects import Wait, gathered

_MOST_GROUPS = 64  # kept; each costs sockets and threads, or memory on the device


class OwnerGroups:
    """Process groups by set of ranks, each made once and kept: a plan that comes back finds its groups.

    Making one is collective over *all* ranks, members or not, and all must make them in the same order: hence
    `prepare`, which every rank calls with the same sets. Where there are too many, those unused longest are destroyed.
    For all ranks ``world`` serves, where its backend is the wanted one.

    Args:
        world: over all ranks, one that takes CPU tensors (gloo); scalars travel over it.
        backend, timeout: of the groups to be made, as in `torch.distributed.new_group`; None: as the default group.
    """

    def __init__(
        self, world: dist.ProcessGroup, *, backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        self.world = world
        self._backend = backend
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Any] = {}  # where this rank is no member, torch's marker of that

    def prepare(self, members: Iterable[Sequence[int]]) -> None:
        """Makes the groups that are missing; collective, the same on all ranks. One rank alone needs none."""
        sets = {tuple(sorted(set(each))) for each in members}
        wanted = sorted(ranks for ranks in sets if len(ranks) > 1 and not self._is_world(ranks))
        for ranks in wanted:
            known = self._groups.pop(ranks, None)  # to the end of the order: used last
            self._groups[ranks] = make_group(ranks, self._timeout, self._backend) if known is None else known
        for ranks in list(self._groups)[: max(0, len(self._groups) - max(_MOST_GROUPS, len(wanted)))]:
            _destroy(self._groups.pop(ranks))

    def get(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns the group of these ranks, None for one rank alone.

        Raises:
            KeyError: it has not been prepared.
        """
        ranks = tuple(sorted(set(members)))
        if len(ranks) == 1:
            return None
        return self.world if self._is_world(ranks) else self._groups[ranks]

    def _is_world(self, ranks: tuple[int, ...]) -> bool:
        """Whether the group of all ranks that there is serves as these ranks' own."""
        same = dist.get_backend(self.world) == (self._backend or dist.get_backend())
        return same and len(ranks) == dist.get_world_size(self.world)

    def close(self, *, failed: bool = False) -> None:
        """Destroys the groups, and lets go of ``world``.

        Args:
            failed: peers may be gone. What is under way is ended: it would keep this process from ending.
        """
        for group in (*self._groups.values(), *((self.world,) if failed else ())):
            if not failed:
                _destroy(group)
            elif isinstance(group, dist.ProcessGroup):
                with contextlib.suppress(RuntimeError):  # nothing is
                    close_connections(group) if dist.get_backend(group) == dist.Backend.GLOO else group.abort()
        if not failed:
            self._groups.clear()
            vars(self).pop("world", None)


def _destroy(group: Any) -> None:
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


@contextlib.contextmanager
def together(
    group: dist.ProcessGroup, *, wait: Wait = dist.Work.wait, error: type[RuntimeError] = RuntimeError
) -> Iterator[None]:
    """What is inside succeeds on all ranks, or is an error on all of them; collective.

    Raises:
        RuntimeError: or the ``error`` given; names the ranks and what each said; where the problem is, it is the cause.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as caught:
        problem = caught
    own = "" if problem is None else f"{type(problem).__name__}: {problem}"
    if said := [f"rank {rank}: {text}" for rank, text in enumerate(gathered(own, group, wait)) if text]:
        raise error("; ".join(said)) from problem


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements as a 1-D tensor of uint8 on the CPU: a view, if they lie there in order."""
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)


def refuse_different(ownership: Ownership, group: dist.ProcessGroup) -> None:
    """Compares what all ranks have, and how it is divided; collective.

    Raises:
        RuntimeError: on all ranks: the model or the plan is not the same.
    """
    digests = gathered(ownership.digest, group, dist.Work.wait)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RuntimeError(
            f"ranks {others} have another model or another plan than rank 0: names, shapes, dtypes, ties of the"
            " parameters or which are frozen differ; build the model from the same configuration on all ranks"
        )


@torch.no_grad()
def share_initial(module: nn.Module, ownership: Ownership, group: dist.ProcessGroup) -> None:
    """Gives rank 0's parameters and buffers, also those that are not saved, to all that hold them, as DDP does.

    Collective. Tensor by tensor, to the holders only. Call it before `prune`: on rank 0 the model is whole.

    Args:
        module: the whole model; on any device.
        group: over all ranks, one that takes CPU tensors (gloo).

    Raises:
        RuntimeError: the model or the plan is not the same on all ranks, or rank 0 lacks a tensor.
    """
    tensors, rank = ownership.tensors(module), ownership.rank
    refuse_different(ownership, group)
    with together(group):
        if rank == 0 and (missing := [n for n, t in tensors.items() if t.is_meta]):
            raise ValueError(f"{missing[:5]} are on the meta device")
    spread(module, ownership, dict.fromkeys(tensors, 0), group)


@torch.no_grad()
def spread(module: nn.Module, ownership: Ownership, sources: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Sends the values of parameters and buffers to those that hold them; collective.

    Args:
        module: the whole model; on any device, with memory for what is held here.
        sources: the rank that has the values, by name.
        group: over all ranks, one that takes CPU tensors (gloo).
    """
    tensors = ownership.tensors(module)
    for name, source in sources.items():
        tensor, targets = tensors[name], set(ownership.holders(name)) - {source}
        if ownership.rank == source and tensor.numel():
            for target in sorted(targets):
                dist.send(as_bytes(tensor), target, group=group)
        elif ownership.rank in targets and tensor.numel():
            come = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(as_bytes(come), source, group=group)
            tensor.copy_(come)


@torch.no_grad()
def share_buffers(module: nn.Module, ownership: Ownership, groups: OwnerGroups) -> None:
    """Gives the buffers of the lowest group to their other holders: BatchNorm's statistics, counters, ...

    As DDP does before each forward with ``broadcast_buffers=True``; all ranks call it. One broadcast per set of holders
    and dtype.
    """
    tensors = ownership.tensors(module)
    bundles: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name in ownership.buffers:
        holders, tensor = ownership.holders(name), tensors[name]
        if len(holders) > 1 and ownership.rank in holders and tensor.numel():
            bundles.setdefault((holders, tensor.dtype), []).append(tensor)
    for holders, dtype in sorted(bundles, key=lambda key: (key[0], str(key[1]))):
        bundle = bundles[holders, dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bundle])
        dist.broadcast(flat.view(torch.uint8), holders[0], group=groups.get(holders))  # any dtype, as bytes
        if ownership.rank != holders[0]:
            for tensor, piece in zip(bundle, flat.split([t.numel() for t in bundle]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
