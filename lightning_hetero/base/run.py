"""What exists only between a strategy's set-up and its teardown, whatever the engine (layer L)."""

from __future__ import annotations

import math
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.distributed.constants import default_pg_timeout

from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.base.checks import check_same_settings
from lightning_hetero.base.loaders import LoaderBinder
from lightning_hetero.base.nodes import UnevenNodesStrategy
from lightning_hetero.callbacks.reporting import Reporting
from lightning_hetero.data.forks import spare_inherited
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.groups import make_group
from lightning_hetero.transport.run_store import RunStore, StoreAddress
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import Event

_MOST_EVENTS = 4096  # kept for a trace that nobody may write


def gloo_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Returns a new gloo group of the default group's members; a collective."""
    return make_group(None, timeout, "gloo")


def own_memory(module: nn.Module) -> None:
    """Gives this process its own copy of parameters and buffers that came to it through shared memory.

    Lightning 2.6.6 does so under ``start_method="spawn"`` only. Under ``"forkserver"`` on CPU all ranks, stock DDP's
    too, would update one copy together: wrong weights without an error.
    """
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def planned_batches(trainer: Trainer) -> int | None:
    """Returns how many batches a fit will train at most; None if it is not known."""
    known: list[int] = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and math.isfinite(trainer.num_training_batches):
        known.append(int(trainer.num_training_batches) * trainer.max_epochs)
    if trainer.max_steps >= 0:
        known.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return min(known, default=None)


