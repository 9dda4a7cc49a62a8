"""What the training loop does with one batch, and whom it calls: run again, unclipped (layer L).

Batches that are None: Lightning passes over them, and no user's hook sees one.

**Which hooks are called.** For None the loop calls no training hook but ``on_train_batch_end``. A user's is called
exactly if its code uses neither batch nor outputs. Every way that asks less of the code is worse:

- *Call none.* Averages of weights kept by hand miss updates, in silence and on some ranks only, and ranks do not come
  to save a checkpoint that a callback asks for every n batches.
- *Call all with None*, as Lightning does. ``outputs["loss"]``, in most hooks of users, ends the fit.
- *Call all with the last batch*, or one of a sample. Metrics count it again, in silence.
- *Call with a stand-in that notices its use.* Part of the hook has run by then, and ``batch is None`` is not noticed.
- *An attribute* that asks for every batch. Code written for DDP lacks it, so it is "call none" for all who do not know.
- *The signature.* Lightning passes all arguments by position: every hook has them.
- *The source text.* It may be gone, or edited since the program started.

So the compiled code is asked, with names that `dis` documents; in doubt a hook counts as one that uses the batch.
"""

from __future__ import annotations

import dis
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ThroughputMonitor, Timer
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_hetero.lightning_compat.patches import patched, replace_methods
from lightning_hetero.lightning_compat.results import as_batch

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

    Its own waits, in the middle of whatever this rank does, for a broadcast of all ranks on the default group. A rank
    that gets the signal alone, or elsewhere than the others, waits for the group's timeout. What is noted ends the fit
    at the end of the batch. To be called before the Trainer sets its handlers.

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

    `WeightAveraging` wraps the copy, `StochasticWeightAveraging` has it unwrapped.
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
    """Parameters and buffers that Lightning's `WeightAveraging` callbacks keep of the model."""
    models = [getattr(callback, "_average_model", None) for callback in trainer_callbacks(trainer)]
    averages = [m for m in models if isinstance(m, torch.optim.swa_utils.AveragedModel)]
    return [tensor for model in averages for tensor in (*model.parameters(), *model.buffers())]


def skip_empty_batches(trainer: Trainer, parts: Any = None) -> Callable[[], None]:
    """Lets the loop pass over a batch that is None as the module says, without a warning; returns the undo function.

    Args:
        trainer: the running trainer.
        parts: what was trained while the loop had one batch: ``counts``, whether the loop's batch does, and ``more``,
            outputs, batch and samples of everything else that was trained and counts. A user's hook that looks at batch
            or outputs is called for each of them, and for nothing that does not count; what is more than the loop's
            batch comes when that one has ended.
    """
    module = trainer.lightning_module
    undo = ExitStack()

    def replace(owner: Any, name: str, hook: Any) -> None:
        held = vars(owner)
        undo.callback(held.update, {name: held[name]} if name in held else {})  # e.g. a LambdaCallback's function
        undo.callback(held.pop, name, None)
        held[name] = hook

    def without_none(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            return None if args[position] is None else original(*args, **kwargs)

        replace(owner, name, hook)

    def part_by_part(owner: Any, first: int) -> None:
        """``first``: position of the first argument that is not the hook's trainer and module."""
        start, end = owner.on_train_batch_start, owner.on_train_batch_end
        starts, ends = _uses(start, first), _uses(end, first, first + 1)

        def started(*args: Any) -> Any:
            return start(*args) if parts is None or parts.counts else None

        def ended(*args: Any) -> None:
            if not ends or (args[first + 1] is not None and (parts is None or parts.counts)):
                end(*args)
            for outputs, batch, samples in () if parts is None else parts.more:
                with as_batch(trainer, batch, samples):
                    if starts:
                        start(*args[:first], batch, args[-1])
                    if ends:
                        end(*args[:first], outputs, batch, args[-1])

        if starts and parts is not None:
            replace(owner, "on_train_batch_start", started)
        if ends or (starts and parts is not None):
            replace(owner, "on_train_batch_end", ended)

    without_none(module, "_on_before_batch_transfer", 0)
    part_by_part(module, 0)
    for callback in trainer_callbacks(trainer):
        if isinstance(callback, _LRCallback):
            replace(callback, "on_train_batch_end", _decides_in_every_batch(callback))
        elif isinstance(callback, ThroughputMonitor):  # that one measures the loop's batch
            without_none(callback, "on_train_batch_end", 3)
        elif not _counts_batches(callback):
            part_by_part(callback, 2)
    warned = trainer.fit_loop.epoch_loop._warning_cache
    warned.add("train_dataloader yielded None. If this was on purpose, ignore this warning...")
    return undo.close


def finds_learning_rate(trainer: Trainer) -> bool:
    """Whether the fit is a learning-rate finder's: it reads one rank's loss of every batch, by its own callback."""
    return any(isinstance(callback, _LRCallback) for callback in trainer_callbacks(trainer))


def _decides_in_every_batch(finder: _LRCallback) -> Callable[..., None]:
    """Returns the end of a batch for the learning-rate finder's own callback.

    It notes a learning rate at the start of a batch, which None has not, and leaves out the ranks' decision whether to
    stop where there are no outputs: the others would wait for this rank.
    """
    original = finder.on_train_batch_end

    def on_train_batch_end(trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch is None:
            finder.on_train_batch_start(trainer, module, batch, batch_idx)
        before = len(finder.losses)
        original(trainer, module, outputs, batch, batch_idx)
        if batch is None and len(finder.losses) > before:
            trainer.should_stop = trainer.strategy.broadcast(trainer.should_stop)

    return on_train_batch_end


def _counts_batches(callback: Callback) -> bool:
    """Whether this callback must get the end of every batch on every rank, whatever its code uses."""
    if isinstance(callback, Checkpoint | EarlyStopping | Timer):
        return True
    if "on_train_batch_end" in vars(callback):  # a user's function, as in LambdaCallback
        return False
    hooks = type(callback).on_train_batch_start, type(callback).on_train_batch_end
    return all(hook.__module__.split(".")[0] in ("lightning", "lightning_hetero") for hook in hooks)


def _uses(hook: Callable[..., Any], *positions: int) -> bool:
    """Whether a method's code uses one of its arguments, counted without ``self``; True if that cannot be seen."""
    code = getattr(getattr(hook, "__func__", None), "__code__", None)
    if code is None or code.co_argcount <= 1 + max(positions) or hasattr(hook, "__wrapped__"):
        return True
    wanted = {code.co_varnames[1 + position] for position in positions}
    variables = {*dis.haslocal, *dis.hasfree}
    used = [i.argval for i in dis.get_instructions(code) if i.opcode in variables]
    return any(wanted.intersection(names if isinstance(names, tuple) else (names,)) for names in used)
