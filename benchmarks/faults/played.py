"""What is played of torch.distributed, so that the engine's own rebuilding of process groups runs over it.

A process group fails as gloo's does: when a member dies or leaves, whoever waits in a collective of it, or comes to
one later, gets an error; a member that neither comes nor leaves is waited for until the timeout. So does the rendezvous
of a new group wait for a member that has died on its way there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.faults.world import Process, World
from lightning_hetero.base.elastic import admission, groups
from lightning_hetero.transport import groups as processes

if TYPE_CHECKING:
    from benchmarks.faults.ranks import Rank
    from benchmarks.faults.wires import Store

GROUP_TIMEOUT_S = 1800.0  # torch's


class ProcessGroup:
    """A process group.

    Args:
        world: gives the time.
        size: number of members.
    """

    def __init__(self, world: World, size: int) -> None:
        self.size = size
        self._world = world
        self._came: dict[int, tuple[Process, Any, Callable[[], None]]] = {}
        self._round = 0
        self._value: Any = None
        self._broken = ""
        self._stuck = False  # in a monitored barrier

    def collective(
        self, index: int, process: Process, value: Any = None, *, timeout_s: float = GROUP_TIMEOUT_S,
        all_come: Callable[[], None] = lambda: None,
    ) -> Any:  # fmt: skip
        """Waits for all members; returns the value of the first. ``all_come`` is called when they have come.

        Raises:
            RuntimeError: a member has left or died, or one does not come in time.
        """
        if self._broken:
            raise RuntimeError(f"a collective has failed: {self._broken}")
        here = self._round
        self._came[index] = process, value, all_come
        if len(self._came) == self.size and not self._stuck:
            came, self._came, self._round = self._came, {}, here + 1
            self._value = came[0][1]
            for other, _, tell in came.values():
                tell()
                other.wake()
            return self._value
        until_s = self._world.now_s + timeout_s
        while self._round == here:
            if self._broken:
                raise RuntimeError(f"a collective has failed: {self._broken}")
            if self._world.now_s >= until_s:
                raise RuntimeError("a collective has timed out")
            process.wait(until_s)
        return self._value

    def falls_silent(self, index: int) -> bool:
        """A member falls silent; returns whether the others will take it for one that has come.

        In a monitored barrier all report to the first member, who then lets all pass.
        """
        self._stuck |= index == 0 and index in self._came
        return index != 0 and index in self._came

    def leave(self, why: str) -> None:
        """A member destroys its group, or dies: whoever waits in it, or will, fails."""
        self._broken = self._broken or why
        for process, *_ in self._came.values():
            process.wake()


@contextmanager
def played(world: World, store: Store, current: Callable[[], Rank]) -> Iterator[None]:
    """Puts it all in torch's place.

    Args:
        world: gives the time.
        store: hosted by the server.
        current: the rank whose process runs.
    """
    known: dict[str, ProcessGroup] = {}

    def init_process_group(
        backend: str, *, store: Store | None, rank: int, world_size: int, timeout: Any = None
    ) -> None:
        if store is None:  # of this process alone, for the names that torch gives groups
            return
        here = known.setdefault(store.prefix, ProcessGroup(world, world_size))
        own = current()
        own.simulation.point(own.number, "rebuilt")
        own.group, own.index = here, rank
        here.collective(rank, own.process)
        own.risky = False

    def monitored_barrier(_: Any, timeout: timedelta) -> None:
        own = current()
        in_group(own).collective(
            own.index, own.process, timeout_s=timeout.total_seconds(), all_come=own.comes_to_collective
        )

    def in_group(own: Rank) -> ProcessGroup:
        if own.group is None:
            raise RuntimeError("there is no default process group")
        return own.group

    class DefaultGroup:
        @property
        def WORLD(self) -> ProcessGroup | None:
            return current().group

    distributed = SimpleNamespace(
        Backend=SimpleNamespace(GLOO="gloo"),
        TCPStore=lambda *_, **__: store.opened(),
        PrefixStore=lambda prefix, store: store.below(prefix),
        HashStore=lambda: None,
        group=DefaultGroup(),
        get_backend=lambda: "gloo",
        is_initialized=lambda: current().group is not None,
        destroy_process_group=lambda: current().leave_group("has left the group"),
        init_process_group=init_process_group,
        monitored_barrier=monitored_barrier,
    )
    time = SimpleNamespace(monotonic=world.clock, sleep=lambda seconds: current().process.sleep(seconds))
    lightning = SimpleNamespace(
        val_loaders=lambda trainer: [],
        count_val_batches=lambda trainer: None,
        trainer_callbacks=lambda trainer: trainer.callbacks,
        write_checkpoint=lambda trainer, path: current().write_checkpoint(path),
    )
    with (
        mock.patch.object(processes, "dist", distributed),
        mock.patch.object(processes, "time", time),
        mock.patch.object(processes, "_built", None),
        mock.patch.object(processes, "weakref", SimpleNamespace(ref=lambda group: None)),
        mock.patch.object(groups, "dist", distributed),
        mock.patch.object(groups, "gloo_group", lambda timeout: None),
        mock.patch.object(groups, "compat", lightning),
        mock.patch.object(admission, "dist", distributed),
        mock.patch.object(admission, "compat", lightning),
        mock.patch.object(admission, "time", time),
    ):
        yield
