"""The parameter server: parameters and optimizer state, and what happens to them (layer T).

    listener.events() -> ParameterServer.handle -> Coordinator -> effects: Accepted  add a slot to the pool
                                                                           Updated   pool -> optimizer -> publish
                                                                           Granted, Passed   answer a worker

The coordinator decides, the `Updater` computes, this file carries messages. No clock of its own (times are passed in,
except for measuring its own work) and no socket.

Sub-steps. In manual optimization a batch pushes several times; all but the last (`PushFlag.FINAL`) are *sub-steps*.
Sub-step k of a tick has a pool of its own, applied when the tick's samples, or all live workers, are in it, and at the
latest with the tick's update. Who pushed waits for that as long as the policy waits for anybody (a barrier: until it is
applied; a grace: so long; asynchronous policies apply every push at once). What comes later counts in the next tick.
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
from lightning_hetero.stale.flags import PushFlag, ReplyFlag, Word
from lightning_hetero.stale.layout import FlatLayout
from lightning_hetero.stale.meters import Meters
from lightning_hetero.stale.policy.asynchronous import Asynchronous
from lightning_hetero.stale.protocol import Accepted, Effect, Granted, Passed, Refused, Reissued, Updated
from lightning_hetero.stale.shards import Shards
from lightning_hetero.stale.tickwork import TickWork
from lightning_hetero.stale.update import Updater, bits
from lightning_hetero.transport.base import (
    Arrived,
    Ask,
    Gone,
    Happened,
    Joined,
    Listener,
    Reply,
    Request,
    Say,
    TornSlotError,
)

__all__ = ["ParameterServer", "PushFlag", "ReplyFlag", "Word", "serve"]


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
        self._nonfinite = nonfinite
        self._shards = Shards([entry.numel for entry in layout.parameters], shards)
        self._updater = Updater(
            layout=layout, area=area, optimizers=optimizers, owned=optimizer_parameters, shards=self._shards,
            clip=clip, divide_by=divide_by,
        )  # fmt: skip
        self._work = TickWork(self._updater, coordinator, self.meters, compensation=compensation, clock=clock)
        self._members = Members(coordinator.live)
        self._meeting = Meeting()
        self._epochs = Epochs(layout.digest)
        self._failure: str | None = None
        self._unanswered: set[int] = set()
        self._claims: dict[int, tuple[Request, float]] = {}  # and when they were made [s]
        self._paused: dict[int, tuple[int, float]] = {}  # sub-step it waits for, and until when [s]
        self._leases: dict[int, tuple[int, int, float]] = {}  # rank, base, and when it was granted [s]
        listener.publish(coordinator.version, area)

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
            if self._failure is None:
                self._obey(self.coordinator.joined(happened.rank, now), now)
        else:
            self._gone(happened, now)

    def wake(self, now: float) -> None:
        """Does what is due by now."""
        if self._failure is None:
            self._obey(self.coordinator.wake(now), now)
            self._settle_substeps(now)

    def wake_s(self) -> float:
        """Returns when `wake` is due next [s]; inf: only an event can change anything."""
        if self._failure is not None:
            return math.inf
        return min([self.coordinator.wake_s(), *(until_s for _, until_s in self._paused.values())])

    def fail(self, text: str) -> None:
        """Tells everybody, now and later, that the run cannot go on."""
        self._failure = self._failure or text
        for rank in list(self._unanswered):
            self._reply(rank, Say.FAILED, text=self._failure)
        self._claims.clear()
        self._paused.clear()

    def close(self) -> None:
        """Ends the server's threads; idempotent."""
        self._shards.close()

    def _gone(self, gone: Gone, now: float) -> None:
        rank = gone.rank
        self._unanswered.discard(rank)
        self._epochs.forget(rank)
        self._members.gone(rank, gone.reason)
        self._without(rank, now)

    def _without(self, rank: int, now: float) -> None:
        """The others go on without a worker."""
        self._claims.pop(rank, None)
        self._paused.pop(rank, None)
        self._meeting.forget(rank)
        self._leases = {number: lease for number, lease in self._leases.items() if lease[0] != rank}
        if self._failure is None:
            self._obey(self.coordinator.lost(rank, now), now)
            self._settle_substeps(now)
            self._settle_meeting()

    def _request(self, rank: int, request: Request, now: float) -> None:
        kind = request.kind
        self._unanswered.add(rank)
        if kind is Ask.LEAVE:
            self._reply(rank, Say.DONE)
            self._members.left(rank)
            self._without(rank, now)
        elif kind is Ask.ABORT:
            self._reply(rank, Say.DONE)
            self._members.left(rank)
            self.fail(f"worker {rank} failed: {request.text}")
        elif self._failure is not None and kind is not Ask.STATE:  # a failed run may still be saved
            self._reply(rank, Say.FAILED, text=self._failure)
        else:
            try:
                self._serve(rank, request, now)
            except DisagreementError as error:
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
            self._reply(rank, Say.STATE)
        elif kind is Ask.METRICS:
            self._reply(rank, Say.DONE, text=json.dumps(self.measures(), separators=(",", ":")))
        elif request.epoch < self._epochs.number:
            self._of_epoch_before(rank, request)
        else:
            self._check_place(request)
            if kind is Ask.CLAIM:
                self._claim(rank, request, now)
            elif kind is Ask.RETURN:
                self._leases.pop(request.lease, None)
                self._obey(self.coordinator.give_back(rank, request.lease, now), now)
                self._reply(rank, Say.DONE)
            else:
                self._check_push(request)
                final = request.flags & PushFlag.FINAL
                self._push(rank, request, now) if final else self._push_substep(rank, request, now)

    # ---- epochs and meetings ----------------------------------------------------------------------------------

    def _begin(self, rank: int, request: Request, now: float) -> None:
        """Begins an epoch with the first worker that asks."""
        if (epoch := self._epochs.ask(rank, request)) is not None:
            effects = self.coordinator.begin(
                request.epoch, epoch.ends, applied=epoch.spans, tick=epoch.tick, now=now
            )
            self._obey(effects, now)  # for those who are still held in the epoch before
            self._epochs.begin(request.epoch, epoch)
            self._leases.clear()
            self._work.begin(epoch.words)
        hints = self.coordinator.hints(rank) if request.epoch == self._epochs.number else ()
        self._reply(rank, Say.DONE, numbers=[number for span in hints for number in span])

    def _of_epoch_before(self, rank: int, request: Request) -> None:
        """The worker was silent while the others finished its epoch: what it has is discarded, politely."""
        if request.kind is Ask.PUSH:
            self.meters.discarded["gone"] += request.samples
        words = self._epochs.words(request.epoch)
        if request.kind is Ask.RETURN:
            self._reply(rank, Say.DONE)
        elif request.kind is Ask.PUSH and not request.flags & PushFlag.FINAL:
            self._reply(rank, Say.APPLIED)
        elif not 0 <= request.tick < len(words):
            raise ValueError(f"batch {request.tick} of epoch {request.epoch}, which had {len(words)}")
        else:
            self._reply(rank, Say.PASSED, epoch=request.epoch, tick=len(words), numbers=words[request.tick :])

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
            self._reply(rank, Say.MET, tick=request.tick, numbers=alive, text=text)

    # ---- claims and pushes ------------------------------------------------------------------------------------

    def _check_place(self, request: Request) -> None:
        """Raises ValueError for a request from a place where nobody can be."""
        if request.epoch > self._epochs.number:
            raise ValueError(f"epoch {request.epoch} has not begun (the server is in {self._epochs.number})")
        if not 0 <= request.tick <= self.coordinator.tick:
            raise ValueError(f"it is in batch {request.tick}, the server in {self.coordinator.tick}")

    def _check_push(self, request: Request) -> None:
        optimizers = len(self._updater.optimizers)
        if (request.steps | request.zeroes) >> optimizers:
            raise ValueError(f"optimizers {list(bits(request.steps | request.zeroes))} of {optimizers}")
        if not (math.isfinite(request.weight) and request.weight >= 0.0):
            raise ValueError(f"weight={request.weight!r} must be a finite number >= 0")
        if request.samples < 1:
            raise ValueError(f"samples={request.samples} must be at least 1; a dummy batch is not pushed")

    def _claim(self, rank: int, request: Request, now: float) -> None:
        self._claims[rank] = (request, now)
        self._obey(self.coordinator.claim(rank, request.tick, now), now)
        self._settle_substeps(now)

    def _push(self, rank: int, request: Request, now: float) -> None:
        """The last push of a batch; a claim for the same batch follows at once."""
        slot = self._slot(rank, request)
        if slot is None:
            self._leases.pop(request.lease, None)
            self._obey(self.coordinator.give_back(rank, request.lease, now), now)
        else:
            finite = request.lease not in self._leases or self._finite(rank, request, slot)
            if self._failure is not None:
                return
            if request.tick == self.coordinator.tick:
                self._work.announce(request, slot)
            samples = request.samples
            effects = self.coordinator.push(
                rank, request.lease, now, tick=request.tick, samples=samples, finite=finite
            )
            self._obey(effects, now, request, slot)
        self._claim(rank, request, now)

    def _push_substep(self, rank: int, request: Request, now: float) -> None:
        slot, policy = self._slot(rank, request), self.coordinator.policy
        _, base, granted_s = self._leases.get(request.lease, (rank, None, now))
        bound = policy.bound_for(len(self._members.live))
        if slot is None or base is None or (bound is not None and self.coordinator.version - base > bound):
            self._reply(rank, Say.APPLIED)  # the last push of the batch will be refused as a whole
            return
        finite = self._finite(rank, request, slot)
        if self._failure is not None:
            return
        open_ = self._work.add_substep(rank, request, slot, base, finite=finite)
        if isinstance(policy, Asynchronous):
            self._work.apply_at_once(request)
            self.listener.publish(self.coordinator.version, self.area)
            self._reply(rank, Say.APPLIED, flags=ReplyFlag.CHANGED)
        elif open_:
            patience_s = float(getattr(policy, "grace", 0.0)) * (self.coordinator.step_s or now - granted_s)
            self._paused[rank] = (
                request.substep,
                math.inf if policy.holds == "barrier" else now + patience_s,
            )
            self._settle_substeps(now)
        else:
            self._reply(rank, Say.APPLIED)

    def _slot(self, rank: int, request: Request) -> Tensor | None:
        try:
            return self.listener.gradient(rank, request.slot)
        except TornSlotError as error:
            self._members.notify(
                f"a push of worker {rank} was not whole and is discarded: {error}", only=rank
            )
            self.meters.discarded["torn"] += request.samples
            return None

    def _finite(self, rank: int, request: Request, slot: Tensor) -> bool:
        """Returns whether the gradients are finite; ends the run if they are not and that is the rule."""
        name = None if request.flags & PushFlag.OVERFLOW else self._updater.nonfinite(slot)
        if name is None:
            return True
        where = f"worker {rank} has a gradient with NaN or Inf in epoch {request.epoch}, batch {request.tick}: {name!r}"
        if self._nonfinite == "stop":
            self.fail(f"{where} is the first such parameter. Pass nonfinite='skip' to leave such batches out")
        else:
            self._members.notify(f"{where}; its {request.samples} samples are left out")
        return False

    def _settle_substeps(self, now: float) -> None:
        """Applies the sub-steps that are complete, and lets go whoever has waited long enough."""
        for k in self._work.apply_complete(self._claims.keys()):
            self.listener.publish(self.coordinator.version, self.area)
            self._resume(
                [rank for rank, (substep, _) in self._paused.items() if substep == k], ReplyFlag.CHANGED
            )
        self._resume([rank for rank, (_, until_s) in self._paused.items() if until_s <= now], ReplyFlag(0))

    def _resume(self, ranks: Sequence[int], flags: ReplyFlag) -> None:
        for rank in ranks:
            del self._paused[rank]
            self._reply(rank, Say.APPLIED, flags=flags)

    # ---- effects ----------------------------------------------------------------------------------------------

    def _obey(
        self,
        effects: Sequence[Effect],
        now: float,
        request: Request | None = None,
        slot: Tensor | None = None,
    ) -> None:
        """Carries out what the coordinator decided.

        Args:
            request, slot: the push that caused it, if one did.
        """
        for effect in effects:
            if isinstance(effect, Granted):
                self._granted(effect, now)
            elif isinstance(effect, Passed):
                asked, at_s = self._claims.pop(effect.rank)
                self.meters.held(effect.rank, now - at_s)
                words = self._epochs.now.words[asked.tick :]
                self._reply(effect.rank, Say.PASSED, tick=effect.tick, numbers=words)
            elif isinstance(effect, Accepted):
                assert request is not None and slot is not None
                _, base, _ = self._leases.pop(effect.lease)
                self.meters.accepted(effect.rank, effect.samples, effect.staleness, request.compute_s)
                self._work.accept(effect, request, slot, base)
            elif isinstance(effect, Updated):
                self._work.update(effect)
                self._work.keep_only({base for _, base, _ in self._leases.values()})
                self.listener.publish(effect.version, self.area)
                self._resume(list(self._paused), ReplyFlag.CHANGED)
            elif isinstance(effect, Refused):
                self.meters.discarded[effect.reason] += effect.samples
                self._leases.pop(effect.lease, None)
            else:
                assert isinstance(effect, Reissued)
                self.meters.reissued[effect.reason] += effect.samples

    def _granted(self, granted: Granted, now: float) -> None:
        _, at_s = self._claims.pop(granted.rank)
        self.meters.held(granted.rank, now - at_s)
        self._leases = {number: lease for number, lease in self._leases.items() if lease[0] != granted.rank}
        if granted.spans:
            self._leases[granted.lease] = (granted.rank, granted.base, now)
            self._work.granted(granted.base)
        self._reply(
            granted.rank, Say.GRANT, tick=granted.tick, version=granted.base, lease=granted.lease, micro=granted.micro,
            numbers=[number for span in granted.spans for number in span], hint=granted.hint,
            flags=self.coordinator.policy.threshold_for(len(self._members.live)) or 0,
        )  # fmt: skip

    def _reply(
        self, rank: int, kind: Say, *, epoch: int | None = None, tick: int | None = None, version: int | None = None,
        lease: int = 0, micro: int = 0, numbers: Sequence[int] = (), hint: tuple[int, int] = (0, 0),
        flags: int = 0, text: str = "",
    ) -> None:  # fmt: skip
        self._unanswered.discard(rank)
        reply = Reply(
            kind=kind,
            epoch=self._epochs.number if epoch is None else epoch,
            tick=self.coordinator.tick if tick is None else tick,
            version=self.coordinator.version if version is None else version,
            lease=lease,
            micro=micro,
            hint_start=hint[0],
            hint_end=hint[1],
            generation=self._members.generation,
            flags=flags,
            numbers=numbers,
            text=text or "\n".join(self._members.take_notices(rank)),
        )
        self.listener.reply(rank, reply)

    # ---- state ------------------------------------------------------------------------------------------------

    def measures(self) -> dict[str, Any]:
        """Returns what was counted, `Meters.as_dict`, and what is known of now, as plain values.

        ``epoch``, ``tick``; ``version_gap``: versions the oldest lease is behind; per rank, from 0 on, ``shares``
        (samples of a batch), ``predicted_s`` (time for them) and ``equal_s`` (for an equal part), NaN where unknown.
        """
        coordinator = self.coordinator
        shares = coordinator.shares()
        part = -(-sum(shares) // max(1, len(coordinator.live)))
        live = [rank in coordinator.live for rank in range(len(shares))]
        return {
            **self.meters.as_dict(),
            "epoch": coordinator.epoch,
            "tick": coordinator.tick,
            "version_gap": max(
                (coordinator.version - base for _, base, _ in self._leases.values()), default=0
            ),
            "shares": list(shares),
            "predicted_s": [
                coordinator.predicted_s(r, n) if live[r] else math.nan for r, n in enumerate(shares)
            ],
            "equal_s": [
                coordinator.predicted_s(r, part) if live[r] else math.nan for r in range(len(shares))
            ],
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
        self.listener.publish(self.coordinator.version, self.area)


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
