"""What the steps of a fit took on this rank: told to the controller, and noted for a trace (layer L).

Signals to some ranks that all answer behind the same batch: SIGTERM, and SLURM's for a requeue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.loaders import BalancedBinder
from lightning_hetero.base.run import EventLog
from lightning_hetero.callbacks.reporting import RequeueTogether
from lightning_hetero.data.batches import Part
from lightning_hetero.data.order import Channel
from lightning_hetero.measure.compiles import CompileWatch, NewSizes
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.measure.host_load import HostLoad
from lightning_hetero.measure.step_clock import StepProbe
from lightning_hetero.shares.caps import MemoryCap
from lightning_hetero.shares.policy import ShareDecision


class StepTimes:
    """Closes the stopwatch of each step, exchanges its record with the ranks and notes what was decided.

    Args:
        binder: has the controller that decides.
        probe: the stopwatch around a step.
        channel: gathers rows during training.
        events: of this rank.
        cap: what is known of this rank's memory.
        device: of this rank.

    Attributes:
        synced: whether the ranks' gradients meet in the step that runs, so that a record may travel with them.
        compiles: says whether something was compiled in a step.
    """

    def __init__(
        self, binder: BalancedBinder, probe: StepProbe, channel: Channel, events: EventLog, cap: MemoryCap,
        device: HostDevice,
    ) -> None:  # fmt: skip
        self._binder, self._probe, self._channel, self._events, self._cap = binder, probe, channel, events, cap
        self.compiles = CompileWatch()
        self._sizes = NewSizes(device)
        self._load = HostLoad() if binder.policy.wants_load else None
        self._closed: deque[tuple[Part, bool]] = deque()  # steps whose time is not yet known; is it believed?
        self._timed: deque[tuple[Part, float]] = deque()  # steps whose time is known, but not yet their wait
        self._wait_s = 0.0
        self._sent = self.synced = False

    def opened(self, part: Part) -> None:
        """A step begins."""
        self._sent = self.synced = False
        self._probe.arm(part.fetch_s)

    def step_over(self, part: Part, *, tells_speed: bool, decides: bool) -> None:
        """This rank's own work in a step is over.

        Args:
            part: its part of the batch.
            tells_speed: whether the step was computed as the next ones will be.
            decides: whether shares follow from what was measured.
        """
        controller = self._binder.controller
        if self._sent or controller is None:  # a closure may run more than once per step
            return
        self._sent = True
        self._probe.close()
        short = self._binder.short(part)
        self._closed.append((part, self._believed(part, tells_speed and not (short and short[controller.rank]))))
        while (compute_s := self._probe.take()) is not None:  # on an accelerator, of a step before
            done, believed = self._closed.popleft()
            # Sent while the gradients still travel, so the wait is the last known one.
            if believed and decides:
                controller.measured(done.computed, compute_s, self._wait_s, done.work)
            self._timed.append((done, compute_s))
        self.note()
        says = self.synced and (decides or controller.bounds is not None)
        if says and controller.wants_exchange(part.epoch, part.step):
            wait = self._channel.all_gather_row(controller.row(part.epoch, part.step, **self._told()))
            controller.sent(part.epoch, part.step, wait, short)
        controller.catch_up()  # beside the gradient exchange, where it delays no rank
        while controller.news:
            self._note_decision(part, controller.news.popleft())

    def _believed(self, part: Part, tells_speed: bool) -> bool:
        """Whether the step's time says how fast this rank is.

        The first one of a size does not where libraries look for the best kernels of that size.
        """
        new = self._sizes.first(part.computed)
        return not (self.compiles.ask() or new) and tells_speed

    def _told(self) -> dict[str, float]:
        """Returns what this rank tells besides the times of its steps, see `Row`."""
        told = {} if self._cap.most is None else {"most_samples": float(self._cap.most * self._binder.pieces)}
        if self._load is not None:
            told["free_cpu"], told["free_mem"] = self._load.free()
        return told

    def _note_decision(self, part: Part, decision: ShareDecision) -> None:
        if decision.changed:
            told = {name: getattr(decision, name) for name in ("predicted_s", "reason", "predicted_gain")}
            data = {"shares": list(decision.shares), **told}
            self._events.note("decision", part.epoch, part.step, data)

    def note(self) -> None:
        """Notes measured steps once their own wait is known."""
        while self._timed and (wait_s := self._probe.take_wait()) is not None:
            self._wait_s = wait_s
            part, compute_s = self._timed.popleft()
            data = {"samples": part.samples, "compute_s": compute_s, "wait_s": wait_s}
            if part.work != part.computed:
                data["work"] = part.work
            self._events.note("step", part.epoch, part.step, data)


_REQUEUE = 1_000_000.0  # more than there are ranks: one number tells of both signals


class SignalsTogether:
    """Tells of them over the host, instead of Lightning's broadcast on the device before every batch.

    What is said before a batch is heard before the next, when the others have said it, too: their gradients are here.

    Args:
        trainer: the running trainer.
        channel: over all ranks.
        requeue: saves and asks SLURM; None: nothing requeues this job.
        begins: called before each batch.
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, requeue: RequeueTogether | None,
        begins: Callable[[], None],
    ) -> None:  # fmt: skip
        self._begins = begins
        self._trainer, self._channel, self._requeue = trainer, channel, requeue
        self._received = False
        self._said: deque[Callable[[], float]] = deque()  # how many ranks were told, and the signal of rank 0
        self.undo = compat.replace_sigterm_broadcast(trainer, self._any_told)

    def keeps_sigterm(self) -> bool:
        """This process has received SIGTERM: whether all are to end together; else Lightning ends this one."""
        training = self._trainer.training
        self._received |= training and bool(self._said)
        return training and self._received

    def _any_told(self, told: bool) -> bool:
        self._begins()
        self._say(told or self._received)
        if len(self._said) < 2:
            return False
        signal, ranks = divmod(self._said.popleft()(), _REQUEUE)
        if self._requeue is not None:
            self._requeue.hear(signal)
        return ranks > 0

    def _say(self, told: bool) -> None:
        signal = 0.0 if self._requeue is None else self._requeue.take()
        self._said.append(self._channel.sum_async(float(told) + _REQUEUE * signal))

    def training_pauses(self) -> None:
        """Batches end for a while, or altogether: what was said is heard now."""
        self._say(self._received)
        heard = [divmod(said(), _REQUEUE) for said in self._said]
        self._said.clear()
        if self._requeue is not None:
            self._requeue.finish(max(signal for signal, _ in heard))
        if any(ranks for _, ranks in heard):
            compat.raise_sigterm(self._trainer)
