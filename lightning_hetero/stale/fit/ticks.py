"""One rank's way through the ticks of an epoch: what it claims, is granted, or is passed by (layer L).

    Lightning asks for batch t ---- claim(t) --> granted: parameters of the newest version, samples -> a batch
                                        '------> passed:  None, which Lightning skips; counters advance

So one Lightning batch is one tick on every rank, whoever did the work, and everything that Lightning derives from its
counters (``global_step``, ``val_check_interval``, ``max_steps``, checkpoints, schedulers) agrees on all ranks.

Manual optimization runs user code that steps optimizers and schedulers itself, so a tick that went by trains a dummy
batch there, which is not pushed and counts nothing but the steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import LearningRateMonitor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.run import EventLog
from lightning_hetero.data.granted import EpochSampler, SampleSource
from lightning_hetero.measure.device import device_of
from lightning_hetero.stale.decide.intervals import leaving, pairs
from lightning_hetero.stale.fit.parts import Parts
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.work.chunk import Chunk
from lightning_hetero.stale.runtime.work.loss_scale import AgreedScale
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.base import Reply, Say
from lightning_hetero.transport.flags import Word

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Ticks"]


class Ticks:
    """Claims tick after tick and makes batches of what is granted; one per fit and rank.

    Args:
        trainer: the running trainer.
        session: with this rank's end of the parameter server.
        sampler, source: order and samples of the train loader.
        scale: follows the updates that others made, too.
        parts: what user code sees of what is trained.
        events: of this rank.
        before_epoch: called first in an epoch; may start the server again.
        resume: where a checkpoint stopped inside an epoch: ``{"epoch", "tick", "spans"}``; else empty.

    Attributes:
        source: in use.
        device: of this rank.
        scale, parts: as given.
        epoch, tick: where this rank is.
        steps: optimizer steps that all ranks together have made in this epoch, as far as this one knows.
        work: what it trains on; None between two batches.
        others: see `Session.others_now`.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        sampler: EpochSampler,
        source: SampleSource,
        *,
        scale: AgreedScale,
        parts: Parts,
        events: EventLog,
        before_epoch: Callable[[], None],
        resume: Mapping[str, Any],
    ) -> None:
        self.source = source
        self.device = device_of(trainer.strategy.root_device)
        self.scale = scale
        self.parts = parts
        self.epoch = -1
        self.tick = 0
        self.steps = 0
        self.work: Chunk | None = None
        self._trainer = trainer
        self._session = session
        self._sampler = sampler
        self._events = events
        self._before_epoch = before_epoch
        self._resume = resume
        self.others = session.others_now
        self._automatic = trainer.lightning_module.automatic_optimization
        self._before = 0, 0  # samples and ticks of the epochs before
        self._ends: Sequence[int] = ()  # of this one's ticks
        self._first = 0  # of them
        self._words: deque[int] = deque()  # ticks the server has passed and Lightning has not
        self._seen_tick = -1  # the server's last tick whose hinted samples were taken in

    def bind(self, sampler: EpochSampler, source: SampleSource) -> None:
        """Takes another train loader, from the next epoch on."""
        self._sampler, self.source = sampler, source

    # ---- an epoch ---------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """This rank's end of the parameter server."""
        worker = self._session.worker
        if worker is None:
            raise RuntimeError(
                "a fit within the fit, such as a learning-rate finder's, has ended in the middle of an epoch, which its"
                " parameter server knew. Let it run in on_fit_start or on_train_epoch_start"
            )
        return worker

    def batches(self) -> Iterator[Any]:
        """Yields the batches of the epoch from where Lightning's counters stand; None for a tick that went by."""
        self._begin()
        while True:
            yield self._next()

    def _begin(self) -> None:
        trainer, sampler = self._trainer, self._sampler
        self._before_epoch()
        self._before = self.trained()
        sampler.draw()
        self.parts.begin_epoch()
        self.steps = 0
        self.epoch = sampler.epoch
        self._first = self.tick = compat.upcoming_batch(trainer)
        indices, self._ends = sampler.indices, sampler.ends
        if self.tick >= min(len(self._ends), trainer.num_training_batches):  # resumed behind the last batch
            indices, self._ends = _once_more(indices, self._ends, self.tick)
        self._words.clear()
        ends = list(self._ends[: self._last_tick(len(self._ends))])
        spans: Sequence[Sequence[int]] = ()
        if self.tick:
            here = self._resume.get("epoch") == self.epoch and self._resume.get("tick") == self.tick
            spans = self._resume["spans"] if here else [(0, ends[self.tick - 1])]
            spans = leaving(len(ends) - self.tick, spans, ends[-1])
        reply = self.worker.begin_epoch(self.epoch, ends, tick=self.tick, applied=spans)
        self._seen_tick = reply.tick - 1
        self.source.begin(indices, pairs(reply.numbers))

    def trained(self) -> tuple[int, int]:
        """Returns the samples and the ticks of all ranks so far, with those of this rank's tick."""
        samples, ticks = self._before
        if not self._ends:
            return samples, ticks
        start = self._ends[self._first - 1] if self._first else 0
        here = min(self.tick, len(self._ends) - 1)  # a look ahead at an epoch's end
        return samples + self._ends[here] - start, ticks + here + 1 - self._first

    def _last_tick(self, ticks: int) -> int:
        """Number of the epoch's ticks that Lightning will train; samples beyond are nobody's."""
        trainer = self._trainer
        ticks = int(min(ticks, compat.fetch_limit(trainer), trainer.num_training_batches))
        steps = compat.step_limit(trainer)
        if steps is not None and self._automatic:
            every = trainer.accumulate_grad_batches
            ticks = min(ticks, self.tick - self.tick % every + steps * every)
        return max(ticks, self.tick + 1)

    # ---- one tick ---------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        self.tick = compat.upcoming_batch(self._trainer)
        if not self._words:
            asked_s = time.perf_counter()
            reply = self.claim()
            if reply.kind is Say.GRANT:
                self.parts.begin_batch(counts=bool(reply.numbers))
                return self.open(reply, wait_s=time.perf_counter() - asked_s)
            self._words.extend(reply.numbers)
        return self._passed_by()

    def _passed_by(self) -> Any:
        """This tick was made without this rank."""
        word = self._gone_by()
        self.parts.begin_batch(counts=False)
        if not self._words:
            self.worker.pull()
        self.note("passed", {"behind": len(self._words)})
        if not self._automatic:  # user code must run: it steps its own optimizers and schedulers
            self.work = Chunk(None)
            return self.source.dummy()
        compat.count_started(self._trainer)
        self._log_learning_rates()
        if self._counts_step():
            compat.count_step(self._trainer)
        if Word.steps(word):
            self.scale.after_step(overflow=Word.overflowed(word))
        return None

    def _counts_step(self) -> bool:
        """Whether Lightning counts a step in this tick: also if the user's `optimizer_step` leaves it out."""
        trainer, ticks = self._trainer, self.tick + 1
        last = ticks in (len(self._sampler.ends), compat.fetch_limit(trainer), trainer.num_training_batches)
        return last or ticks % trainer.accumulate_grad_batches == 0

    def _log_learning_rates(self) -> None:
        """`LearningRateMonitor` logs at the start of a batch, which has none when it is passed."""
        trainer = self._trainer
        for callback in compat.trainer_callbacks(trainer):
            if isinstance(callback, LearningRateMonitor):
                LearningRateMonitor.on_train_batch_start(callback, trainer, trainer.lightning_module, None, self.tick)

    def claim(self) -> Reply:
        """Asks for work in this tick."""
        return self.worker.claim(self.epoch, self.tick)

    def open(self, reply: Reply, *, wait_s: float, fill_in: bool = False) -> Any:
        """Takes a grant: parameters, then samples; returns the (first micro-)batch on the host.

        Args:
            reply: the grant.
            wait_s: how long it was waited for [s].
            fill_in: it is not the first in this tick.
        """
        self.worker.pull()
        gone_by = max(0, reply.tick - self._seen_tick)
        for missed in reversed(range(gone_by)):  # one hint per tick; for those this rank missed it is too late
            self.source.hint((0, 0) if missed else (reply.hint_start, reply.hint_end))
        self._seen_tick += gone_by
        started = self.device.stamp(timing=True)
        self.work = work = Chunk(reply, started=started, wait_s=wait_s, fill_in=fill_in)
        if not work.samples:
            return self.source.dummy(due=gone_by)
        return self.source.batch(work.piece, due=gone_by)

    def over(self, reply: Reply) -> None:
        """The tick is over: ``reply`` says it, and what has become of it and perhaps of later ones."""
        self._words.extend(reply.numbers)
        word = self._gone_by()
        if self._automatic and Word.steps(word):
            self.scale.after_step(overflow=Word.overflowed(word))
        if not self._words:
            self.worker.pull()
        self.work = None

    def _gone_by(self) -> int:
        """Takes the word of the next tick that is over."""
        word = self._words.popleft()
        self.steps += Word.steps(word)
        return word

    def skipped(self) -> None:
        """The dummy batch of a tick that went by is trained."""
        self.work = None

    # ---- events -----------------------------------------------------------------------------------------------

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Notes an event of this tick."""
        self._events.note(kind, self.epoch, self.tick, data)


def _once_more(indices: Sequence[Any], ends: Sequence[int], tick: int) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns order and ends of an epoch whose next tick is behind its last: Lightning trains the first batch again."""
    passed = list(ends[:tick])
    passed += range(passed[-1] + 1, passed[-1] + 1 + tick - len(passed))  # ticks that were so trained have a sample
    order = [*islice(cycle(indices), passed[-1]), *indices[: ends[0]]]
    return order, [*passed, passed[-1] + ends[0]]
