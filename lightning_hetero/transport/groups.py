"""Process groups: further ones, and the default group again among the ranks that are left (layer T).

A group of torch cannot lose a member: after a death its collectives fail for good. Worse, they fail only on the ranks
that talk to the dead one; a rank that waits for a survivor waits until the group's timeout, unless this survivor
leaves the group. Hence the order on every survivor:

    collective fails -> leave_default_group() -> ask who is alive -> rebuild_default_group(...) -> repeat it

A rank may die on its way into the new group. Those who wait for it there all find that out, and ask once more.

The store through which the members find each other must outlive every rank that may be lost.
"""

from __future__ import annotations

import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence, Sized
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero.transport.awake import awake_s

_TAG_OF_THE_END = 0x9A56
_ASK_S = 0.5  # how often those who wait for a member ask whether it lives

_built: tuple[weakref.ref[dist.ProcessGroup], tuple[int, ...]] | None = None  # the default group, if it is ours


class MemberMissingError(RuntimeError):
    """A member of the new group did not come: it died, or is stopped. ``ranks`` are the missing ones."""

    def __init__(self, generation: int, ranks: Sequence[int], waited_s: float) -> None:
        super().__init__(
            f"rank {', '.join(map(str, ranks))} did not come to the process group of generation {generation} within"
            f" {waited_s:.1f} s; ask again who is alive, and rebuild with the next generation"
        )
        self.ranks = tuple(ranks)


