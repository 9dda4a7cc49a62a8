"""One rank's way through the ticks of an epoch: what it claims, is granted, or is passed by (layer L).

    Lightning asks for batch t ---- claim(t) --> granted: parameters of the newest version, samples -> a batch
                                        '------> passed:  None, which Lightning skips; counters advance

So one Lightning batch is one tick on every rank, whoever did the work, and everything that Lightning derives from its
counters (``global_step``, ``val_check_interval``, ``max_steps``, checkpoints, schedulers) agrees on all ranks.

Manual optimization runs user code that steps optimizers and schedulers itself, so a tick that went by trains a dummy
batch there, which is not pushed and counts nothing but the steps.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import LearningRateMonitor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.ticks import SampleSource, TickSampler
from lightning_hetero.stale.amp import AgreedScale
from lightning_hetero.stale.flags import Word
from lightning_hetero.stale.spans import leaving, pairs
from lightning_hetero.stale.work import Work
from lightning_hetero.stale.worker import Worker
from lightning_hetero.transport.base import Reply, Say
from lightning_hetero.types import Event

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["TickClaims"]


class TickClaims:
    """Claims tick after tick and makes batches of what is granted; one per fit and rank.

    Args:
        trainer: the running trainer.
        worker: this rank's end of the parameter server.
        sampler, source: order and samples of the train loader.
        scale: follows the updates that others made, too.
        rank: this rank, for its events.
        before_epoch: returns the worker to use; a new one if the server had to be started again.
        resume: where a checkpoint stopped inside an epoch: ``{"epoch", "tick", "spans"}``; else empty.

    Attributes:
        worker: in use.
        source: in use.
        epoch, tick: where this rank is.
        work: what it trains on; None between two batches.
    """

    def __init__(
        self,
        trainer: Trainer,
        worker: Worker,
        sampler: TickSampler,
        source: SampleSource,
        *,
        scale: AgreedScale,
        rank: int,
        before_epoch: Callable[[], Worker],
        resume: Mapping[str, Any],
    ) -> None:
        self.worker = worker
        self.source = source
        self.epoch = -1
        self.tick = 0
        self.work: Work | None = None
        self._trainer = trainer
        self._sampler = sampler
        self._scale = scale
        self._rank = rank
        self._before_epoch = before_epoch
        self._resume = resume
        self._automatic = trainer.lightning_module.automatic_optimization
        self._words: deque[int] = deque()  # ticks the server has passed and Lightning has not
        self._seen_tick = -1  # the server's last tick whose hinted samples were taken in
        self._opened_s = time.perf_counter()
        self._events: deque[Event] = deque(maxlen=4096)

    def bind(self, sampler: TickSampler, source: SampleSource) -> None:
        """Takes another train loader, from the next epoch on."""
        self._sampler, self.source = sampler, source

    # ---- an epoch ---------------------------------------------------------------------------------------------

    def ticks(self) -> Iterator[Any]:
        """Yields the batches of the epoch from where Lightning's counters stand; None for a tick that went by."""
        self._begin()
        while True:
            yield self._next()

    def _begin(self) -> None:
        trainer, sampler = self._trainer, self._sampler
        self.worker = self._before_epoch()
        self.epoch = sampler.epoch
        self.tick = compat.upcoming_batch(trainer)
        self._words.clear()
        ends = list(sampler.ends[: self._last_tick(len(sampler.ends))])
        text = ""
        if self.tick:
            here = self._resume.get("epoch") == self.epoch and self._resume.get("tick") == self.tick
            spans = self._resume["spans"] if here else [(0, ends[self.tick - 1])]
            spans = leaving(len(ends) - self.tick, spans, ends[-1])
            text = json.dumps({"tick": self.tick, "applied": spans})
        reply = self.worker.begin_epoch(self.epoch, ends, tick=self.tick, text=text)
        self._seen_tick = reply.tick - 1
        self.source.begin(sampler.indices, pairs(reply.numbers))

    def _last_tick(self, ticks: int) -> int:
        """Number of the epoch's ticks that Lightning will train; samples beyond are nobody's."""
        trainer = self._trainer
        limit = trainer.num_training_batches
        ticks = ticks if limit == float("inf") else min(ticks, int(limit))
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
                return self.open(reply, wait_s=time.perf_counter() - asked_s)
            self._words.extend(reply.numbers)
        return self._passed_by()

    def _passed_by(self) -> Any:
        """This tick was made without this rank."""
        word = self._words.popleft()
        if not self._words:
            self.worker.pull()
        self.note("passed", {"behind": len(self._words)})
        if not self._automatic:  # user code must run: it steps its own optimizers and schedulers
            self.work = Work(None)
            return self.source.dummy()
        compat.count_started(self._trainer)
        self._log_learning_rates()
        if Word.steps(word):
            compat.count_step(self._trainer)
            self._scale.after_step(overflow=Word.overflowed(word))
        return None

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
        self.work = work = Work(reply, wait_s=wait_s, fill_in=fill_in)
        if not work.samples:
            return self.source.dummy(ticks=gone_by)
        return self.source.batch(work.piece, ticks=gone_by)

    def over(self, reply: Reply) -> None:
        """The tick is over: ``reply`` says it, and what has become of it and perhaps of later ones."""
        self._words.extend(reply.numbers)
        word = self._words.popleft()
        if self._automatic and Word.steps(word):
            self._scale.after_step(overflow=Word.overflowed(word))
        if not self._words:
            self.worker.pull()
        self.work = None

    # ---- events -----------------------------------------------------------------------------------------------

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Notes an event of this tick."""
        t_s = time.perf_counter() - self._opened_s
        self._events.append(Event(kind=kind, rank=self._rank, epoch=self.epoch, step=self.tick, t_s=t_s, data=data))

    def take_events(self) -> list[Event]:
        """Returns and forgets the noted events."""
        events = list(self._events)
        self._events.clear()
        return events
