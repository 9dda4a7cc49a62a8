"""`Recovery` of a sharded model, where every layer's forward and backward pass is a meeting of all ranks (layer L).

    a pass      forward and backward of a batch or a piece; all ranks make the same number of them
    no memory   this rank goes on taking part in the pass with a few samples that count nothing, see `FSDPPasses`
    after it    all ranks say whether they have more to compute; who has not takes part with samples that count nothing

So what the peers have computed stays, and nothing is computed twice but by the rank that ran out of memory. Two small
gatherings on the side channel in a step without failures: behind ``training_step``, and during the last scatter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.piece_runner import GuardedStep, PieceLogs, ToDo, give_up
from lightning_hetero.balanced.fit.recovery import Done, Recovery, alone, done_of, loss_of
from lightning_hetero.balanced.runtime.fsdp_passes import FSDPPasses, in_reduction
from lightning_hetero.balanced.runtime.pieces import free_memory, least_samples
from lightning_hetero.lightning_compat.patches import replace_methods
from lightning_hetero.measure.device import is_out_of_memory
from lightning_hetero.measure.step_clock import when_backward_ends
from lightning_hetero.transport.side_channel import SideChannel

_Made = tuple[Any, int | None]
"""Output of a forward pass, and the collectives after which memory ran out, if it did: the output counts nothing."""


class ShardedRecovery(Recovery):
    """Runs this rank's steps of a sharded model.

    Args:
        passes: of the module.
        channel: over all ranks.
        paused: around what is no work of this rank's.
        *args, **kwargs: see `Recovery`.
    """

    def __init__(
        self, *args: Any, passes: FSDPPasses, channel: SideChannel, paused: Callable[[], AbstractContextManager[None]],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self.weighed = False
        self._passes, self._channel, self._paused = passes, channel, paused
        self._again = ExitStack()  # while this rank takes part in a pass without computing its part
        self._short = True  # a rank may know of samples that do not fit

    def close(self) -> None:
        super().close()
        self._again.close()

    def _any(self, *flags: bool) -> list[bool]:
        """Returns which flags some rank has set; a collective."""
        return self._heard(self._say(*flags))

    def _say(self, *flags: bool) -> Callable[[], list[list[float]]]:
        """Starts `_any`, of which `_heard` is the end."""
        self._passes.agree(-1)
        return self._channel.all_gather_row([float(flag) for flag in flags])

    def _heard(self, rows: Callable[[], list[list[float]]]) -> list[bool]:
        with self._paused():
            return [any(column) for column in zip(*rows(), strict=True)]

    # ---- forward ----------------------------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        step, pieces = self._step, self._pieces
        step.args, step.kwargs, self.weighed = args, kwargs, False
        samples, most = self._begin(step)
        divided, logs = bool(step.planned), PieceLogs(self._trainer, self._constant)
        if self._short:
            more, self._short = self._any(most < samples, self.cap.failed is not None)
            divided, step.cut_again = divided or more, step.cut_again or more
        if divided:
            return self._in_passes(step, most, logs)
        put_back = pieces.save() if self.cap.untried(samples) else None
        self._memory.begin(samples)
        made = self._forward(step, args[0], None, logs)
        failed, talked = self._any(made[1] is not None, pieces.exchanged > 0)
        if not failed:
            logs.keep()
            logs.publish()
            return self._computed(step, made[0])
        if talked and made[1] is not None:
            give_up(step.reason, "training_step communicates with the other ranks")
        step.cut_again = True
        return self._in_passes(step, self._count(step), logs, made, put_back)

    def _forward(
        self, step: GuardedStep, piece: Any, size: int | None, logs: PieceLogs | None, void: float = 0.0
    ) -> _Made:
        """Runs a forward pass to its end, on so many samples; None: on the whole batch."""
        self._passes.begin(void=void)
        try:
            with nullcontext() if logs is None else logs.collecting(piece, size):
                return step.run(piece), None
        except RuntimeError as error:
            self._check(step, error, size)
        # Out of the handler, so that the error's frames are gone and with them what they hold.
        return self._drained(step, piece, size)

    def _check(self, step: GuardedStep, error: BaseException, size: int | None) -> None:
        """Raises the error, with the reason, if the pass cannot be finished without this rank's part."""
        if not is_out_of_memory(error):
            raise error
        self._pieces.check(step, error, self._count(step) if size is None else size)
        why, trained = self._passes.why_not(), self._trained()
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
            why = "a hook on a parameter takes the gradient of each pass for the whole one"
        elif in_reduction(error):
            why = "it ran out while reduced gradients were handed over"
        if why:
            give_up(step.reason, why, error)

    def _trained(self) -> list[Tensor]:
        """Returns the parameters as they are sharded; between forward and backward the module has others."""
        groups = (group for optimizer in self._trainer.optimizers for group in optimizer.param_groups)
        return [p for group in groups for p in group["params"]]

    def _drained(self, step: GuardedStep, piece: Any, size: int | None) -> _Made:
        """Returns an output for the rest of a pass that memory was too short for, on as few samples as there can be."""
        done = self._passes.done
        self._passes.reset()
        free_memory(self._pieces.device)
        few = self._few(step, piece, size)
        self._again.callback(self._pieces.save())
        self._again.enter_context(self._passes.again(done))
        with self._last_try(step), compat.unlogged(self._module), self._trainer.precision_plugin.train_step_context():
            return step.run(few), done

    @contextmanager
    def _last_try(self, step: GuardedStep) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            short = "not even as few samples fit as there can be"
            give_up(step.reason, short if is_out_of_memory(error) else f"{type(error).__name__}: {error}", error)

    def _few(self, step: GuardedStep, piece: Any, size: int | None) -> Any:
        """Returns as few of so many samples as there can be."""
        samples, least = self._count(step) if size is None else size, least_samples(self._module)
        return self._pieces.split(step, piece, [least, samples - least])[0] if samples >= 2 * least else piece

    def _in_passes(
        self, step: GuardedStep, most: int, logs: PieceLogs, made: _Made | None = None,
        put_back: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        """Returns the whole batch's output, with a loss that stands in for its own; all passes are over.

        Args:
            step: the step.
            most: samples of a piece; fewer where these do not fit.
            logs: takes what the pieces log.
            made: by the forward pass of the whole batch; None: there was none.
            put_back: undoes what it has changed.
        """
        self.weighed = True
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        kept = [(p, p.grad) for p in self._trained()]
        for p, _ in kept:
            p.grad = None
        todo: deque[ToDo] | None = None if made is None else deque([(step.args[0], self._count(step), 0.0, put_back)])
        with self._paused():  # it may wait for the peers' token counts
            factor = self._weight.factor() * scale
        done = self._compute(step, most, todo, factor, logs, made)
        found = [(p, p.grad) for p, _ in kept if p.grad is not None]
        for p, gradient in kept:
            p.grad = gradient

        def stand(value: Tensor) -> Tensor:
            loss = value.detach().requires_grad_()
            loss.register_hook(partial(_hand_over, found, scale))
            return loss

        return self._joined(step, logs, done, stand)

    # ---- passes -----------------------------------------------------------------------------------------------

    def _compute(
        self, step: GuardedStep, most: int, todo: deque[ToDo] | None, factor: float = 1.0,
        logs: PieceLogs | None = None, made: _Made | None = None,
    ) -> list[Done]:  # fmt: skip
        """Makes passes until no rank has anything left to compute; returns what is kept of this rank's pieces.

        Args:
            step, most: see `_in_passes`.
            todo: see `PieceRunner.run`.
            factor: of this rank's losses, where the gradient of the step's last loss is not known.
            logs: takes what pieces log; None: it goes nowhere.
            made: by the forward pass of the first piece.
        """
        total, done, pending = self._count(step), list[Done](), [made] if made else []

        def run(piece: Any, size: int, void: float) -> float | None:
            weight = self._weight.of_piece(piece, size, total)
            void = void if factor * weight else math.inf
            output, failed = pending.pop() if pending else self._forward(step, piece, size, logs, void)
            self._passes.void = max(void, self._passes.void)
            found, loss = done_of(output, weight, size), loss_of(output)
            del output

            def differentiate(loss: Tensor) -> None:
                head = torch.ones_like(loss) * factor if step.loss_gradient is None else step.loss_gradient
                loss.backward(head.to(loss.dtype) * (weight or 1.0))

            failed = self._differentiate(step, piece, size, loss, differentiate, failed)
            if failed is None and logs is not None:
                done.append(found)
                logs.keep()
            return failed

        def idle() -> None:
            few, put_back = self._few(step, step.args[0], total), self._pieces.save()
            with compat.unlogged(self._module):
                output, _ = self._forward(step, few, 1, None, math.inf)
                self._differentiate(step, few, 1, loss_of(output), Tensor.backward)
            put_back()

        def more(left: int) -> bool:
            anything, step.cut_again = self._any(left > 0, step.cut_again)
            self._short |= step.cut_again
            return anything

        self._pieces.run(step, most, run, todo=todo, more=more, idle=idle)
        return done

    def _differentiate(
        self, step: GuardedStep, piece: Any, size: int | None, loss: Tensor | None, run: Callable[[Tensor], None],
        failed: int | None = None, holders: Sequence[Tensor] = (), drained: Callable[[Tensor], object] = id,
    ) -> int | None:  # fmt: skip
        """Runs the backward pass of a pass, to its end, whatever happens; returns when memory ran out, see `_Made`.

        Args:
            step: the step.
            piece: that the pass computes; or the whole batch.
            size: its samples; None: they may not have been counted.
            loss: to be differentiated.
            run: differentiates it.
            failed: see `_Made`; of the forward pass.
            holders: tensors besides ``loss`` that hold the graph.
            drained: given the loss that stands for this one, before its backward pass.
        """
        if loss is not None:
            try:
                run(loss)
            except RuntimeError as error:
                if failed is not None:
                    raise
                self._check(step, error, size)
                failed = self._passes.done
            else:
                loss = None
        if loss is not None:  # out of the handler, see above
            for tensor in (loss, *holders):
                tensor.detach_()
            self._again.callback(replace_methods(self._trainer.strategy, **alone(self._trainer)))
            output, failed = self._drained(step, piece, size)
            loss = loss_of(output)
            assert loss is not None
            self._believed = False
            drained(loss)
            with self._last_try(step):
                run(loss)
        self._passes.end()
        self._again.close()
        return failed

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, run: Callable[[Tensor], None], *, holders: Sequence[Tensor],
        ended: Callable[[Tensor], None],
    ) -> None:  # fmt: skip
        step = self._step
        if not step.whole:
            run(loss)
            return
        counts = not self._passes.void
        self._pieces.exchanged = 0  # the collectives of forward are over
        said = list[Callable[[], list[list[float]]]]()

        def say(failed: bool) -> None:
            if not said:
                said.append(self._say(failed))

        def drained(loss: Tensor) -> None:
            if said:
                give_up(step.reason, "it ran out when the backward pass was over")
            ended(loss)  # in the peers' order: the ranks exchange their records there
            when_backward_ends(loss, partial(say, True))

        if loss.requires_grad:
            when_backward_ends(loss, partial(say, False))
        done = self._differentiate(step, step.args[0], None, loss, run, holders=holders, drained=drained)
        say(done is not None)  # where a backward pass of the user's does not begin at the loss
        if not self._heard(said.pop())[0]:
            if step.samples:
                self._memory.end(step.samples)
                self.cap.fits(step.samples)
        else:
            self._complete(step, done, counts)
        step.whole, step.args = False, ()

    def _complete(self, step: GuardedStep, done: int | None, counts: bool) -> None:
        """Adds what is missing of a backward pass in which memory ran out, after ``done`` collectives of this rank."""
        if done is not None and step.loss_gradient is None:
            give_up(step.reason, "memory ran out outside of the batch's own graph")
        step.cut_again = self._short = True
        most = total = self._count(step)
        todo = deque[ToDo]()
        if done is not None:
            most = self._pieces.failed(total)
            if counts:
                todo.append((step.args[0], total, done, None))
        put_back = self._pieces.save()  # the forward pass that fitted has logged and counted
        with compat.unlogged(self._module), self._trainer.precision_plugin.train_step_context():
            self._compute(step, most, todo)
        put_back()
        if done is not None:
            self._tell(step, total)


def _hand_over(found: list[tuple[Tensor, Tensor]], scale: float, gradient: Tensor) -> None:
    """Adds gradients to those of their parameters, times that of the loss which stands for theirs."""
    factor = float(gradient) / scale
    while found:
        parameter, own = found.pop()
        own = own if factor == 1.0 else own * factor
        parameter.grad = own if parameter.grad is None else parameter.grad + own
