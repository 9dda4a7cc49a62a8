"""What a rank does within a global step, in Lightning's own training loop: optimizer steps become pushes (layer L).

     assigned --> closure (training_step, backward) -- push --> assigned again: a top-up chunk, trained within the same
                                                       |       batch of Lightning's
                                                       '-----> passed: the global step is over, the batch ends
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.checked import real
from lightning_hetero.data.assigned import SampleSource
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.stale.fit.global_steps import GlobalSteps
from lightning_hetero.stale.fit.gradient_hooks import GradientEdits
from lightning_hetero.stale.fit.own_samples import OwnSamples
from lightning_hetero.stale.fit.refusals import SEES_NOT_ALL, no_monitored_steps
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.work.chunk import Chunk, combine_means_
from lightning_hetero.transport.alone import run_alone
from lightning_hetero.transport.base import Ask, Reply, Request, Say
from lightning_hetero.transport.flags import PushFlag

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_NO_MEETING = (
    "inside training_step, or a hook of the step: ranks train different numbers of batches here, so they do not meet"
    " within one. Move it to on_train_epoch_end or validation, or use strategy='hetero_balanced'"
)


class StepLoop(GlobalSteps):
    """Trains what is assigned and pushes it; one per fit and rank.

    Args:
        trainer, session, source, of_steps: see `GlobalSteps`.
        weight: what a batch counts in the mean over the update; default its samples.
        sums: losses are sums over their batch: gradients are added, whatever the batches count.

    Attributes:
        running_step: the precision plugin is on its way to an optimizer's step.
    """

    def __init__(
        self, trainer: Trainer, session: Session, source: SampleSource | OwnSamples, *,
        weight: Callable[[Any], float] | None, sums: bool, **of_steps: Any,
    ) -> None:  # fmt: skip
        super().__init__(trainer, session, source, **of_steps)
        self._weight_of = weight
        self._sums = sums
        self._zeroes = 0  # bit i: optimizer i since the last push
        self._stepped = False  # no overflow since the last push
        self._made_gradients = False  # in this epoch, in manual optimization
        self._most_steps: int | None = None  # of a batch in manual optimization, so far
        module = trainer.lightning_module
        by_hand = not self._automatic or is_overridden("optimizer_step", module)
        self._edits = GradientEdits(module, looks=by_hand)
        self.running_step = False

    # ---- the batch --------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether this rank is training on a batch."""
        return self.at.work is not None

    @property
    def samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0: a dummy that counts nothing."""
        work = self.at.work
        return None if work is None else work.samples

    @property
    def computed(self) -> int | None:
        """Samples of the micro-batch that it computes."""
        work = self.at.work
        return None if work is None else work.piece_samples

    @property
    def dummy(self) -> bool:
        return self.samples == 0

    @property
    def _work(self) -> Chunk:
        work = self.at.work
        assert work is not None, "outside of a step"
        return work

    def leave_step(self, *, failed: bool = False) -> None:
        """The loop has left the batch before its end: an exception, or a hook that skips the rest of the epoch."""
        self.at.work = None
        if failed:
            self.worker.weights.stop()

    def end_epoch(self) -> None:
        """The epoch is over.

        Raises:
            RuntimeError: manual optimization has made gradients, and no rank a step that the server knows of.
        """
        self.leave_step()
        made, self._made_gradients = self._made_gradients, False
        if made and not self.at.optimizer_steps:
            raise RuntimeError(
                "training_step has made gradients for a whole epoch, and no optimizer of configure_optimizers has made"
                " a step(): in hetero_stale nothing was trained. Call step() of what self.optimizers() returns, or use"
                " strategy='hetero_balanced'"
            )

    def opened(self, batch: Any) -> None:
        """The batch is on the device."""
        work = self._work
        work.weight = 1.0 if self._sums else float(work.piece_samples)
        if not self._sums and self._weight_of is not None and work.piece_samples:
            work.weight = real("batch_weight(batch)", self._weight_of(batch))

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
        if not self.in_step:
            raise RuntimeError(
                "an optimizer steps outside of a training batch, or a second time in one: here a step is the push of a"
                " batch's gradients to the parameter server. Step in training_step, or use strategy='hetero_balanced'"
            )
        self._edits.check()
        output = self._run_step(index, optimizer, closure, run)
        if self._automatic:
            self._end_batch(1 << index, optimizer, partial(self._run_again, index, optimizer, run))
        elif self.dummy:
            self._drop_gradients()
        else:
            self._push(steps=1 << index, final=False)
            self.worker.pull()
        return output

    def backward_done(self) -> None:
        """A backward pass has ended: what becomes of the gradients until the step is looked at."""
        if self.in_step and not self.dummy:
            self._edits.leave()

    def _run_step(self, index: int, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[..., Any]) -> Any:
        self._stepped, self.running_step = False, True
        try:
            # In manual optimization the whole training step is guarded.
            clips = compat.collect_clipping(self._trainer, self._clip) if self._automatic else nullcontext()
            with clips, run_alone(_NO_MEETING):
                output = run(optimizer, closure=closure)
        finally:
            self.running_step = False
        self.scale.restore()
        return output

    def _clip(self, value: float, kind: str, optimizer: Any) -> None:
        """The server clips the gradient of the whole batch at the optimizer's next step."""
        for index, own in enumerate(self._trainer.optimizers):
            if own is optimizer:
                self.worker.clip(index, value, kind)

    def accumulated(self, optimizer: Optimizer) -> None:
        """A batch without a step is done: it only accumulates, or the user's `optimizer_step` left the step out."""
        self._unscale()
        self._end_batch(0, optimizer, partial(self._run_again, 0, optimizer, None))

    def _run_again(self, index: int, optimizer: Optimizer, run: Callable[..., Any] | None, batch: Any) -> Any:
        """Trains a top-up chunk as Lightning would train a batch, in automatic optimization; returns its outputs.

        Without ``run`` it only accumulates.
        """
        closure = compat.run_again(self._trainer, batch, self.at.global_step, optimizer)
        if run is None:
            closure()
            self._unscale()
        else:
            self._run_step(index, optimizer, closure, run)
        return compat.outputs_of(closure)

    def _unscale(self) -> None:
        """Divides gradients, of which no step has seen to it, by the loss scale; notes an overflow."""
        self._stepped = self.dummy or self.scale.unscale(self.worker.gradients())

    def training_step_done(self, again: Callable[[Any], Any]) -> None:
        """Manual optimization: the user's ``training_step`` returned; ``again(batch)`` runs it once more, and returns
        what hooks see of it."""
        self._edits.check()
        if self.dummy:  # the others' pushes say what is zeroed
            self._zeroes = 0
        elif not self._made_gradients:
            self._made_gradients = any(gradient is not None for gradient in self.worker.gradients())
        if self._work.grant is None:  # a global step that went by
            self._drop_gradients()
            self.at.work = None
            return

        def train(batch: Any) -> Any:
            with self._frozen_schedulers(), compat.steps_uncounted(self._trainer):
                return again(batch)

        self._end_batch(0, None, train)

    def _end_batch(self, steps: int, optimizer: Optimizer | None, train: Callable[[Any], Any]) -> None:
        """Ends the batch that was trained, and trains top-up chunks until the global step is over.

        Args:
            steps: bit i: optimizer i steps with this batch's last push.
            optimizer: with which the rest of an assignment is computed in micro-batches; None in manual optimization.
            train: trains a top-up chunk, and returns its outputs.
        """
        self._more_micro_batches(optimizer)
        while (reply := self._push_or_claim(steps)).kind is Say.ASSIGNED:
            with self._top_up(reply) as batch:
                self.parts.ended(train(batch), batch, self._work.piece_samples)
                self._more_micro_batches(optimizer)
        self.over(reply)

    def _push_or_claim(self, steps: int) -> Reply:
        if self.dummy:
            self._drop_gradients()
            return self.claim()
        self._stepped = self._stepped or not self._automatic
        return self._push(steps=steps, final=True)

    @contextmanager
    def _top_up(self, reply: Reply) -> Iterator[Any]:
        """Another batch within the same step of Lightning's loop."""
        trainer = self._trainer
        batch = compat.batch_to_device(trainer, self.open(reply, wait_s=self._work.wait_s, top_up=True))
        with compat.as_batch(trainer, batch, self._work.piece_samples):
            for callback in compat.trainer_callbacks(trainer):
                hook = getattr(callback, "on_extra_batch_start", None)
                if callable(hook):
                    hook(trainer, trainer.lightning_module, batch, self.at.global_step)
            before = self.session.others_now()
            yield batch
            if self.session.others_now() != before:
                raise RuntimeError(
                    f"a parameter that no optimizer has was changed in a top-up chunk of batch {self.at.global_step},"
                    f" on rank {trainer.global_rank}, once more than on others. {SEES_NOT_ALL}"
                )

    def _more_micro_batches(self, optimizer: Optimizer | None) -> None:
        """Computes the rest of an assignment in micro-batches, and returns early once it is asked to (SaPS)."""
        work, worker = self._work, self.worker
        if optimizer is None or work.grant is None:
            return
        for piece in work.pieces[1:]:
            if worker.wants_return(work.grant):
                break
            done = work.weight
            work.piece = piece
            batch = compat.batch_to_device(self._trainer, self.source.batch(piece, due=0))  # weighs it
            before = worker.gradients()
            self._drop_gradients()
            with compat.as_batch(self._trainer, batch, work.piece_samples):
                closure = compat.run_again(self._trainer, batch, self.at.global_step, optimizer, zero=False)
                closure()
            self.parts.ended(compat.outputs_of(closure), batch, work.piece_samples)
            self._stepped &= self.scale.unscale(worker.gradients())
            if self._sums:
                combine_means_(worker.parameters, before, 1.0, 1.0)
            else:
                new, work.weight = work.weight, done + work.weight
                total = work.weight or math.inf
                combine_means_(worker.parameters, before, done / total, new / total)
            work.computed += work.piece_samples

    # ---- pushing ----------------------------------------------------------------------------------------------

    def _push(self, *, steps: int, final: bool) -> Reply:
        work, at, zeroes = self._work, self.at, self._zeroes
        assert work.grant is not None and work.started is not None
        self._edits.forget()
        flags = (PushFlag.FINAL if final else PushFlag(0)) | (PushFlag(0) if self._stepped else PushFlag.OVERFLOW)
        if not final and (self._most_steps is None or work.substep + 1 < self._most_steps):
            flags |= PushFlag.MORE
        if self._automatic:  # whatever the user's hooks did to zero them
            zeroes = int(at.global_step % self._trainer.accumulate_grad_batches == 0)
        computed, started, end = [0.0, 0.0], work.started, self.device.stamp(timing=True)

        def compute_s() -> float:
            end.wait()  # for nothing, if something was pushed that had to be waited for
            computed[:] = started.seconds_until(end), time.perf_counter()
            return computed[0]

        request = Request(
            kind=Ask.PUSH, epoch=at.epoch, global_step=at.global_step, substep=work.substep,
            assignment=work.grant.assignment,
            samples=work.computed, weight=work.weight, flags=flags, steps=steps, zeroes=zeroes,
            numbers=self.source.told,
        )  # fmt: skip
        reply = self._learn_end(self.worker.push(request, compute_s))
        self._zeroes = 0
        if final:
            self.parts.pushed(wasted=reply.wasted)
            self.source.settle(wasted=reply.wasted)
            self._most_steps = max(work.substep, self._most_steps or 0)
        work.substep += 1
        data = {
            "samples": work.computed,
            "compute_s": computed[0],
            "wait_s": time.perf_counter() - computed[1] + work.wait_s,
            "version": work.grant.version,
            "fill_in": work.top_up,
        }
        work.wait_s = 0.0
        if final:
            self.note("step", data)
        return reply

    def _drop_gradients(self) -> None:
        for parameter in self.worker.parameters:
            parameter.grad = None

    @contextmanager
    def _frozen_schedulers(self) -> Iterator[None]:
        """A user's ``scheduler.step()`` must count once per batch, however many top-up chunks it had."""
        with ExitStack() as frozen:
            for config in self._trainer.lr_scheduler_configs:
                frozen.enter_context(patched(config.scheduler, "step", lambda *_, **__: None))
            yield

    # ---- what others ask --------------------------------------------------------------------------------------

    def guard(self) -> AbstractContextManager[Any]:
        """Around a training step: its user clips what the server has; a dummy batch counts nothing in metrics."""
        stack = self.parts.step()
        stack.enter_context(run_alone(_NO_MEETING))
        if not self._automatic:
            stack.enter_context(compat.collect_clipping(self._trainer, self._clip))
            stack.enter_context(no_monitored_steps(self._trainer.lr_scheduler_configs))
        if self.dummy:
            stack.enter_context(compat.metrics_frozen(self._trainer.lightning_module))
            stack.enter_context(compat.dummy_batch_unlogged(self._trainer))
        return stack
