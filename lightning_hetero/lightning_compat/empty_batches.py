"""Batches that are None: Lightning passes over them, and no user's hook sees one (layer L).

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
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ThroughputMonitor, Timer
from lightning.pytorch.tuner.lr_finder import _LRCallback

from lightning_hetero.lightning_compat.batches import trainer_callbacks
from lightning_hetero.lightning_compat.results import as_batch


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
