"""Small collectives of the ranks, on their own process group (layer T).

At set-up and epoch starts they block. During a step they do not: launched when a rank's gradients are complete, a
gathering of a few numbers travels alongside a gradient all-reduce, and is read one step later, so nobody waits for it.
A side group on gloo: on the main group it would queue behind the gradient buckets, and on NCCL it would need device
memory and a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_hetero.transport.one_round import start_gather, start_sum


class SideChannel:
    """Small collectives on a given gloo group.

    Args:
        group: gloo process group over all ranks; owned from here on, see `close`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rebind(group)

    def rebind(self, group: dist.ProcessGroup) -> None:
        """Goes on with another group, whose ranks may be fewer; the old one is broken and is not waited for."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def leave(self) -> None:
        """Lets go of a group that is broken: as long as this rank holds it, others wait for it there."""
        vars(self).pop("group", None)

    def close(self, *, destroy: bool = True) -> None:
        """Destroys the group (not while an exchange may be under way with peers that are gone); lets go of it anyway.

        What a Trainer keeps after a fit (its loaders) may still hold this channel. Collected as garbage in a forked
        DataLoader worker, the group's destructor would wait for threads that were not forked.
        """
        if destroy and dist.is_initialized() and "group" in vars(self):
            dist.destroy_process_group(self.group)
        self.leave()

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Starts gathering ``row`` (float64, the same length everywhere); call the result to wait for all rows."""
        work, rows = start_gather(torch.tensor(row, dtype=torch.float64), self.group)

        def wait() -> list[list[float]]:
            work.wait()
            return rows.tolist()

        return wait

    def all_gather_object(self, value: object) -> list:
        """Gathers any picklable object; blocking, for set-up and epoch starts only."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]:
        """Returns rank 0's list of indices on every rank; others pass ``None``. Blocking, once per epoch."""
        told: list = [None if indices is None else list(map(int, indices))]
        dist.broadcast_object_list(told, src=0, group=self.group)
        return told[0]

    def sum_async(self, value: float) -> Callable[[], float]:
        """Starts summing ``value`` over the ranks; call the result to wait for the sum."""
        total = start_sum(torch.tensor([value], dtype=torch.float64), self.group)

        def wait() -> float:
            total.work.wait()
            return float(total.result().item())

        return wait


class PartChannel:
    """A side channel as seen by groups of neighbouring ranks of which each trains on one part of a batch.

    The ranks of a tensor-parallel group, e.g., have the same samples and count as one here.

    Args:
        channel: of all ranks.
        members: ranks of a group.
    """

    def __init__(self, channel: SideChannel, members: int) -> None:
        self._channel, self._members = channel, members
        self.rank, self.world_size = channel.rank // members, channel.world_size // members

    def all_gather_object(self, value: object) -> list:
        """Gathers any picklable object: that of the first rank of each group."""
        return self._channel.all_gather_object(value)[:: self._members]

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Starts gathering a row: that of the first rank of each group."""
        wait = self._channel.all_gather_row(row)
        return lambda: wait()[:: self._members]

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]:
        """Returns rank 0's list of indices on every rank; others' are not looked at."""
        return self._channel.broadcast_indices(indices if self._channel.rank == 0 else None)

    def sum_async(self, value: float) -> Callable[[], float]:
        """Starts summing ``value`` over the groups, whose ranks have the same one."""
        return self._channel.sum_async(value / self._members)
