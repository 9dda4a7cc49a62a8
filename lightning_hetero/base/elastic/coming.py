"""What joining ranks and members say to each other, in the store where their new process group meets (layer L).

    <rank>         joining rank: "come", or members, of it: "gone"; what is said first holds
    off            members: why the group is not made
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist


class Coming:
    """Whether joining ranks come to a new process group; see the module.

    Args:
        store: in which the members of the group find each other.
        generation: of the group.

    Raises (all methods):
        RuntimeError: the store has gone.
    """

    def __init__(self, store: dist.Store, generation: int) -> None:
        self._store, self._prefix = store, f"coming/{generation}"

    def comes(self, rank: int) -> bool:
        """Says, for a joining rank, that it comes; returns whether it is waited for."""
        return self._store.compare_set(f"{self._prefix}/{rank}", "", "come") == b"come"

    def goes(self, rank: int) -> None:
        """Says, for the members, that it has gone."""
        self._store.compare_set(f"{self._prefix}/{rank}", "", "gone")

    def living(self, ranks: Iterable[int]) -> set[int]:
        """Returns which of the ranks have not gone, while the group is made.

        Raises:
            RuntimeError: it will not be made.
        """
        if why := self._said("off"):
            raise RuntimeError(f"the process group with joining ranks is not made: {why}")
        return {rank for rank in ranks if self._said(str(rank)) != "gone"}

    def call_off(self, why: str) -> None:
        """Says, for the members, that the group is not made."""
        self._store.set(f"{self._prefix}/off", why)

    def _said(self, what: str) -> str:
        key = f"{self._prefix}/{what}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
