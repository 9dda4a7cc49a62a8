"""What is played of torch.distributed, so that the engine's own rebuilding of process groups runs over it.

A process group fails as gloo's does: when a member dies or leaves, whoever waits in a collective of it, or comes to
one later, gets an error; a member that neither comes nor leaves, or falls silent in it, is waited for until the
timeout. So does the rendezvous of a new group wait for a member that has died on its way there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from lightning_hetero.base.elastic import admission, meetings
from lightning_hetero.transport import groups as processes
from tests.ranks.stale.simulated.world import Process, World

if TYPE_CHECKING:
    from tests.ranks.stale.simulated.ranks import Rank
    from tests.ranks.stale.simulated.wires import Store

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
        self._came: dict[int, tuple[Process, Any]] = {}
        self._round = 0
        self._value: Any = None
        self._broken = ""
        self._stuck = False  # a member that has come is silent

    def collective(self, index: int, process: Process, value: Any = None, *, timeout_s: float) -> Any:
        """Waits for all members; returns the value of the first.

        Raises:
            RuntimeError: a member has left or died, or one does not come in time.
        """
        if self._broken:
            raise RuntimeError(f"a collective has failed: {self._broken}")
        here = self._round
        self._came[index] = process, value
        if len(self._came) == self.size and not self._stuck:
            came, self._came, self._round = self._came, {}, here + 1
            self._value = came[0][1]
            for other, _ in came.values():
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

    def falls_silent(self, index: int) -> None:
        """A member falls silent, perhaps within a collective, which ends for nobody then."""
        self._stuck |= index in self._came

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
        own.wait_s = timeout.total_seconds() if timeout is not None else GROUP_TIMEOUT_S
        here.collective(rank, own.process, timeout_s=own.wait_s)

    class DefaultGroup:
        @property
        def WORLD(self) -> ProcessGroup | None:
            return current().group

    distributed = SimpleNamespace(
        Backend=SimpleNamespace(GLOO="gloo"),
        PrefixStore=lambda prefix, store: store.below(prefix),
        HashStore=lambda: None,
        group=DefaultGroup(),
        get_backend=lambda *_: "gloo",
        is_initialized=lambda: current().group is not None,
        destroy_process_group=lambda: current().leave_group("has left the group"),
        init_process_group=init_process_group,
        distributed_c10d=SimpleNamespace(
            _set_pg_timeout=lambda timeout, _: setattr(current(), "wait_s", timeout.total_seconds())
        ),
    )
    time = SimpleNamespace(monotonic=world.clock, sleep=lambda seconds: current().process.sleep(seconds))
    lightning = SimpleNamespace(
        val_loaders=lambda trainer: [],
        count_val_batches=lambda trainer, **_: None,
        reduced_names=lambda trainer: (),
        trainer_callbacks=lambda trainer: trainer.callbacks,
        write_checkpoint=lambda trainer, path: current().write_checkpoint(path),
    )
    with (
        mock.patch.object(processes, "dist", distributed),
        mock.patch.object(processes, "time", time),
        mock.patch.object(processes, "_built", None),
        mock.patch.object(processes, "weakref", SimpleNamespace(ref=lambda group: None)),
        mock.patch.object(processes, "awake_s", world.clock),
        mock.patch.object(meetings, "dist", distributed),
        mock.patch.object(meetings, "gloo_group", lambda timeout: None),
        mock.patch.object(meetings, "compat", lightning),
        mock.patch.object(meetings, "reach_store", lambda *_: store.opened()),
        mock.patch.object(admission, "reach_store", lambda *_: store.opened()),
        mock.patch.object(admission, "compat", lightning),
        mock.patch.object(admission, "time", time),
    ):
        yield
