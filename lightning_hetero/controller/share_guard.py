"""Samples per group leave their reference only as far as `RegretGuard`'s account covers it (layer P).

What the guard calls a rank is a group here. The reference of groups of one rank each, data parallelism, is equal
shares, as under DDP; else the shares that the structure began with, for where stages are needed DDP may not be
possible. So devices that are slow by turns, whose next batch is not like the last one, cost a run no more than the
account holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.controller.messages import Observation
from lightning_hetero.shares.guard import RegretGuard
from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.solvers.placement.neighbours import Pipes
from lightning_hetero.types import AffineCost, SpeedSample

_LAG = 1  # batches that run under the old shares after the one that is decided on
_TIGHT = 0.8  # of what the account covers, when shares must come back, so that they need not at the next batch
_PROPORTIONAL = AffineCost(fixed_s=0.0, per_sample_s=1.0)


class ShareGuard(RegretGuard):
    """The account of one run over its structures.

    Args:
        whole: what the model takes for a micro-batch, as profiled; of it only the proportion of two times counts.
        saves: there are budgets, for which batches may take longer: nothing is guarded.
    """

    def __init__(self, whole: AffineCost, *, saves: bool) -> None:
        super().__init__()
        self.lag = _LAG
        self._whole, self._saves = whole, saves

    def structure(self, pipes: Pipes, shares: tuple[int, ...]) -> None:
        """A structure is decided on, with these shares; the account stays what it is.

        Groups of one rank each are data parallelism: their shares are measured against equal ones, as under DDP.
        """
        self._pipes, self._alone = pipes, all(len(pipe.ranks) == 1 for pipe in pipes)
        self.start(apportion([1.0] * len(pipes), sum(shares)) if self._alone else shares, least=1)
        self.decided(shares)

    def measured(self, seen: Observation, pipes: Pipes, sizes: Sequence[Sequence[int]]) -> None:
        """Settles the account with a batch, if it ran as the present structure and all its groups were measured.

        Args:
            seen: the batch.
            pipes: that it ran as.
            sizes: of its micro-batches, by group.
        """
        is_first = not self._seen
        took_s = [max(seen.work_s.get(rank, 0.0) for rank in pipe.ranks) for pipe in pipes]
        if pipes == self._pipes and min(took_s) > 0.0:
            costs = [self._whole if len(micro) == 1 else _PROPORTIONAL for micro in sizes]
            records = [
                SpeedSample(rank=pipe.ranks[0], step=seen.batch, samples=sum(micro), compute_s=seconds)
                for pipe, micro, seconds in zip(pipes, sizes, took_s, strict=True)
            ]
            self.learn(records, costs, 1)
            if is_first:  # what was known of the devices counts until they are known better
                self._credit = max(self._credit, (1 + self.lag) * self.stake(self._latest))

    def covers(self, shares: tuple[int, ...]) -> bool:
        """Whether these may stay in force: a little more than what may be chosen now."""
        return self._saves or super().covers(shares)

    def admits(self, pipes: Pipes, shares: tuple[int, ...]) -> bool:
        """Whether another structure may be chosen instead of data parallelism.

        Its stake is what ranks compute on the mean of their pipeline, against the same samples on all ranks of now.
        """
        equal = sum(shares) / len(self._pipes)
        stake = max(n / len(pipe.ranks) for n, pipe in zip(shares, pipes, strict=True)) / equal - 1.0
        return self._saves or not self._alone or stake <= max(self.allowed, self.stake(self._latest))

    def within(self, shares: tuple[int, ...], *, tight: bool) -> tuple[int, ...]:
        """Returns these shares, or the part of the way there from the structure's first ones that is covered."""
        stake, most = self.stake(shares), (_TIGHT if tight else 1.0) * self.allowed
        if self._saves or stake <= most:
            return shares
        way = most / stake
        weights = [first + way * (n - first) for n, first in zip(shares, self._equal, strict=True)]
        part = apportion(weights, sum(shares), lower=1)
        return part if self.covers(part) else self._equal  # a whole sample more may be too much
