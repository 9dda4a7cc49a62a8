"""One rank's way through the global steps of an epoch: what it claims, is assigned, or is passed by (layer L).

    Lightning asks for batch t ---- claim(t) --> assigned: the current parameters, samples -> a batch
                                        '------> passed:  None, which Lightning skips; counters advance

So one Lightning batch is one global step on every rank, whichever did the work, and everything that Lightning derives
from its counters (``global_step``, ``val_check_interval``, ``max_steps``, checkpoints, schedulers) agrees on all ranks.

Manual optimization runs user code that steps optimizers and schedulers itself, so a global step that went by trains a
dummy batch there, which is not pushed and counts nothing but the steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import LearningRateMonitor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.run import EventLog
from lightning_hetero.data.assigned import SampleSource
from lightning_hetero.measure.device import device_of
from lightning_hetero.stale.decide.intervals import leaving, pairs
from lightning_hetero.stale.decide.streams import UNLIMITED, Streams
from lightning_hetero.stale.fit.own_samples import OwnSamples
from lightning_hetero.stale.fit.parts import Parts
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.work.chunk import Chunk
from lightning_hetero.stale.runtime.work.loss_scale import AgreedScale
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.base import Reply, Say
from lightning_hetero.transport.flags import Word

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(slots=True)
class Progress:
    """Where this rank is.

    Attributes:
        epoch, global_step: the present batch.
        optimizer_steps: steps that all ranks together have made in this epoch, as far as this one knows.
        work: what it trains on; None between two batches.
        ends: cumulative samples behind each global step of the epoch; of finite streams, of those up to this one.
        steps: how many these are in the end; 0: not known yet.
        first: the epoch's first global step; later than 0 if it was resumed.
        before: samples and global steps of the epochs before.
    """

    epoch: int = -1
    global_step: int = 0
    optimizer_steps: int = 0
    work: Chunk | None = None
    ends: Sequence[int] = ()
    steps: int = 0
    first: int = 0
    before: tuple[int, int] = (0, 0)

    def begin(self, epoch: int, first: int, ends: Sequence[int], steps: int) -> None:
        """A new epoch begins, at the global step ``first``."""
        self.before, self.ends, self.steps = self.trained(), ends, steps
        self.epoch, self.first, self.global_step, self.optimizer_steps = epoch, first, first, 0

    def learn_end(self, batch: int, total: int) -> None:
        """An epoch of finite streams has come to the present step, or is known to have ``total`` samples.

        Args:
            batch: samples of a whole global batch.
            total: 0: not known yet.
        """
        ends = [*self.ends]
        while len(ends) <= self.global_step or (ends[-1] < total):
            ends.append((ends[-1] if ends else 0) + batch)
        if total:
            ends[-1], self.steps = total, len(ends)
        self.ends = ends

    @property
    def is_last(self) -> bool:
        """Whether the epoch is known to have no further global step."""
        return self.global_step + 1 == self.steps

    def trained(self) -> tuple[int, int]:
        """Returns the samples and the global steps of all ranks so far, with those of this rank's present one."""
        samples, steps = self.before
        if not self.ends:
            return samples, steps
        start = self.ends[self.first - 1] if self.first else 0
        here = min(self.global_step, len(self.ends) - 1)  # a look ahead at an epoch's end
        return samples + self.ends[here] - start, steps + here + 1 - self.first


