"""What the training loop does with one batch, and whom it calls: run again, unclipped (layer L)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_hetero.lightning_compat.patches import patched, replace_methods

_LOG = logging.getLogger("lightning.pytorch")  # whose level and handlers Lightning has set


@cache
def module_attributes() -> frozenset[str]:
    """Names of the attributes that every LightningModule has: Lightning's and torch's."""
    return frozenset(vars(LightningModule()))


def wrap_training(
    trainer: Trainer, outputs: Callable[[Any], Any], epoch_ended: Callable[[], None]
) -> Callable[[], None]:
    """Puts something between the loops and the hooks of callbacks and module; returns undo.

    Args:
        outputs: makes, of what a step has returned, what ``on_train_batch_end`` is given.
        epoch_ended: called when the last batch of an epoch has been trained, before ``on_train_epoch_end``.
    """
    loop, optimization = trainer.fit_loop, trainer.fit_loop.epoch_loop.automatic_optimization

    def run(*args: Any, **kwargs: Any) -> Any:
        return outputs(type(optimization).run(optimization, *args, **kwargs))

    def on_advance_end() -> None:
        epoch_ended()
        type(loop).on_advance_end(loop)

    undo = ExitStack()
    undo.callback(replace_methods(optimization, run=run))
    undo.callback(replace_methods(loop, on_advance_end=on_advance_end))
    return undo.close


def trainer_callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks; public, but set by a connector where no type checker sees it."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def replace_sigterm_broadcast(trainer: Trainer, any_told: Callable[[bool], bool]) -> Callable[[], None]:
    """Makes another exchange replace the loop's broadcast before every batch; returns undo.

    The loop's own cannot be interrupted, so a rank would wait in it for one that has failed, and it passes over errors.

    Args:
        any_told: called by all ranks, with whether this one has received SIGTERM; returns whether all are to stop.
    """

    def broadcast() -> None:
        if any_told(bool(getattr(trainer, "received_sigterm", False))):
            _LOG.info("[rank %d] A rank has received SIGTERM: all of them end", trainer.global_rank)
            raise_sigterm(trainer)

    return replace_methods(trainer.fit_loop.epoch_loop, _broadcast_sigterm_tensor=broadcast)


def raise_sigterm(trainer: Trainer) -> None:
    """Ends the fit here, as Lightning does for a SIGTERM."""
    trainer._signal_connector.received_sigterm = True
    raise SIGTERMException


def note_sigterm(trainer: Trainer, kept: Callable[[], bool]) -> Callable[[], None]:
    """Has Lightning's handler of SIGTERM note the signal and pass it to the launcher, and no more; returns undo.

    From 2.6 on its own waits, in the middle of whatever this rank does, for a broadcast of all ranks on the default
    group. A rank that gets the signal alone, or elsewhere than the others, waits for the group's timeout. What is noted
    ends the fit at the end of the batch. To be called before the Trainer sets its handlers.

    Args:
        kept: called in the handler; whether the caller notes it, and not Lightning, for all ranks to end at once.
    """
    connector: Any = trainer._signal_connector

    def handler(number: int, frame: Any) -> None:
        _LOG.info("[rank %d] Received SIGTERM (%d): it ends when its batch has ended", trainer.global_rank, number)
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(number)
        if not kept():
            connector.received_sigterm = True

    return replace_methods(connector, _sigterm_notifier_fn=handler)


def requeues(trainer: Trainer) -> bool:
    """Whether SLURM runs the job, and a signal of its asks Lightning to save and requeue it."""
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def defer_requeue(trainer: Trainer, told: Callable[[int], None]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Has ``told`` called instead of Lightning's handler of the signal by which SLURM asks to requeue the job.

    That one saves a checkpoint and calls ``scontrol requeue`` at once. To be called before the Trainer sets handlers.

    Returns:
        What does so later, given the signal's number, and the undo function.
    """
    connector: Any = trainer._signal_connector
    original = connector._slurm_sigusr_handler_fn
    deferring = True

    def handler(number: int, frame: Any) -> None:
        if deferring:
            told(number)
        else:  # the fit has ended, and its handlers are still set
            original(number, frame)

    def undo() -> None:
        nonlocal deferring
        deferring = False
        put_back()

    put_back = replace_methods(connector, _slurm_sigusr_handler_fn=handler)
    return lambda number: original(number, None), undo


