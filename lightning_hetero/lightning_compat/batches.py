"""What the training loop does with one batch, and whom it calls: passed over, run again, unclipped (layer L)."""

from __future__ import annotations

import dis
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_hetero.lightning_compat.patches import patched

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "averaged_weights",
    "averaging_callbacks",
    "call_training_step",
    "collect_clipping",
    "replace_sigterm_broadcast",
    "run_again",
    "skip_empty_batches",
    "stop_sigterm_broadcast",
    "trainer_callbacks",
]


def trainer_callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks; public, but set by a connector where no type checker sees it."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def skip_empty_batches(trainer: Trainer) -> Callable[[], None]:
    """Lets the loop pass over a batch that is None without a user's hook seeing it; returns the undo function.

    The loop itself skips the training hooks for None, but transfers it and calls ``on_train_batch_end``. Lightning's
    own callbacks count batches there and must be called on every rank alike; a user's hook may expect a batch. One
    that looks at neither batch nor outputs is called, too: it counts, averages weights, or saves a checkpoint, for
    which all ranks must come.
    """
    from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ThroughputMonitor, Timer

    module = trainer.lightning_module
    patched: list[tuple[Any, str]] = []

    def without_none(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            return None if args[position] is None else original(*args, **kwargs)

        object.__setattr__(owner, name, hook)
        patched.append((owner, name))

    without_none(module, "_on_before_batch_transfer", 0)
    if _looks_at(module.on_train_batch_end, 0, 1):
        without_none(module, "on_train_batch_end", 1)
    for callback in trainer_callbacks(trainer):
        hook = type(callback).on_train_batch_end
        known = hook.__module__.split(".")[0] in ("lightning", "lightning_hetero")
        known &= "on_train_batch_end" not in vars(callback)  # as in LambdaCallback
        known &= hook is not ThroughputMonitor.on_train_batch_end  # measures the batch
        known |= not _looks_at(callback.on_train_batch_end, 2, 3)
        if not known and not isinstance(callback, Checkpoint | EarlyStopping | Timer):
            without_none(callback, "on_train_batch_end", 3)
    warned = trainer.fit_loop.epoch_loop._warning_cache
    warned.add("train_dataloader yielded None. If this was on purpose, ignore this warning...")

    def undo() -> None:
        for owner, name in patched:
            vars(owner).pop(name, None)

    return undo


def _looks_at(hook: Callable[..., Any], *positions: int) -> bool:
    """Whether a method's code reads one of its arguments, counted without ``self``; True if that cannot be seen."""
    code = getattr(getattr(hook, "__func__", None), "__code__", None)
    if code is None or code.co_argcount <= 1 + max(positions) or hasattr(hook, "__wrapped__"):
        return True
    wanted = {code.co_varnames[1 + position] for position in positions}
    if wanted & set(code.co_cellvars):
        return True
    reads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")]
    return any(wanted & set(names if isinstance(names, tuple) else (names,)) for names in reads)


def stop_sigterm_broadcast(trainer: Trainer) -> Callable[[], None]:
    """Stops the loop's broadcast before every batch, which would make all ranks wait for each other; returns undo."""
    loop = trainer.fit_loop.epoch_loop
    vars(loop)["_broadcast_sigterm_tensor"] = lambda: None  # an instance attribute over a method

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


def replace_sigterm_broadcast(trainer: Trainer, any_told: Callable[[bool], bool]) -> Callable[[], None]:
    """Puts another exchange in the place of the loop's broadcast before every batch; returns undo.

    The loop's own cannot be interrupted, so a rank would wait in it for one that has failed, and it passes over errors.

    Args:
        any_told: called by all ranks, with whether this one has received SIGTERM; returns whether all are to stop.
    """
    loop = trainer.fit_loop.epoch_loop

    def broadcast() -> None:
        if any_told(bool(getattr(trainer, "received_sigterm", False))):
            raise SIGTERMException

    vars(loop)["_broadcast_sigterm_tensor"] = broadcast

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


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


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Calls ``training_step`` as the loop would, outside of it."""
    return module.training_step(*_step_arguments(module.trainer, batch, batch_idx).values())


def _step_arguments(trainer: Trainer, batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
    """The arguments that the signature of ``training_step`` asks for, which only the loop knows to choose."""
    return trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)


@contextmanager
def collect_clipping(trainer: Trainer, collect: Callable[[float, str, Any], None]) -> Iterator[None]:
    """Inside, gradients are not clipped; ``collect(value, algorithm, optimizer)`` is told how they should be.

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

    `WeightAveraging` (2.6 and later) wraps the copy, `StochasticWeightAveraging` has it as it is.
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