class GlobalSteps:
    """Claims global step after global step and makes batches of what is assigned; one per fit and rank.

    Args:
        trainer: the running trainer.
        session: with this rank's end of the parameter server.
        source: samples of the train loader in their order, or of this rank's own stream.
        parts: what user code sees of what is trained.
        events: of this rank.
        before_epoch: called first in an epoch; may start the server again.
        resume: where a checkpoint stopped inside an epoch: ``{"epoch", "tick", "spans"}``; else empty.

    Attributes:
        at: where this rank is.
        source: in use; another one counts from the next epoch on.
        device: of this rank.
        scale: follows the updates that others made, too.
        parts, session: as given.
    """

    def __init__(
        self, trainer: Trainer, session: Session, source: SampleSource | OwnSamples, *, parts: Parts, events: EventLog,
        before_epoch: Callable[[], None], resume: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.at = Progress()
        self.source = source
        self.device = device_of(trainer.strategy.root_device)
        self.scale = AgreedScale(getattr(trainer.precision_plugin, "scaler", None))
        self.parts = parts
        self.session = session
        self._trainer = trainer
        self._events = events
        self._before_epoch = before_epoch
        self._resume = resume
        self._automatic = trainer.lightning_module.automatic_optimization
        self._words: deque[int] = deque()  # global steps the server has passed and Lightning has not
        self._seen = -1  # the server's last global step whose hinted samples were taken in

    # ---- an epoch ---------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """This rank's end of the parameter server."""
        worker = self.session.worker
        if worker is None:
            raise RuntimeError(
                "a fit within the fit, such as a learning-rate finder's, has ended in the middle of an epoch, which its"
                " parameter server knew. Let it run in on_fit_start or on_train_epoch_start"
            )
        return worker

    def batches(self) -> Iterator[Any]:
        """Yields the batches of the epoch from where Lightning's counters stand; None for one that went by."""
        self._before_epoch()
        source = self.source
        if isinstance(source, OwnSamples):
            yield from self._until_all_end(source)
            return
        self._begin(source)
        while True:
            yield self._next()

    def _begin(self, source: SampleSource) -> None:
        trainer, at = self._trainer, self.at
        indices, ends = source.sampler.draw()
        self.parts.begin_epoch()
        first, steps = compat.upcoming_batch(trainer), len(ends)
        if first >= min(steps, trainer.num_training_batches):  # resumed behind the last batch
            indices, ends = _once_more(indices, ends, first)
        at.begin(source.sampler.epoch, first, ends, steps)
        self._words.clear()
        trained = list(ends[: self._last(len(ends))])
        spans: Sequence[Sequence[int]] = ()
        if first:
            here = self._resume.get("epoch") == at.epoch and self._resume.get("tick") == first
            spans = self._resume["spans"] if here else [(0, trained[first - 1])]
            spans = leaving(len(trained) - first, spans, trained[-1])
        reply = self.worker.begin_epoch(at.epoch, trained, global_step=first, applied=spans)
        self._seen = reply.global_step - 1
        source.begin(indices, pairs(reply.numbers))

    def _until_all_end(self, source: OwnSamples) -> Iterator[Any]:
        """Yields the batches of an epoch in which every rank trains its own stream, until all are through."""
        trainer, at, first = self._trainer, self.at, compat.upcoming_batch(self._trainer)
        at.begin(compat.epoch_running(trainer), first, (), 0)
        numbers = source.begin_epoch(first, self._last(UNLIMITED))
        streams = Streams(numbers)
        if len(streams.ends) <= first:  # nothing is left
            return
        at.ends = list(streams.ends[:first])
        self.parts.begin_epoch()
        self._words.clear()
        self._seen = self.worker.begin_epoch(at.epoch, (), global_step=first, streams=numbers).global_step - 1
        while not at.is_last:
            batch = self._next()
            if at.is_last:
                compat.last_is_fetched(trainer)
            yield batch

    def _last(self, steps: int) -> int:
        """Number of the epoch's global steps that Lightning will train; samples beyond are no rank's."""
        trainer, first = self._trainer, self.at.first
        steps = int(min(steps, compat.fetch_limit(trainer), trainer.num_training_batches))
        limit = compat.step_limit(trainer)
        if limit is not None and self._automatic:
            every = trainer.accumulate_grad_batches
            steps = min(steps, first - first % every + limit * every)
        return max(steps, first + 1)

    # ---- one global step ---------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        self.at.global_step = compat.upcoming_batch(self._trainer)
        if not self._words:
            asked_s = time.perf_counter()
            reply = self.claim()
            if reply.kind is Say.ASSIGNED:
                self.parts.begin_batch(counts=bool(reply.numbers))
                return self.open(reply, wait_s=time.perf_counter() - asked_s)
            self._words.extend(reply.numbers)
        return self._passed_by()

    def _passed_by(self) -> Any:
        """This global step was made without this rank."""
        word = self._gone_by()
        self.parts.begin_batch(counts=False)
        if not self._words:
            self.worker.pull()
        self.note("passed", {"behind": len(self._words)})
        if not self._automatic:  # user code must run: it steps its own optimizers and schedulers
            self.at.work = Chunk(None)
            return self.source.dummy()
        compat.count_started(self._trainer)
        self._log_learning_rates()
        trainer, batches = self._trainer, self.at.global_step + 1
        last = batches in (self.at.steps, compat.fetch_limit(trainer), trainer.num_training_batches)
        if last or batches % trainer.accumulate_grad_batches == 0:  # also if the user's `optimizer_step` leaves it out
            compat.count_step(trainer)
        if Word.steps(word):
            self.scale.after_step(overflow=Word.overflowed(word))
        return None

    def _log_learning_rates(self) -> None:
        """`LearningRateMonitor` logs at the start of a batch; a batch that is passed does not have one."""
        trainer = self._trainer
        for callback in compat.trainer_callbacks(trainer):
            if isinstance(callback, LearningRateMonitor):
                module, batch_idx = trainer.lightning_module, self.at.global_step
                LearningRateMonitor.on_train_batch_start(callback, trainer, module, None, batch_idx)

    def claim(self) -> Reply:
        """Asks for work in this global step."""
        self.source.settle(wasted=True)  # if a batch was left before its end
        return self._learn_end(self.worker.claim(self.at.epoch, self.at.global_step, self.source.told))

    def _learn_end(self, reply: Reply) -> Reply:
        """Returns the answer to a claim, which says how many samples finite streams have, if that is known."""
        if isinstance(self.source, OwnSamples) and not self.at.steps:
            self.at.learn_end(self.source.batch_of_all, reply.total)
        return reply

    def open(self, reply: Reply, *, wait_s: float, top_up: bool = False) -> Any:
        """Takes an assignment: parameters, then samples; returns the (first micro-)batch on the host.

        Args:
            reply: the assignment.
            wait_s: how long it was waited for [s].
            top_up: it is not the first in this global step.
        """
        self.worker.pull()
        gone_by = max(0, reply.global_step - self._seen)
        for missed in reversed(range(gone_by)):  # one hint per global step; for those this rank missed it is too late
            self.source.hint((0, 0) if missed else (reply.hint_start, reply.hint_end))
        self._seen += gone_by
        started = self.device.stamp(timing=True)
        self.at.work = work = Chunk(reply, started=started, wait_s=wait_s, top_up=top_up)
        if not work.samples:
            return self.source.dummy(due=gone_by)
        return self.source.batch(work.piece, due=gone_by)

    def over(self, reply: Reply) -> None:
        """The global step is over: ``reply`` says it, and what has become of it and perhaps of later ones."""
        self._words.extend(reply.numbers)
        word = self._gone_by()
        if self._automatic and Word.steps(word):
            self.scale.after_step(overflow=Word.overflowed(word))
        if not self._words:
            self.worker.pull()
        self.at.work = None

    def _gone_by(self) -> int:
        """Takes the word of the next global step that is over."""
        word = self._words.popleft()
        self.at.optimizer_steps += Word.steps(word)
        return word

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Notes an event of this global step."""
        self._events.note(kind, self.at.epoch, self.at.global_step, data)


def _once_more(indices: Sequence[Any], ends: Sequence[int], step: int) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns order and ends of an epoch whose next batch is behind its last: Lightning trains the first one again."""
    passed = list(ends[:step])
    passed += range(passed[-1] + 1, passed[-1] + 1 + step - len(passed))  # steps that were so trained have a sample
    order = [*islice(cycle(indices), passed[-1]), *indices[: ends[0]]]
    return order, [*passed, passed[-1] + ends[0]]
