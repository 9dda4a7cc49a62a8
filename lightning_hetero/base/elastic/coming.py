"""What joining ranks and members say to each other, in the store where their new process group meets (layer L).

    key            who says it                                        what is said first holds
    <rank>         joining rank: "come", or members, of it: "gone"    yes
    ready/<rank>   joining rank: it has loaded all, and is connected
    waits/<rank>   whoever waits for the decision, again and again
    decision       anybody: who comes in, and why not all             yes

A rank that has said "ready" is in the decision, or finds that it is not. So nobody waits for a rank that has been given
up, and no collective for one that is silent: a collective that waits can be left by nobody before its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch.distributed as dist


class Beats:
    """Notices who has stopped to beat.

    Args:
        read: gives what a rank has counted; empty before it has begun.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._seen: dict[int, tuple[bytes, float]] = {}  # the last one, and when it was seen first [s]

    def silent(self, ranks: Iterable[int], now_s: float, *, for_s: float) -> list[int]:
        """Returns who has not been heard of for ``for_s``, at least since this was asked first of it [s]."""
        found: list[int] = []
        for rank in ranks:
            beat = self._read(rank)
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now_s
            elif now_s - self._seen[rank][1] > for_s:
                found.append(rank)
        return found

    def forget(self, rank: int) -> None:
        """A rank begins anew."""
        self._seen.pop(rank, None)


class Coming:
    """Whether joining ranks come to a new process group, and with which of them all go on; see the module.

    Args:
        store: in which the members of the group find each other.
        generation: of the group.

    Raises (all methods):
        RuntimeError: the store has gone.
    """

    def __init__(self, store: dist.Store, generation: int) -> None:
        self._store, self._prefix = store, f"coming/{generation}"

    # ---- to the new group -------------------------------------------------------------------------------------

    def comes(self, rank: int) -> bool:
        """Says, for a joining rank, that it comes; returns whether it is waited for."""
        return self._store.compare_set(f"{self._prefix}/{rank}", "", "come") == b"come"

    def goes(self, rank: int) -> None:
        """Says, for the members, that it has gone."""
        self._store.compare_set(f"{self._prefix}/{rank}", "", "gone")

    def gone(self, ranks: Iterable[int]) -> frozenset[int]:
        """Returns which of them have gone."""
        return frozenset(rank for rank in ranks if self._said(str(rank)) == b"gone")

    def living(self, ranks: Iterable[int]) -> set[int]:
        """Returns which of the ranks have not gone, while the group is made.

        Raises:
            RuntimeError: it will not be made.
        """
        if (decided := self.decided()) is not None:
            raise RuntimeError(f"the process group with joining ranks is not made: {decided[1]}")
        ranks = set(ranks)
        return ranks - self.gone(ranks)

    # ---- from there to training -------------------------------------------------------------------------------

    def ready(self, rank: int) -> None:
        """Says, for a joining rank, that it can train."""
        self._store.set(f"{self._prefix}/ready/{rank}", "1")

    def come(self, ranks: Iterable[int]) -> list[int]:
        """Returns which of them have said so."""
        return [rank for rank in ranks if self._said(f"ready/{rank}")]

    def waits(self, rank: int) -> None:
        """Says, again and again, that this rank waits for the decision."""
        self._store.add(f"{self._prefix}/waits/{rank}", 1)

    def waited(self, rank: int) -> bytes:
        """Returns how often a rank has said so; empty: it has not."""
        return self._said(f"waits/{rank}")

    def decide(self, asking: Iterable[int], why: str = "") -> None:
        """Says who comes in: those who are ready.

        Args:
            asking: all who could.
            why: they are not waited for; empty: only if all are ready.
        """
        asking = list(asking)
        come = self.come(asking)
        if why or come == asking:
            self._store.compare_set(f"{self._prefix}/decision", "", json.dumps([come, why]))

    def decided(self) -> tuple[list[int], str] | None:
        """Returns who comes in, and why not all who could; None: nobody has decided."""
        said = self._said("decision")
        if not said:
            return None
        come, why = json.loads(said)
        return come, why

    def _said(self, what: str) -> bytes:
        key = f"{self._prefix}/{what}"
        return self._store.get(key) if self._store.check([key]) else b""