def make_group(ranks: Sequence[int] | None, timeout: timedelta | None, backend: str | None) -> Any:
    """Returns what `torch.distributed.new_group` does; collective over *all* ranks, members or not.

    Where a device is bound to the default group, as Lightning 2.6 binds one to gloo's too, torch 2.13 has those who are
    no members take part in a split of that group's communicator. Gloo has no communicator to split.

    Args:
        ranks: the members; None: all.
        timeout, backend: None: as the default group.

    Returns:
        The group, or torch's marker where this rank is no member.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    if (backend or dist.get_backend()) == dist.Backend.GLOO:
        world.bound_device_id = None
    try:
        return dist.new_group(None if ranks is None else list(ranks), timeout, backend)
    finally:
        world.bound_device_id = bound


def close_connections(group: Any) -> None:
    """Ends whatever is sent or received over a group of gloo, which has no other way: a wait that times out."""
    for rank in range(dist.get_world_size(group)):
        if rank != dist.get_rank(group):
            with suppress(RuntimeError):  # always; and some are closed already
                end = torch.empty(1, dtype=torch.uint8)
                group.recv([end], rank, _TAG_OF_THE_END).wait(timedelta(milliseconds=1))


def limit_waits(timeout: timedelta, *groups: dist.ProcessGroup | None) -> None:
    """Sets how long collectives of these groups wait for a member that does not answer, where they are on gloo.

    NCCL ends the process when such a wait is over; there nothing is set.
    """
    for group in groups:
        if group is not None and dist.get_backend(group) == dist.Backend.GLOO:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def leave_default_group() -> None:
    """Destroys the default group, and its subgroups, if there is one; waits for no other rank.

    Closes this rank's connections, so that a rank which waits for this one fails now and not at the group's timeout.
    Inside an ``except`` block, the frames of the exception are cleared: they would keep the group alive.
    A collective of this rank that still runs in the background is waited for (it fails at once if a peer is dead).
    """
    if not dist.is_initialized():
        return
    _clear_frames(sys.exc_info()[1])
    group = dist.group.WORLD
    if group is not None and dist.get_backend() != dist.Backend.GLOO and hasattr(group, "abort"):
        group.abort()  # NCCL would wait for its peers otherwise
    del group
    dist.destroy_process_group()


def rebuild_default_group(
    *, store: dist.Store, generation: int, members: Sequence[int], rank: int, backend: str | None,
    timeout: timedelta | None, meeting_s: float = 60.0, living: Callable[[], Collection[int]] | None = None,
) -> None:  # fmt: skip
    """Replaces the default process group by one of ``members`` only; all of them call it, nobody else.

    The old group may work, fail, or be gone already. Subgroups made with `torch.distributed.new_group` go with it.

    Args:
        store: reachable by all members, hosted by none of them.
        generation: names this group in ``store``: the same on all members, never used before.
        members: the ranks' permanent numbers, in the order of their new ranks.
        rank: this rank's permanent number; its new rank is its index among ``members``.
        backend, timeout: as in `torch.distributed.init_process_group`.
        meeting_s: how long to wait for the other members [s].
        living: says who lives, the same for everybody: nobody waits for a member that has died. A
            `RuntimeError` of it ends the waiting.

    Raises:
        ValueError: ``rank`` is not among the ``members``.
        MemberMissingError: a member did not come. There is no default group then; try again with the next generation.
    """
    if rank not in members:
        raise ValueError(f"rank={rank} must be one of the members {list(members)}: it was taken for dead and replaced")
    leave_default_group()
    own = dist.PrefixStore(f"generation/{generation}", store)
    # Late or dead members are found out here, with names: the rendezvous itself could only run into its timeout.
    own.set(f"here/{rank}", "1")
    try:
        _meet(own, generation, members, rank, meeting_s, living)
    except RuntimeError:
        with suppress(RuntimeError, NotImplementedError):
            own.delete_key(f"here/{rank}")  # or a member that was stopped would come and find nobody
        raise
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend, store=own, rank=list(members).index(rank), world_size=len(members), timeout=timeout
        )
    except RuntimeError:
        # torch numbers groups, also one that could not be made: then members of the next ones would name them
        # differently, and wait for each other until the timeout. The numbers begin again where a default group is
        # destroyed.
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        raise
    finally:
        # torch wraps the hook once per group, to say "[rank1]: " before each line of a traceback.
        sys.excepthook = hook
    global _built
    group = dist.group.WORLD
    assert group is not None
    _built = weakref.ref(group), tuple(members)


def group_members() -> tuple[int, ...] | None:
    """Returns the permanent ranks of the default group if it was rebuilt here; None: it is as it was at first."""
    if _built is None or not dist.is_initialized() or _built[0]() is not dist.group.WORLD:
        return None
    return _built[1]


def shrink_sampler(loader: DataLoader, members: Sequence[int], rank: int) -> bool:
    """Divides the data of a loader with a `DistributedSampler` among ``members``, from its next epoch on.

    After a death the others' parts of a validation set would leave out the dead rank's part. Lightning's wrappers
    around users' samplers, and its variant without padding, are known. Also right when a rank has come back.

    Args:
        loader: any loader; only a sampler that is a `DistributedSampler`, or that of its batch sampler, is changed.
        members: the permanent numbers of all ranks that are left.
        rank: this rank's permanent number.

    Returns:
        Whether there was such a sampler.
    """
    index = list(members).index(rank)
    candidates = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    samplers = {id(s): s for s in candidates if isinstance(s, DistributedSampler)}
    for sampler in samplers.values():
        # Lightning's sampler for prediction repeats nothing; by name, as this layer does not import Lightning.
        unpadded = any(base.__name__ == "UnrepeatedDistributedSampler" for base in type(sampler).__mro__)
        epoch = sampler.epoch
        # Sets sizes as torch does, without asking a subclass's constructor for arguments nobody has kept.
        DistributedSampler.__init__(
            sampler, sampler.dataset, num_replicas=len(members), rank=index, shuffle=sampler.shuffle,
            seed=sampler.seed, drop_last=sampler.drop_last,
        )  # fmt: skip
        sampler.epoch = epoch
        if unpadded:
            assert isinstance(sampler.dataset, Sized)
            sampler.total_size = len(sampler.dataset)
            sampler.num_samples = len(range(index, sampler.total_size, len(members)))
    return bool(samplers)


def _meet(
    store: dist.Store, generation: int, members: Sequence[int], rank: int, meeting_s: float,
    living: Callable[[], Collection[int]] | None,
) -> None:  # fmt: skip
    """Returns when all members have come; asks in turns, as a blocking wait would not say who is missing."""
    started, pause_s, ask_s = awake_s(), 0.001, _ASK_S
    missing = [m for m in members if m != rank]
    while missing := [m for m in missing if not store.check([f"here/{m}"])]:
        waited_s = awake_s() - started
        if waited_s > meeting_s:
            raise MemberMissingError(generation, missing, waited_s)
        if living is not None and waited_s > ask_s:
            ask_s = waited_s + _ASK_S
            alive = living()
            # In this order: who had died by then has been here before that, or never will, which all find alike.
            if dead := [m for m in missing if m not in alive and not store.check([f"here/{m}"])]:
                raise MemberMissingError(generation, dead, waited_s)
        time.sleep(pause_s)
        pause_s = min(0.05, 2 * pause_s)


def _clear_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