def run_again(trainer: Trainer, batch: Any, batch_idx: int, optimizer: Any, *, zero: bool = True) -> Callable[[], Any]:
    """Returns the loop's closure (training step, zeroing, backward) for another batch within the same step.

    Args:
        zero: let it zero the gradients as for the first batch of an accumulation window.
    """
    loop = trainer.fit_loop.epoch_loop
    kwargs = _step_arguments(trainer, batch, batch_idx)
    optimization = loop.automatic_optimization
    closure = optimization._make_closure(kwargs, optimizer, batch_idx)
    if not zero:
        closure._zero_grad_fn = None
    return closure


def outputs_of(closure: Any) -> dict[str, Any]:
    """Returns what hooks see as the outputs of a closure of `run_again` that has run."""
    result = closure.consume_result()
    return {} if result.loss is None else result.asdict()


def manual_outputs(output: Any) -> dict[str, Any]:
    """Returns what hooks see as the outputs of a ``training_step`` in manual optimization that has returned this."""
    from lightning.pytorch.loops.optimization.manual import ManualResult

    return ManualResult.from_training_step_output(output).asdict()


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Calls ``training_step`` as the loop would, outside of it."""
    return module.training_step(*_step_arguments(module.trainer, batch, batch_idx).values())


def _step_arguments(trainer: Trainer, batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
    """The arguments that the signature of ``training_step`` asks for, which only the loop knows to choose."""
    return trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)


def batch_to_device(trainer: Trainer, batch: Any, move: Callable[[Any], Any] | None = None) -> Any:
    """Moves a training batch as the loop does, with the user's hooks; by ``move`` instead of the strategy.

    Private: ``LightningModule._on_before_batch_transfer``, which knows whether the user's hooks take an index.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0) if move is None else move(batch)


@contextmanager
def collect_clipping(trainer: Trainer, collect: Callable[[float, str, Any], None]) -> Iterator[None]:
    """Inside, gradients are not clipped; ``collect(value, algorithm, optimizer)`` gets how they should be.

    The plugin's ``clip_gradients`` is public and where the Trainer's setting, ``configure_gradient_clipping`` and
    ``self.clip_gradients`` end up.
    """

    def clip(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val > 0:
            kind = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            collect(float(clip_val), kind, getattr(optimizer, "_optimizer", optimizer))

    with patched(trainer.precision_plugin, "clip_gradients", clip):
        yield


def averaging_callbacks(trainer: Trainer) -> list[tuple[Callback, LightningModule]]:
    """Lightning's callbacks that average weights, each with its copy of the module, from set-up on.

    `WeightAveraging` (2.6 and later) wraps the copy, `StochasticWeightAveraging` has it unwrapped.
    """
    found: list[tuple[Callback, LightningModule]] = []
    for callback in trainer_callbacks(trainer):
        copy: Any = getattr(callback, "_average_model", None)
        if isinstance(copy, torch.optim.swa_utils.AveragedModel):
            copy = copy.module
        if type(copy) is type(trainer.lightning_module):
            found.append((callback, copy))
    return found


def averaged_weights(trainer: Trainer) -> list[Tensor]:
    """Parameters and buffers that Lightning's `WeightAveraging` callbacks (2.6 and later) keep of the model."""
    models = [getattr(callback, "_average_model", None) for callback in trainer_callbacks(trainer)]
    averages = [m for m in models if isinstance(m, torch.optim.swa_utils.AveragedModel)]
    return [tensor for model in averages for tensor in (*model.parameters(), *model.buffers())]
