"""A step that does not fit this rank's memory, or exceeds its ``max_samples``, is done in pieces (layer L).

    forward    training_step, inside of what DDP wraps, runs on the batch; if memory runs out in it, what it has changed
               is put back, it runs on pieces of the batch, halved until they fit, the gradients of their losses are
               summed up, and the step goes on with a loss that stands in for the batch's
    backward   DDP has some parameters' gradients already, each that of the whole batch: the others are computed in
               pieces, and a second backward pass gives them to DDP

Peers notice a slow step, nothing else. What cannot be done in pieces is raised with the reason, e.g. a step in which
peers take part, or a single sample that does not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.piece_runner import GuardedStep, PieceLogs, PieceRunner, give_up, reason_of
from lightning_hetero.balanced.runtime import pieces
from lightning_hetero.balanced.runtime.pieces import LossWeight
from lightning_hetero.data.micro_batches import join_outputs
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.device import HostDevice, is_out_of_memory
from lightning_hetero.shares.caps import MemoryCap

Done = tuple[Any, Tensor | None, int]
"""Of a piece: its output without the loss, what it adds to the loss, and its samples."""


class Recovery:
    """Runs this rank's steps, in pieces if need be, and learns how many samples fit.

    Args:
        trainer: the running trainer; with automatic optimization.
        model: as it is trained, wrapped or not.
        device: of this rank.
        weight: returns what a piece counts.
        cap: what is known of this rank's memory; kept up to date.
        constant: see `compat.weigh_logs`.
        learned: told what a failure has taught, for a trace.

    Attributes:
        weighed: the loss that this step's ``training_step`` has returned counts what this rank counts already.
    """

    weighed = False

    def __init__(
        self, trainer: Trainer, model: nn.Module, *, device: HostDevice, weight: LossWeight, cap: MemoryCap,
        constant: Callable[[int], bool], learned: Callable[[Mapping[str, Any]], None],
    ) -> None:  # fmt: skip
        self.cap = cap
        self._believed = True  # the last step was done at once, or as planned
        self._trainer, self._model = trainer, model
        self._module: LightningModule = trainer.lightning_module
        self._weight, self._constant, self._learned = weight, constant, learned
        self._memory = pieces.MemoryWatch(device, cap)
        self._pieces = PieceRunner(trainer, model, device=device, cap=cap)
        self._taken = pieces.GradientsTaken(self._module.parameters())
        self._step = GuardedStep(self._module.training_step, None, ())
        self._backward_passes, self._warned = 0, False

    def close(self) -> None:
        self._taken.close()

    # ---- forward ----------------------------------------------------------------------------------------------

    def guarding(self, samples: int | None, planned: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Inside, ``training_step`` of the module runs in the pieces that are planned, and survives a lack of memory.

        For the length of a step only: another patch of the module's, e.g. an emulated device's, stays below this one.

        Args:
            samples: of this rank's batch; None: as Lightning counts them, once memory has been short.
            planned: see `GuardedStep`; fewer than two: none are.
        """
        self._step = GuardedStep(self._module.training_step, samples, planned if len(planned) > 1 else ())
        return patched(self._module, "training_step", self._training_step)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        step, runner = self._step, self._pieces
        step.args, step.kwargs = args, kwargs
        samples, most = self._begin(step)
        if step.planned or most < samples:
            return self._in_pieces(step, most)
        put_back = runner.save() if self.cap.untried(samples) else None
        self._memory.begin(samples)
        try:
            output = step.original(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            runner.check(step, error, self._count(step))
        else:
            return self._computed(step, output)
        # Out of the handler, so that the error's frames are gone and with them what they hold.
        if put_back is not None:
            put_back()
        step.cut_again = True
        return self._in_pieces(step, runner.failed(self._count(step)))

    def _begin(self, step: GuardedStep) -> tuple[int, int]:
        """Returns the samples of the batch, -1 if that is not known yet, and how many to compute at once."""
        cap, runner = self.cap, self._pieces
        self._believed, runner.tried, runner.exchanged = True, False, 0
        step.whole, step.loss_gradient = False, None
        if step.samples is None and cap.failed is not None:
            self._count(step)
        samples = -1 if step.samples is None else step.samples
        most = max(step.planned, default=samples)
        if cap.exceeded_by(most):
            step.cut_again, most = True, cap.safe
            step.reason = step.reason or f"{samples} samples do not fit, as was learned before"
        return samples, most

    def _computed(self, step: GuardedStep, output: Any) -> Any:
        """Returns the output of the batch, which has fitted in forward."""
        step.whole = True
        loss = loss_of(output)
        if loss is not None and loss.requires_grad:
            loss.register_hook(partial(setattr, step, "loss_gradient"))
        return output

    def _count(self, step: GuardedStep) -> int:
        """Returns the batch's samples; not counted before they are needed, as it takes a walk through the batch."""
        if step.samples is None:
            step.samples = compat.size_of_batch(self._trainer, required=False, batch=step.args[0])
        return step.samples

    def _in_pieces(self, step: GuardedStep, most: int) -> Any:
        """Returns the whole batch's output, with a loss that stands in for its own.

        Args:
            step: the step.
            most: samples of a piece; fewer where these do not fit.
        """
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        gradients = pieces.PieceGradients(self._pieces.trained(), scale=scale)
        logs = PieceLogs(self._trainer, self._constant)
        first, done = self._run_pieces(step, most, gradients, logs)
        for _ in range(sum(not size for size in step.planned)):  # peers have more pieces, and a step may communicate
            with compat.metrics_frozen(self._module), pieces.statistics_kept(self._module), logs.collecting(first, 0):
                loss = loss_of(step.run(first))
            if loss is not None:
                gradients.add(loss, 0.0)

        def stand(value: Tensor) -> Tensor:
            found = gradients.gradients()
            self._pieces.check_reached(step, (p in found for p in self._pieces.trained()))
            return pieces.stand_in(value, found)

        return self._joined(step, logs, done, stand)

    def _joined(
        self, step: GuardedStep, logs: PieceLogs, done: Sequence[Done], stand: Callable[[Tensor], Tensor]
    ) -> Any:
        """Returns the whole batch's output, with the loss that ``stand`` makes of its value."""
        self._believed = not step.cut_again
        logs.publish()
        if self._pieces.tried:
            self._tell(step, max(step.planned, default=self._count(step)))
        step.args = ()
        outputs, values, sizes = zip(*done, strict=True)
        if any(value is None for value in values):
            return None  # Lightning says what that means
        loss, rest = stand(torch.stack(values).sum(0)), join_outputs(outputs, sizes)
        return loss if rest is None else {"loss": loss, **rest}

    def _run_pieces(
        self, step: GuardedStep, most: int, gradients: pieces.PieceGradients, logs: PieceLogs | None = None
    ) -> tuple[Any, list[Done]]:
        """Runs all pieces of a batch and adds up their gradients.

        Args:
            step, most: see `_in_pieces`.
            gradients: takes those of the pieces.
            logs: takes what they log; None: of the pieces nothing is kept besides.

        Returns:
            The first piece; and what is kept of each.
        """
        total = self._count(step)
        done: list[Done] = []

        def run(piece: Any, size: int, void: float) -> None:
            with nullcontext() if logs is None else logs.collecting(piece, size):
                output = step.run(piece)
            loss, weight = loss_of(output), self._weight.of_piece(piece, size, total)
            if loss is not None:
                gradients.add(loss, weight, step.loss_gradient)
            if logs is not None:
                done.append(done_of(output, weight, size))
                logs.keep()

        return self._pieces.run(step, most, run), done

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, run: Callable[[Tensor], None], *, holders: Sequence[Tensor],
        ended: Callable[[Tensor], None],
    ) -> None:  # fmt: skip
        """Runs the backward pass of a step, to the end of the gradient exchange.

        Args:
            loss: to be differentiated.
            run: differentiates it.
            holders: tensors besides ``loss`` that hold the graph.
            ended: arranges on another loss what happens at the end of its backward pass.
        """
        step = self._step
        if whole := step.whole:
            self._taken.begin()
        try:
            run(loss)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            samples = self._check_backward(step, error)
        else:
            self._backward_passes += 1
            step.whole, step.args = False, ()
            if whole and step.samples:
                self._memory.end(step.samples)
                self.cap.fits(step.samples)
            return
        # Out of the handler, so that the error's frames are gone and with them what they hold.
        runner, trained = self._pieces, self._pieces.trained()
        reached, taken = {id(leaf) for leaf in pieces.leaves(loss)}, self._taken.taken()
        runner.check_reached(step, (id(p) in reached for p in trained))
        remaining = [p for p in trained if id(p) in reached - taken]
        for tensor in (loss, *holders):
            tensor.detach_()  # Lightning refers to the loss for as long as the step lasts, and so to the whole graph
        if not remaining:
            give_up(step.reason, "all gradients were there, but their exchange was not under way")
        self._believed, step.cut_again = False, True
        stand = pieces.stand_in(loss, self._remaining(step, remaining, runner.failed(samples)))
        self._tell(step, samples)
        ended(stand)
        stand.backward()
        self._backward_passes += 1

    def _check_backward(self, step: GuardedStep, error: BaseException) -> int:
        """Raises the error, with the reason, if pieces would not help; returns the batch's samples."""
        step.reason, model = reason_of(error), self._model
        if not step.whole or step.loss_gradient is None:
            give_up(step.reason, "memory ran out outside of the batch's own graph", error)
        if isinstance(model, DistributedDataParallel) and model.static_graph and not self._backward_passes:
            give_up(step.reason, "with static_graph=True DDP learns from the first backward pass", error)
        samples = self._count(step)
        self._pieces.exchanged = 0  # the collectives of forward are over
        self._pieces.check(step, error, samples)
        return samples

    def _remaining(self, step: GuardedStep, parameters: list[nn.Parameter], most: int) -> dict[Tensor, Tensor]:
        """Returns gradients of the step's last loss, as the broken pass would have computed them."""
        gradients = pieces.PieceGradients(parameters)
        put_back = self._pieces.save()  # the forward pass that fitted has logged and counted
        with compat.unlogged(self._module), self._trainer.precision_plugin.train_step_context():
            self._run_pieces(step, most, gradients)
        put_back()
        step.whole, step.args = False, ()
        found = gradients.gradients()
        self._pieces.check_reached(step, (p in found for p in parameters))
        return {p: found[p] if p in found else torch.zeros_like(p) for p in parameters}

    # ---- around the step --------------------------------------------------------------------------------------

    def communicates(self) -> None:
        """Called before a collective of the user's, within the step or not.

        Raises:
            RuntimeError: of a step that is done in pieces: its peers take part once.
        """
        self._pieces.exchanged += 1
        if self._step.in_pieces and (self._step.cut_again or not self._step.planned):
            raise RuntimeError(
                "training_step communicates with the other ranks (all_gather, reduce, broadcast or barrier),"
                " once per piece on this rank and once on the others; lower max_samples for this rank"
            )

    def needs_all_rows(self) -> None:
        """Called before rows are gathered with their gradients, for a loss over those of the whole batch.

        Raises:
            RuntimeError: of a step in planned pieces, on all ranks: each piece would have a loss over its own rows.
        """
        if self._step.planned:
            raise RuntimeError(
                "all_gather(sync_grads=True) in a step that max_samples divides into pieces: the loss would be over"
                " the rows of a piece, not of the global batch. Raise max_samples, or lower the global batch and set"
                " accumulate_grad_batches, by which each batch has a separate loss, as under strategy='ddp'"
            )

    def tells_speed(self, fit: bool) -> bool:
        """Whether the last step's time says how fast this rank is; pieces do only where they are there to stay.

        Args:
            fit: whether the ranks together hold a global batch.
        """
        return self._believed or not (self._pieces.tried or fit)

    def _tell(self, step: GuardedStep, samples: int) -> None:
        """Keeps what was learned, and says so once in a fit, on this rank, whichever it is."""
        cap = self.cap
        self._learned({"failed": samples, "most": cap.most})
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"rank {self._trainer.global_rank} ran out of memory with {samples} samples"
            f" ({step.reason.splitlines()[0]}). Nothing is lost: the step was done in pieces, of which"
            f" {cap.safe} samples fit; this rank goes on with at most {cap.most}",
            stacklevel=2,
        )


def loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def done_of(output: Any, weight: float, size: int) -> Done:
    loss = loss_of(output)
    rest = {k: v for k, v in output.items() if k != "loss"} if isinstance(output, Mapping) else None
    value = None if loss is None else loss.detach() * weight if weight else torch.zeros_like(loss)
    return apply_to_collection(rest, Tensor, Tensor.detach), value, size


def alone(trainer: Trainer) -> dict[str, Callable[..., Any]]:
    """Returns, by name, what stands for the collectives of a ``training_step`` in which peers take no part."""
    same: dict[str, Callable[..., Any]]
    same = dict.fromkeys(("reduce", "broadcast", "barrier"), lambda value=None, *_, **__: value)
    return {**same, "all_gather": lambda value, *_, **__: torch.stack([value] * trainer.world_size)}
