"""Who takes part in a fit, as one rank knows it (layer L)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


class Members:
    """The ranks of a fit; one object, which all parts of it share.

    Args:
        rank: this one.
        world_size: ranks that the job was started with.

    Attributes:
        alive: those that take part, ascending: all except those that died and have not come again.
        joining: this rank is on its way into a run of others, and nobody waits for it yet.
        nodes: node of each rank that took part when the fit began.
        hosted: a store of this process's, if groups that live on were made through it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.alive = tuple(range(world_size))
        self.joining = False
        self.nodes: Mapping[int, int] = {}
        self.hosted: object | None = None
        self._warned: set[str] = set()

    @property
    def lowest(self) -> int:
        """The rank that writes checkpoints; it hosts the server, if the engine has one."""
        return self.alive[0]

    @property
    def is_lowest(self) -> bool:
        """Whether this rank is it."""
        return self.rank == self.lowest

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that do not take part."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.alive)

    @property
    def near(self) -> tuple[int, ...]:
        """The ranks on this one's node, which share its memory."""
        return tuple(rank for rank in range(self.world_size) if self.shares_node_with(rank))

    def shares_node_with(self, rank: int) -> bool:
        """Whether that rank is on this one's node, as far as is known."""
        return rank == self.rank or (rank in self.nodes and self.nodes[rank] == self.nodes.get(self.rank))

    def warn_once(self, text: str, *, speaks: bool | None = None) -> None:
        """Shows a message to people, on one rank, once.

        Args:
            text: the message.
            speaks: whether this is that rank; None: the lowest is.
        """
        if text not in self._warned:
            self._warned.add(text)
            # `rank_zero_warn` would say nothing after the death of rank 0.
            if self.is_lowest if speaks is None else speaks:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
