"""The parameter server: parameters and optimizer state, and what happens to them (layer T).

    listener.events() -> ParameterServer.handle -> Intake   pushes that may count
                                                -> Coordinator -> effects -> Effects -> TickWork   pools, optimizers
                                                                                     -> Outbox     answers, versions

The coordinator decides; this file takes events in and hands each to who knows about it. No clock of its own (times are
passed in, except for measuring its own work) and no socket.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.stale import codec as trees
from lightning_hetero.stale.agreement import DisagreementError, Epochs, Meeting, Members
from lightning_hetero.stale.compress import Codec, by_name
from lightning_hetero.stale.coordinator import Coordinator
from lightning_hetero.stale.effects import Effects
from lightning_hetero.stale.flags import PushFlag
from lightning_hetero.stale.intake import Intake, NonFiniteError
from lightning_hetero.stale.layout import FlatLayout
from lightning_hetero.stale.meters import Meters, present
from lightning_hetero.stale.outbox import Outbox
from lightning_hetero.stale.shards import Shards
from lightning_hetero.stale.substeps import Substeps
from lightning_hetero.stale.tickwork import TickWork
from lightning_hetero.stale.update import Updater
from lightning_hetero.transport.base import Arrived, Ask, Gone, Happened, Joined, Listener, Request, Say

__all__ = ["ParameterServer", "serve"]


class ParameterServer:
    """Serves workers; see the module.

    Args:
        layout: of parameters, buffers and slots.
        area: uint8 flat parameters and buffers, the server's own memory; the optimizers' parameters are views of it.
        optimizers: the user's.
        optimizer_parameters: per optimizer, the layout's index of each of its parameters, group after group.
        listener: the transport's end; version 0 is published at once.
        coordinator: decides.
        clip: called with an optimizer's number before its step, gradients in ``.grad``; clipping asked for by workers
            (`Worker.clip`) is done anyway.
        divide_by: the pool's sum is divided by this instead of by its weight; for losses that are sums.
        nonfinite: a NaN or Inf gradient ends the run (``"stop"``), or its samples are left out (``"skip"``).
        shards: threads for pools and optimizers; None: by size.
        codec: must be the layout's.
        compensation: lambda of DC-ASGD; above 0 a copy of the parameters is kept per version still computed on.
        clock: measures the time of updates [s].

    Attributes:
        finished: all workers there were have left or are gone.
        meters: what was counted.

    Raises:
        ValueError: an argument is out of range, or an optimizer cannot run here.
    """

    def __init__(
        self,
        *,
        layout: FlatLayout,
        area: Tensor,
        optimizers: Sequence[Optimizer],
        optimizer_parameters: Sequence[Sequence[int]],
        listener: Listener,
        coordinator: Coordinator,
        clip: Callable[[int], None] | None = None,
        divide_by: float | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        shards: int | None = None,
        codec: Codec | str | None = None,
        compensation: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if nonfinite not in ("stop", "skip"):
            raise ValueError(f"nonfinite={nonfinite!r} must be 'stop' or 'skip'")
        if not (math.isfinite(compensation) and compensation >= 0.0):
            raise ValueError(
                f"compensation={compensation!r} must be a finite number >= 0; 0.04 to 2 is usual"
            )
        if by_name(codec) != layout.codec:
            raise ValueError(f"codec={codec!r} is not the layout's, {layout.codec!r}: give both the same")
        self.layout, self.area = layout, area
        self.listener, self.coordinator = listener, coordinator
        self.meters = Meters()
        self._shards = Shards([entry.numel for entry in layout.parameters], shards)
        self._updater = Updater(
            layout=layout, area=area, optimizers=optimizers, owned=optimizer_parameters, shards=self._shards,
            clip=clip, divide_by=divide_by,
        )  # fmt: skip
        self._work = TickWork(self._updater, coordinator, self.meters, compensation=compensation, clock=clock)
        self._members = Members(coordinator.live)
        self._meeting = Meeting()
        self._epochs = Epochs(layout.digest)
        self._intake = Intake(listener, self._updater, self._members, self.meters, stop=nonfinite == "stop")
        self._outbox = Outbox(listener, area, coordinator, self._members, self._epochs, self._work.settle)
        self._substeps = Substeps(self._work, coordinator, self._outbox)
        self._effects = Effects(
            coordinator, self._work, self._substeps, self._outbox, self._members, self.meters
        )
        self._outbox.publish()

    @property
    def connected(self) -> frozenset[int]:
        """Workers with a connection."""
        return frozenset(self._members.connected)

    @property
    def finished(self) -> bool:
        return self._members.finished

    # ---- events -----------------------------------------------------------------------------------------------

    def handle(self, happened: Happened, now: float) -> None:
        """Takes in one event.

        Args:
            happened: from the listener.
            now: time [s], monotonic.
        """
        if isinstance(happened, Arrived):
            self._request(happened.rank, happened.request, now)
        elif isinstance(happened, Joined):
            self._members.joined(happened.rank)
            if self._outbox.failure is None:
                self._effects.carry_out(self.coordinator.joined(happened.rank, now), now)
        else:
            self._gone(happened, now)

    def wake(self, now: float) -> None:
        """Does what is due by now."""
        if self._outbox.failure is None:
            self._effects.carry_out(self.coordinator.wake(now), now)
            self._substeps.settle(self._effects.claiming, now)
            self._work.settle()

    def wake_s(self) -> float:
        """Returns when `wake` is due next [s]; inf: only an event can change anything."""
        if self._outbox.failure is not None:
            return math.inf
        return min(self.coordinator.wake_s(), self._substeps.wake_s())

    def fail(self, text: str) -> None:
        """Tells everybody, now and later, that the run cannot go on."""
        self._outbox.fail(text)
        self._effects.forget_claims()
        self._substeps.clear()

    def close(self) -> None:
        """Ends the server's threads; idempotent."""
        self._shards.close()

    def _gone(self, gone: Gone, now: float) -> None:
        rank = gone.rank
        self._outbox.forget(rank)
        self._epochs.forget(rank)
        self._members.gone(rank, gone.reason)
        self._without(rank, now)

    def _without(self, rank: int, now: float) -> None:
        """The others go on without a worker."""
        self._effects.forget(rank)
        self._substeps.forget(rank)
        self._meeting.forget(rank)
        if self._outbox.failure is None:
            self._effects.carry_out(self.coordinator.lost(rank, now), now)
            self._substeps.settle(self._effects.claiming, now)
            self._settle_meeting()

    def _request(self, rank: int, request: Request, now: float) -> None:
        kind = request.kind
        self._outbox.asked(rank)
        if kind is Ask.LEAVE:
            self._outbox.answer(rank, Say.DONE)
            self._members.left(rank)
            self._without(rank, now)
        elif kind is Ask.ABORT:
            self._outbox.answer(rank, Say.DONE)
            self._members.left(rank)
            self.fail(f"worker {rank} failed: {request.text}")
        elif self._outbox.failure is not None and kind is not Ask.STATE:  # a failed run may still be saved
            self._outbox.answer_failed(rank)
        else:
            try:
                self._serve(rank, request, now)
            except (DisagreementError, NonFiniteError) as error:
                self.fail(str(error))
            except ValueError as error:
                self.fail(f"worker {rank} sent a {kind.name} that makes no sense: {error}")

    def _serve(self, rank: int, request: Request, now: float) -> None:
        kind = request.kind
        if kind is Ask.EPOCH:
            self._begin(rank, request, now)
        elif kind is Ask.MEET:
            self._meeting.ask(rank, request)
            self._settle_meeting()
        elif kind is Ask.STATE:
            self.listener.share_state(trees.encode(self.state()))
            self._outbox.answer(rank, Say.STATE)
        elif kind is Ask.METRICS:
            self._outbox.answer(rank, Say.DONE, text=json.dumps(self.measures(), separators=(",", ":")))
        elif request.epoch < self._epochs.number:
            self._of_epoch_before(rank, request)
        else:
            self._check_place(request)
            if kind is Ask.CLAIM:
                self._claim(rank, request, now)
            elif kind is Ask.RETURN:
                self._give_back(rank, request.lease, now)
                self._outbox.answer(rank, Say.DONE)
            else:
                self._intake.check(request)
                final = request.flags & PushFlag.FINAL
                self._push(rank, request, now) if final else self._push_substep(rank, request, now)

    # ---- epochs and meetings ----------------------------------------------------------------------------------

    def _begin(self, rank: int, request: Request, now: float) -> None:
        """Begins an epoch with the first worker that asks."""
        if (epoch := self._epochs.ask(rank, request)) is not None:
            effects = self.coordinator.begin(
                request.epoch, epoch.ends, applied=epoch.spans, tick=epoch.tick, now=now
            )
            self._effects.carry_out(effects, now)  # for those who are still held in the epoch before
            self._epochs.begin(request.epoch, epoch)
            self._effects.leases.clear()
            self._work.begin(epoch.words)
        hints = self.coordinator.hints(rank) if request.epoch == self._epochs.number else ()
        self._outbox.answer(rank, Say.DONE, numbers=[number for span in hints for number in span])

    def _of_epoch_before(self, rank: int, request: Request) -> None:
        """The worker was silent while the others finished its epoch: what it has is discarded, politely."""
        if request.kind is Ask.PUSH:
            self.meters.discarded["gone"] += request.samples
        words = self._epochs.words(request.epoch)
        if request.kind is Ask.RETURN:
            self._outbox.answer(rank, Say.DONE)
        elif request.kind is Ask.PUSH and not request.flags & PushFlag.FINAL:
            self._outbox.answer(rank, Say.APPLIED)
        elif not 0 <= request.tick < len(words):
            raise ValueError(f"batch {request.tick} of epoch {request.epoch}, which had {len(words)}")
        else:
            self._outbox.answer(rank, Say.PASSED, epoch=request.epoch, tick=len(words), numbers=words[request.tick :])

    def _settle_meeting(self) -> None:
        try:
            met = self._meeting.complete(self._members.live)
        except DisagreementError as error:
            self.fail(str(error))
            return
        alive = sorted(self._members.live)
        for rank, request in met.items():
            said = {"metrics": self.meters.as_dict(), "notices": self._members.take_notices(rank)}
            text = json.dumps(said, separators=(",", ":"))
            self._outbox.answer(rank, Say.MET, tick=request.tick, numbers=alive, text=text)

    # ---- claims and pushes ------------------------------------------------------------------------------------

    def _check_place(self, request: Request) -> None:
        """Raises ValueError for a request from a place where nobody can be."""
        if request.epoch > self._epochs.number:
            raise ValueError(f"epoch {request.epoch} has not begun (the server is in {self._epochs.number})")
        if not 0 <= request.tick <= self.coordinator.tick:
            raise ValueError(f"it is in batch {request.tick}, the server in {self.coordinator.tick}")

    def _claim(self, rank: int, request: Request, now: float) -> None:
        self._effects.claimed(rank, request, now)
        self._effects.carry_out(self.coordinator.claim(rank, request.tick, now), now)
        self._substeps.settle(self._effects.claiming, now)

    def _push(self, rank: int, push: Request, now: float) -> None:
        """The last push of a batch; a claim for the same batch follows at once."""
        slot = self._intake.slot(rank, push)
        if slot is None:
            self._give_back(rank, push.lease, now)
        else:
            finite = push.lease not in self._effects.leases or self._intake.finite(rank, push, slot)
            if push.tick == self.coordinator.tick:
                self._work.announce(push, slot)
            effects = self.coordinator.push(
                rank, push.lease, now, tick=push.tick, samples=push.samples, finite=finite
            )
            self._effects.carry_out(effects, now, push, slot)
        self._claim(rank, push, now)

    def _push_substep(self, rank: int, push: Request, now: float) -> None:
        slot, lease = self._intake.slot(rank, push), self._effects.leases.get(push.lease)
        bound = self.coordinator.policy.bound_for(len(self._members.live))
        if slot is None or lease is None or (bound is not None and self.coordinator.version - lease.base > bound):
            self._outbox.answer(rank, Say.APPLIED)  # the last push of the batch will be refused as a whole
            return
        finite = self._intake.finite(rank, push, slot)
        self._substeps.push(
            rank, push, slot, now, base=lease.base, granted_s=lease.granted_s, finite=finite,
            done=self._effects.claiming,
        )  # fmt: skip

    def _give_back(self, rank: int, lease: int, now: float) -> None:
        self._effects.leases.pop(lease, None)
        self._effects.carry_out(self.coordinator.give_back(rank, lease, now), now)

    # ---- state ------------------------------------------------------------------------------------------------

    def measures(self) -> dict[str, Any]:
        """Returns what was counted, `Meters.as_dict`, and what is known of now, `present`, as plain values.

        And ``version_gap``: versions the oldest lease is behind.
        """
        return {
            **self.meters.as_dict(),
            **present(self.coordinator),
            "version_gap": self._effects.version_gap,
        }

    def state(self) -> dict[str, Any]:
        """Returns what a server needs to go on from here, besides the area; see `load_state`."""
        return {
            "version": self.coordinator.version,
            "optimizers": self._updater.state_dicts(),
            "coordinator": self.coordinator.state_dict(),
            "metrics": self.meters.as_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over optimizers and version of `state`; the area has been set by the caller, and is published.

        Raises:
            ValueError: a state of other optimizers.
        """
        self._updater.load_state_dicts(state["optimizers"])
        self._updater.forget()
        self.coordinator.load_state_dict(state["coordinator"])
        self._outbox.publish()


def serve(
    server: ParameterServer,
    listener: Listener,
    clock: Callable[[], float],
    *,
    orphaned: Callable[[], bool] | None = None,
    look_s: float = 1.0,
) -> None:
    """Serves until all workers have left or are gone, then closes the server; the listener is the caller's.

    Args:
        clock: monotonic time [s].
        orphaned: whether whoever started the server is gone; then it ends as soon as it has no worker.
        look_s: how often to ask that [s].
    """
    try:
        while not server.finished:
            wait_s: float | None = server.wake_s() - clock()
            if orphaned is not None:
                if not server.connected and orphaned():
                    return
                wait_s = min(wait_s, look_s)
            events = listener.events(None if math.isinf(wait_s) else max(0.0, wait_s))
            server.meters.waiting(len(events))
            for event in events:
                server.handle(event, clock())
            server.wake(clock())
    except Exception as error:
        server.fail(f"the parameter server failed: {type(error).__name__}: {error}")
        raise
    finally:
        server.close()
