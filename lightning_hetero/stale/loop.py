"""One rank's way through the ticks of an epoch, inside Lightning's unchanged training loop (layer L).

    Lightning asks for batch t ---- claim(t) --> granted: parameters of the newest version, samples -> a batch
                                        '------> passed:  None, which Lightning skips; counters advance
    closure (training_step, backward) -- push --> granted again: a fill-in, trained within the same batch
                                        '------> passed:  the tick is over, the batch ends

So one Lightning batch is one tick on every rank, whoever did the work, and everything that Lightning derives from its
counters (``global_step``, ``val_check_interval``, ``max_steps``, checkpoints, schedulers) agrees on all ranks.

Manual optimization runs user code that steps optimizers and schedulers itself, so a tick that went by trains a dummy
batch there, which is not pushed and counts nothing but the steps.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import Optimizer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.ticks import SampleSource, TickSampler
from lightning_hetero.stale.amp import AgreedScale
from lightning_hetero.stale.flags import PushFlag, Word
from lightning_hetero.stale.worker import Worker
from lightning_hetero.transport.base import Reply, Say
from lightning_hetero.types import Event

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_hetero.stale.strategy import BoundedStalenessStrategy

__all__ = ["TickLoop"]


class TickLoop:
    """Claims, trains and pushes; one per fit and rank.

    Args:
        trainer: the running trainer.
        strategy: runs closures through its precision plugin and moves batches.
        worker: this rank's end of the parameter server.
        sampler, source: order and samples of the train loader.
        before_epoch: returns the worker to use; a new one if the server had to be started again.
        resume: where a checkpoint stopped inside an epoch: ``{"epoch", "tick", "spans"}``; else empty.
        weight: what a batch counts in the mean over the update; default its samples.
        sums: losses are sums over their batch: gradients are added, whatever the batches count.
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: BoundedStalenessStrategy,
        worker: Worker,
        sampler: TickSampler,
        source: SampleSource,
        *,
        before_epoch: Callable[[], Worker],
        resume: Mapping[str, Any],
        weight: Callable[[Any], float] | None,
        sums: bool = False,
    ) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._worker = worker
        self._sampler = sampler
        self._source = source
        self._before_epoch = before_epoch
        self._resume = resume
        self._weight_of = weight
        self._sums = sums
        self._automatic = trainer.lightning_module.automatic_optimization
        self._scale = AgreedScale(getattr(trainer.precision_plugin, "scaler", None))
        self._words: deque[int] = deque()  # ticks the server has passed and Lightning has not
        self._tick = 0
        self._seen_tick = -1  # the server's last tick whose hinted samples were taken in
        self._grant: Reply | None = None
        self._pieces: list[list[tuple[int, int]]] = [[]]  # of the grant: one, or its micro-batches
        self._piece: list[tuple[int, int]] = []  # the one that is computed
        self._done = 0  # samples of the grant that were computed
        self._fill_in_now = False
        self._substep = 0
        self._weight = 1.0
        self._zeroes = 0
        self._stepped = False
        self._started_s = 0.0
        self._wait_s = 0.0
        self._opened_s = time.perf_counter()
        self._events: deque[Event] = deque(maxlen=4096)
        self.epoch = -1
        self.in_step = False

    def bind(self, sampler: TickSampler, source: SampleSource) -> None:
        """Takes another train loader, from the next epoch on."""
        self._sampler, self._source = sampler, source

    # ---- one tick ---------------------------------------------------------------------------------------------

    def ticks(self) -> Iterator[Any]:
        """Yields the batches of the epoch from where Lightning's counters stand; None for a tick that went by."""
        self._begin()
        while True:
            yield self._next()

    def _begin(self) -> None:
        trainer, sampler = self._trainer, self._sampler
        self._worker = self._before_epoch()
        self.epoch = sampler.epoch
        self._tick = compat.upcoming_batch(trainer)
        self._words.clear()
        ends = list(sampler.ends[: self._last_tick(len(sampler.ends))])
        text = ""
        if self._tick:
            here = self._resume.get("epoch") == self.epoch and self._resume.get("tick") == self._tick
            spans = self._resume["spans"] if here else [[0, ends[self._tick - 1]]]
            spans = _leaving(len(ends) - self._tick, spans, ends[-1])
            text = json.dumps({"tick": self._tick, "applied": spans})
        reply = self._worker.begin_epoch(self.epoch, ends, tick=self._tick, text=text)
        self._seen_tick = reply.tick - 1
        self._source.begin(sampler.indices, _pairs(reply.numbers))

    def _last_tick(self, ticks: int) -> int:
        """Number of the epoch's ticks that Lightning will train; samples beyond are nobody's."""
        trainer = self._trainer
        limit = trainer.num_training_batches
        ticks = ticks if limit == float("inf") else min(ticks, int(limit))
        steps = compat.step_limit(trainer)
        if steps is not None and self._automatic:
            every = trainer.accumulate_grad_batches
            ticks = min(ticks, self._tick - self._tick % every + steps * every)
        return max(ticks, self._tick + 1)

    def _next(self) -> Any:
        self._tick = compat.upcoming_batch(self._trainer)
        self._fill_in_now = False
        if not self._words:
            asked_s = time.perf_counter()
            reply = self._worker.claim(self.epoch, self._tick)
            self._wait_s = time.perf_counter() - asked_s
            if reply.kind is Say.GRANT:
                return self._open(reply)
            self._words.extend(reply.numbers)
        return self._passed_by()

    def _passed_by(self) -> Any:
        """This tick was made without this rank."""
        word = self._words.popleft()
        if not self._words:
            self._worker.pull()
        self._note("passed", {"behind": len(self._words)})
        if not self._automatic:  # user code must run: it steps its own optimizers and schedulers
            self._grant = None
            self.in_step = True
            return self._source.dummy()
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
                LearningRateMonitor.on_train_batch_start(callback, trainer, trainer.lightning_module, None, self._tick)

    def _open(self, reply: Reply) -> Any:
        """Takes a grant: parameters, then samples; returns the (first micro-)batch on the host."""
        self._grant = reply
        self._worker.pull()
        spans = _pairs(reply.numbers)
        gone_by = max(0, reply.tick - self._seen_tick)
        for missed in reversed(range(gone_by)):  # one hint per tick; for those this rank missed it is too late
            self._source.hint((0, 0) if missed else (reply.hint_start, reply.hint_end))
        self._seen_tick += gone_by
        self._started_s = time.perf_counter()
        self._substep, self.in_step = 0, True
        self._pieces = _micro_batches(spans, reply.micro)
        self._piece = self._pieces[0]
        self._done = _size(self._piece)
        if not spans:
            return self._source.dummy(ticks=gone_by)
        return self._source.batch(self._pieces[0], ticks=gone_by)

    @property
    def samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0: a dummy that counts nothing."""
        if not self.in_step:
            return None
        return 0 if self._grant is None else sum(end - start for start, end in _pairs(self._grant.numbers))

    @property
    def dummy(self) -> bool:
        return self.in_step and not self.samples

    def opened(self, batch: Any) -> None:
        """The batch is on the device."""
        self._weight = self._weigh(batch)

    def _weigh(self, batch: Any) -> float:
        samples = min(self.samples or 0, _size(self._piece))
        if self._sums:
            return 1.0
        if self._weight_of is None or not samples:
            return float(samples)
        weight = float(self._weight_of(batch))
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"batch_weight returned {weight!r}; it must be a finite number >= 0, e.g. a token count")
        return weight

    # ---- optimizer steps --------------------------------------------------------------------------------------

    def zeroed(self, index: int) -> None:
        """The user's code, or Lightning, zeroed the gradients of an optimizer."""
        self._zeroes |= 1 << index

    def stepped(self) -> None:
        """The precision plugin reached the optimizer's step: no overflow."""
        self._stepped = True

    def step(self, index: int, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[..., Any]) -> Any:
        """Runs what Lightning would do for an optimizer step, up to the gradients, and pushes them.

        Args:
            index: number of the optimizer.
            optimizer: its own ``step`` is out of action.
            closure: training step and backward; in manual optimization usually nothing.
            run: the precision plugin's ``optimizer_step(optimizer, closure=...)``.
        """
        output = self._run_step(index, optimizer, closure, run)
        if self.dummy:
            self._drop_gradients()
            if self._automatic:
                self._until_passed(self._claim_again(), index, optimizer, run)
            return output
        if self._automatic:
            self._more_micro_batches(optimizer)
        reply = self._push(steps=1 << index, final=self._automatic)
        if self._automatic:
            self._until_passed(reply, index, optimizer, run)
        else:
            self._worker.pull()
        return output

    def _run_step(self, index: int, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[..., Any]) -> Any:
        self._stepped = False
        # In manual optimization the whole training step is guarded.
        with compat.collect_clipping(self._trainer, self._clip) if self._automatic else nullcontext():
            output = run(optimizer, closure=closure)
        self._scale.restore()
        return output

    def _clip(self, value: float, kind: str, optimizer: Any) -> None:
        """The server clips the gradient of the whole batch at the optimizer's next step."""
        for index, own in enumerate(self._strategy.optimizers):
            if own is optimizer:
                self._worker.clip(index, value, kind)

    def accumulated(self, index: int, optimizer: Optimizer, run: Callable[..., Any]) -> None:
        """A batch that only accumulates is done (automatic optimization)."""
        self._stepped = True
        if self.dummy:
            self._drop_gradients()
            reply = self._claim_again()
        else:
            self._stepped = self._scale.unscale(self._worker.gradients())
            self._more_micro_batches(optimizer)
            reply = self._push(steps=0, final=True)
        self._until_passed(reply, index, optimizer, run)

    def training_step_done(self, again: Callable[[Any], Any]) -> None:
        """Manual optimization: the user's ``training_step`` returned; ``again(batch)`` runs it once more."""
        self._stepped = True
        if self.dummy:  # the others' pushes say what is zeroed
            self._zeroes = 0
        if self._grant is None:  # a tick that went by
            self._drop_gradients()
            self.in_step = False
            return
        reply = self._claim_again() if self.dummy else self._push(steps=0, final=True)
        while reply.kind is Say.GRANT:
            uncounted = compat.steps_uncounted(self._trainer)
            with self._fill_in(reply) as batch, self._frozen_schedulers(), uncounted:
                again(batch)
            self._stepped = True
            reply = self._claim_again() if self.dummy else self._push(steps=0, final=True)
        self._tick_over(reply)

    def _until_passed(self, reply: Reply, index: int, optimizer: Optimizer, run: Callable[..., Any]) -> None:
        """Trains fill-ins until the tick is over."""
        while reply.kind is Say.GRANT:
            accumulates = compat.accumulates_now(self._trainer)
            with self._fill_in(reply) as batch:
                closure = compat.run_again(self._trainer, batch, self._tick, optimizer)
                if accumulates:
                    closure()
                    self._stepped = self._scale.unscale(self._worker.gradients())
                else:
                    self._run_step(index, optimizer, closure, run)
                if not self.dummy:
                    self._more_micro_batches(optimizer)
            if self.dummy:
                self._drop_gradients()
                reply = self._claim_again()
            else:
                reply = self._push(steps=0 if accumulates else 1 << index, final=True)
        self._tick_over(reply)

    def _tick_over(self, reply: Reply) -> None:
        self._words.extend(reply.numbers)
        word = self._words.popleft()
        if self._automatic and Word.steps(word):
            self._scale.after_step(overflow=Word.overflowed(word))
        if not self._words:
            self._worker.pull()
        self.in_step = False

    def _claim_again(self) -> Reply:
        return self._worker.claim(self.epoch, self._tick)

    @contextmanager
    def _fill_in(self, reply: Reply) -> Iterator[Any]:
        """Another batch within the same step of Lightning's loop."""
        trainer = self._trainer
        batch = self._to_device(self._open(reply))
        self._fill_in_now = True
        with compat.as_batch(trainer, batch):
            for callback in compat.trainer_callbacks(trainer):
                hook = getattr(callback, "on_extra_batch_start", None)
                if callable(hook):
                    hook(trainer, trainer.lightning_module, batch, self._tick)
            yield batch

    def _to_device(self, batch: Any) -> Any:
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    def _more_micro_batches(self, optimizer: Optimizer) -> None:
        """Computes the rest of a grant in micro-batches, and returns early once it is asked to (SaPS)."""
        for piece in self._pieces[1:]:
            assert self._grant is not None
            if self._worker.wants_return(self._grant):
                break
            done = self._weight
            self._piece = piece
            batch = self._to_device(self._source.batch(piece, ticks=0))  # weighs it
            before = self._worker.gradients()
            self._drop_gradients()
            with compat.as_batch(self._trainer, batch):
                compat.run_again(self._trainer, batch, self._tick, optimizer, zero=False)()
            self._stepped &= self._scale.unscale(self._worker.gradients())
            total = 1.0 if self._sums else done + self._weight
            new_part, old_part = (1.0, 1.0) if self._sums else (self._weight / total, done / total) if total else (0, 0)
            for parameter, old in zip(self._worker.parameters, before, strict=True):
                new = parameter.grad  # a part that counts nothing may be NaN
                parts = [g * part for g, part in ((old, old_part), (new, new_part)) if g is not None and part]
                present = old is not None or new is not None
                parameter.grad = sum(parts[1:], parts[0]) if parts else torch.zeros_like(parameter) if present else None
            self._weight = total
            self._done += _size(piece)

    # ---- pushing ----------------------------------------------------------------------------------------------

    def _push(self, *, steps: int, final: bool) -> Reply:
        grant, zeroes = self._grant, self._zeroes
        assert grant is not None
        samples = self._done
        flags = (PushFlag.FINAL if final else PushFlag(0)) | (PushFlag(0) if self._stepped else PushFlag.OVERFLOW)
        if self._automatic:  # whatever the user's hooks did to zero them
            zeroes = int(self._tick % self._trainer.accumulate_grad_batches == 0)
        pushed_s = time.perf_counter()
        compute_s = pushed_s - self._started_s
        reply = self._worker.push(
            epoch=self.epoch,
            tick=self._tick,
            substep=self._substep,
            lease=grant.lease,
            samples=samples,
            weight=self._weight,
            compute_s=compute_s,
            flags=flags,
            steps=steps,
            zeroes=zeroes,
        )
        self._zeroes = 0
        self._substep += 1
        wait_s = time.perf_counter() - pushed_s
        data = {
            "samples": samples,
            "compute_s": compute_s,
            "wait_s": wait_s + self._wait_s,
            "version": grant.version,
            "fill_in": self._fill_in_now,
        }
        self._wait_s = 0.0
        if final:
            self._note("step", data)
        if reply.text:
            self._strategy.warn_once(reply.text)
        return reply

    def _drop_gradients(self) -> None:
        for parameter in self._worker.parameters:
            parameter.grad = None

    @contextmanager
    def _frozen_schedulers(self) -> Iterator[None]:
        """A user's ``scheduler.step()`` must count once per batch, however many fill-ins it had."""
        schedulers = [config.scheduler for config in self._strategy.lr_scheduler_configs]
        for scheduler in schedulers:
            scheduler.step = lambda *_, **__: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            for scheduler in schedulers:
                vars(scheduler).pop("step", None)

    # ---- what others ask --------------------------------------------------------------------------------------

    def guard(self) -> AbstractContextManager[Any]:
        """Around a training step: its user clips what the server has; a dummy batch counts nothing in metrics."""
        stack = ExitStack()
        if not self._automatic:
            stack.enter_context(compat.collect_clipping(self._trainer, self._clip))
        if self.dummy:
            stack.enter_context(compat.metrics_frozen(self._trainer.lightning_module))
            stack.enter_context(compat.dummy_batch_unlogged(self._trainer))
        return stack

    def _note(self, kind: str, data: dict[str, Any]) -> None:
        t_s = time.perf_counter() - self._opened_s
        rank = self._strategy.global_rank
        self._events.append(Event(kind=kind, rank=rank, epoch=self.epoch, step=self._tick, t_s=t_s, data=data))

    def take_events(self) -> list[Event]:
        """Returns and forgets the noted events."""
        events = list(self._events)
        self._events.clear()
        return events


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _leaving(ticks: int, spans: Sequence[Sequence[int]], total: int) -> list[list[int]]:
    """Returns spans that leave a sample for each of the ticks to come: the last ones are trained again if need be.

    Only a checkpoint made while a rank failed can be without: the other ranks had gone on.
    """
    left = [[start, min(end, total)] for start, end in spans if start < total]
    short = ticks - (total - _size([(start, end) for start, end in left]))
    while short > 0:
        start, end = left.pop()
        if end - start > short:
            left.append([start, end - short])
        short -= end - start
    return left


def _size(spans: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def _micro_batches(spans: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    """Cuts spans into pieces of ``size`` samples; one piece if ``size`` is 0."""
    if size <= 0 or _size(spans) <= size:
        return [spans]
    pieces: list[list[tuple[int, int]]] = [[]]
    room = size
    for start, end in spans:
        while start < end:
            if room == 0:
                pieces.append([])
                room = size
            taken = min(room, end - start)
            pieces[-1].append((start, start + taken))
            start, room = start + taken, room - taken
    return pieces