class EventLog:
    """This rank's events until somebody takes them; the oldest are dropped."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, int, int, float, Mapping[str, Any]]] = deque(maxlen=_MOST_EVENTS)

    def note(self, kind: str, epoch: int, step: int, data: Mapping[str, Any]) -> None:
        """Keeps one event; cheap, because it is called in every step."""
        self._events.append((kind, epoch, step, time.perf_counter(), data))

    def take(self, rank: int) -> list[Event]:
        """Returns and forgets the events."""
        events = [
            Event(kind=kind, rank=rank, epoch=epoch, step=step, t_s=t_s, data=data)
            for kind, epoch, step, t_s, data in self._events
        ]
        self._events.clear()
        return events


Binder = TypeVar("Binder", bound=LoaderBinder[Any])


class EngineRun(Reporting, ABC, Generic[Binder]):
    """One fit on one rank, or one evaluation where an engine takes part in these: side channel, events, undo list.

    Args:
        trainer: the running trainer; the default process group exists.
        timeout: of collectives.
        settings: what must be the same on all ranks, as words; ``None``: this rank joins others, and asks nobody.
        store: where a rank that joins finds the run's store; None: nobody knows.
        gloo_timeout: of the side channel itself, where the failure board ends its collectives; None: ``timeout``.

    Attributes:
        trainer: the running trainer.
        module: its module.
        fitting: whether this is a fit.
        channel: small collectives during training.
        store: that the ranks of the run share.
        failures: what failed first, on any of them.
        events: of this rank.
        undo: what is undone at the end, last first.
        timeout_s: of collectives.
        binder: the train loaders; set by the subclass.
        channel_is_idle: no exchange is under way in the channel while a rank trains; it can be ended after a failure.

    Raises:
        ValueError: the ranks are configured differently; names the setting and each rank's value.
    """

    binder: Binder
    channel_is_idle: ClassVar[bool] = False

    def __init__(
        self, trainer: Trainer, *, timeout: timedelta | None, settings: Mapping[str, str] | None,
        store: StoreAddress | None = None, gloo_timeout: timedelta | None = None,
    ) -> None:  # fmt: skip
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.fitting = trainer.state.fn == TrainerFn.FITTING
        self._failed = False
        self.events = EventLog()
        self.undo = ExitStack()
        spare_inherited()
        if dist.get_world_size() > 1:
            own_memory(self.module)
        self.channel = SideChannel(gloo_group(gloo_timeout or timeout))
        patience, strategy = timeout or default_pg_timeout, trainer.strategy
        self.timeout_s = patience.total_seconds()
        assert isinstance(strategy, UnevenNodesStrategy) and strategy.cluster_environment is not None
        everyone: Sequence[Mapping[str, str]] = ()
        if settings is None:
            self.store = RunStore.join(store, patience)
        else:
            common = {"lightning_hetero": __version__, "torch": torch.__version__}
            common["accumulate_grad_batches"] = str(trainer.accumulate_grad_batches)
            own = {**common, **settings}, strategy.node_rank
            everyone, nodes = zip(*self.channel.all_gather_object(own), strict=True)
            apart = strategy.num_nodes > 1 or len({*nodes}) > 1
            far = strategy.cluster_environment.main_address if strategy.node_rank == 0 else socket.gethostname()
            host = far if apart else "127.0.0.1"
            self.store = RunStore.of_all(self.channel, host, patience, rank=trainer.global_rank)
        self.failures = FailureBoard(
            self.store, trainer.global_rank, ranks=lambda: self.present, timeout_s=self.timeout_s
        )
        strategy.failures = self.failures
        self.failures.watch()
        check_same_settings(everyone)
        if self.fitting:
            self.undo.callback(compat.keep_train_sampler(trainer))
            self.undo.callback(compat.count_throughput(trainer, self.trained))
            self.undo.callback(compat.note_sigterm(trainer, self.keeps_sigterm))

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types; empty if there is nothing to resume."""

    @abstractmethod
    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's state, of this engine or another, before the loaders are set up; empty: stock DDP's."""

    def start(self) -> None:
        """Training begins; of engines that may lose ranks."""

    def finish(self) -> None:
        """Training is over, on all ranks."""

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are there, ascending."""
        return tuple(range(self.trainer.world_size))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full batch, as last decided; empty before anything is."""
        return ()

    def trained(self) -> tuple[int, int] | None:
        """Returns the samples of all ranks and the global batches trained so far; None: stock DDP's equal parts."""
        return self.binder.trained

    def waiting(self) -> AbstractContextManager[None]:
        """Returns what surrounds a wait for other ranks in a step; where it counts as a rank's work, nothing."""
        return nullcontext()

    def keeps_sigterm(self) -> bool:
        """This process has received SIGTERM: whether the run ends all ranks at once; else Lightning ends this one."""
        return False

    def weigh_logs(self, samples: Callable[[], int | None]) -> None:
        """Lets values logged in a training batch count ``samples()`` of this rank in the mean of an epoch."""
        if self.fitting:
            self.undo.callback(compat.weigh_logs(self.trainer, samples, lambda n: self.binder.stands_for_part(n)))

    def step_events(self) -> list[Event]:
        return self.events.take(self.channel.rank)

    @property
    def failed(self) -> bool:
        """Whether this rank has failed."""
        return self._failed

    def sizes_differ(self, error: BaseException, *again: Callable[..., Any]) -> bool:
        """Whether an error comes out of a user's step before which there was one that may have had other rows.

        Args:
            error: of the run.
            again: what calls the step more than once within a batch.
        """
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        inner = {call.__name__ for call in (compat.call_training_step, *again)}
        return not inner.isdisjoint(frames) or ("training_step" in frames and self.trainer.fit_loop.total_batch_idx > 0)

    def fail(self, error: BaseException) -> None:
        """Tells all ranks why this one stops; nobody is waited for from here on."""
        self._failed = True
        if self.ends_others(error):
            self.failures.report(error)

    @property
    def interrupted(self) -> bool:
        """Whether this rank has an exception, also before the strategy learns of it."""
        return self.trainer.state.status == TrainerStatus.INTERRUPTED

    def meet_interrupted(self, patience_s: float = 60.0, place: str = "") -> bool:
        """Returns whether all ranks come to save after an exception, to one place; else says why not. Called once.

        Where each rank has a part of the model, all are needed for a checkpoint; they come when they hear of the
        failure. `OnExceptionCheckpoint` and ``ModelCheckpoint(save_on_exception=True)`` save on each rank that has an
        exception, before the strategy learns of it. The first one reports it here; the others get an exception by that
        and come to save, too.

        Args:
            patience_s: how long this rank waits for the others, at most the timeout.
            place: what must be the same on all, other than steps.
        """
        self.failures.report(sys.exc_info()[1] or RuntimeError("interrupted"))
        here = f"epoch {self.trainer.current_epoch}, {self.trainer.global_step} optimizer steps{place}"
        notes = self.failures.meet(here, self.channel.world_size, min(patience_s, self.timeout_s))
        missing = [rank for rank, note in enumerate(notes) if not note]
        if not missing and len(set(notes)) == 1:
            return True
        why = f"rank(s) {missing} did not come to save" if missing else f"the ranks stand at {notes}"
        rank_zero_warn(f"no checkpoint is written after the exception: {why}, and each holds a part of the model")
        return False

    def ends_others(self, error: BaseException) -> bool:
        """Whether the others cannot go on without this rank, which has failed."""
        return True

    def end(self) -> None:
        """Closes; what fails in it neither hides the model, which each rank has, nor takes a first error's place."""
        try:
            self.close()
        except Exception as error:
            rank_zero_warn(f"after the run, on rank {self.channel.rank}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends the run; after a failure without waiting for anybody."""
        try:
            self.undo.close()
        finally:
            self.failures.leave()
            self.channel.close(destroy=self.channel_is_idle or not self.failed)
