"""Batches that are None: Lightning passes over them, and no user's hook sees one (layer L).

**Which hooks are called.** For None the loop calls no training hook but ``on_train_batch_end``. A user's is called
exactly if its code uses neither batch nor outputs. Every way that asks less of the code is worse:

- *Call none.* Averages of weights kept by hand miss updates, in silence and on some ranks only, and ranks do not come
  to save a checkpoint that a callback asks for every n batches.
- *Call all with None*, as Lightning does. ``outputs["loss"]``, in most hooks of users, ends the fit.
- *Call all with the last batch*, or one of a sample. Metrics count it again, in silence.
- *Call with a stand-in that notices its use.* Part of the hook has run by then, and ``batch is None`` is not noticed.
- *An attribute* that asks for every batch. Code written for DDP has none, so it is "call none" for all who do not know.
- *The signature.* Lightning passes all arguments by position: every hook has them.
- *The source text.* It may be gone, or edited since the program started.

So the compiled code is asked, with names that `dis` documents; in doubt a hook counts as one that uses the batch.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ThroughputMonitor, Timer
from lightning.pytorch.tuner.lr_finder import _LRCallback

from lightning_hetero.lightning_compat.batches import trainer_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback

__all__ = ["finds_learning_rate", "skip_empty_batches"]


def skip_empty_batches(trainer: Trainer) -> Callable[[], None]:
    """Lets the loop pass over a batch that is None as the module says, without a warning; returns the undo function."""
    module = trainer.lightning_module
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, hook: Any) -> None:
        replaced.append((owner, name, vars(owner).get(name)))
        object.__setattr__(owner, name, hook)

    def without_none(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            return None if args[position] is None else original(*args, **kwargs)

        replace(owner, name, hook)

    without_none(module, "_on_before_batch_transfer", 0)
    if _uses(module.on_train_batch_end, 0, 1):
        without_none(module, "on_train_batch_end", 1)
    for callback in trainer_callbacks(trainer):
        if isinstance(callback, _LRCallback):
            replace(callback, "on_train_batch_end", _decides_in_every_batch(callback))
        elif not _counts_batches(callback) and _uses(callback.on_train_batch_end, 2, 3):
            without_none(callback, "on_train_batch_end", 3)
    warned = trainer.fit_loop.epoch_loop._warning_cache
    warned.add("train_dataloader yielded None. If this was on purpose, ignore this warning...")

    def undo() -> None:
        for owner, name, before in reversed(replaced):
            vars(owner).pop(name, None)
            if before is not None:  # e.g. the function of a LambdaCallback
                object.__setattr__(owner, name, before)

    return undo


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
    """Whether the end of every batch must be told to this callback on every rank alike, whatever its code uses."""
    if isinstance(callback, Checkpoint | EarlyStopping | Timer):
        return True
    if "on_train_batch_end" in vars(callback):  # a user's function, as in LambdaCallback
        return False
    hook = type(callback).on_train_batch_end
    ours = hook.__module__.split(".")[0] in ("lightning", "lightning_hetero")
    return ours and hook is not ThroughputMonitor.on_train_batch_end  # that one measures the batch


def _uses(hook: Callable[..., Any], *positions: int) -> bool:
    """Whether a method's code uses one of its arguments, counted without ``self``; True if that cannot be seen."""
    code = getattr(getattr(hook, "__func__", None), "__code__", None)
    if code is None or code.co_argcount <= 1 + max(positions) or hasattr(hook, "__wrapped__"):
        return True
    wanted = {code.co_varnames[1 + position] for position in positions}
    variables = {*dis.haslocal, *dis.hasfree}
    used = [i.argval for i in dis.get_instructions(code) if i.opcode in variables]
    return any(wanted.intersection(names if isinstance(names, tuple) else (names,)) for names in used)
