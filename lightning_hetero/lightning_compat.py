"""Every private name of Lightning and torchmetrics we need, in one place (layer L).

Each function says what it reads, why no public way exists, and which test pins it to the installed versions
(`tests/ranks/test_lightning_compat.py`). Verified with Lightning 2.5 and 2.6.
"""

from __future__ import annotations

import dis
import math
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = [
    "accumulates_now",
    "as_batch",
    "averaged_weights",
    "batch_results_open",
    "batches_trained",
    "collect_clipping",
    "count_started",
    "count_step",
    "count_val_batches",
    "dummy_batch_unlogged",
    "epoch_running",
    "is_train_iterator",
    "keep_train_sampler",
    "last_batch_done",
    "log_interval",
    "metrics_frozen",
    "overfits",
    "reduced_names",
    "resume_from",
    "run_again",
    "skip_empty_batches",
    "step_limit",
    "steps_uncounted",
    "stop_sigterm_broadcast",
    "train_loaders",
    "trainer_callbacks",
    "upcoming_batch",
    "uses_dataloader_iter",
    "uses_distributed_sampler",
    "val_loaders",
]


def epoch_running(trainer: Trainer) -> int:
    """Epoch being trained; the value Lightning itself gives to samplers' ``set_epoch``."""
    return trainer.fit_loop.epoch_progress.current.processed  # pyright: ignore[reportAttributeAccessIssue]


def upcoming_batch(trainer: Trainer) -> int:
    """Index inside the epoch of the batch that is fetched next, once the loop runs (settled after a resume)."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def batches_trained(trainer: Trainer) -> int:
    """Batches of the running epoch already trained on, right also before the loop has settled a resume."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.processed  # pyright: ignore[reportAttributeAccessIssue]


def batches_of_all_epochs(trainer: Trainer) -> int:
    """Batches trained since the first epoch, also before a resume; those that yielded None count."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed  # pyright: ignore[reportAttributeAccessIssue]


def last_batch_done(trainer: Trainer) -> bool:
    """Whether the checkpoint or the loop stands behind the last batch of an epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def train_loaders(trainer: Trainer) -> list[Any]:
    """The processed train loaders in order. Public ``trainer.train_dataloader`` gives them in the user's nesting."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def val_loaders(trainer: Trainer) -> list[Any]:
    """The processed validation loaders of a fit in order."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def count_val_batches(trainer: Trainer, *, begin: bool = False) -> None:
    """Takes note that the validation loaders have changed their lengths; Lightning asks for them once.

    Args:
        begin: within ``on_validation_start``: begin this validation with the new lengths, too.
    """
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches

    loop = trainer.fit_loop.epoch_loop.val_loop
    limit = trainer.limit_val_batches
    lengths = [sized_len(loader) for loader in val_loaders(trainer)]
    loop._max_batches = [
        _parse_num_batches(RunningStage.VALIDATING, math.inf if length is None else length, limit)
        for length in lengths
    ]
    if begin:
        loop.reset()


def reduced_names(trainer: Trainer) -> list[str]:
    """Names of the values logged so far in this epoch that the epoch's end will reduce over ranks, sorted.

    Only the collection of results knows them, with the hook they were logged in.
    """
    results = trainer._results
    names: list[str] = []
    for name, metric in () if results is None else results.items():
        sync = metric.meta.sync
        reduced = sync.should and not sync.rank_zero_only if metric.is_tensor else True  # torchmetrics always are
        if metric.meta.on_epoch and reduced:
            names.append(name)
    return sorted(names)


def trainer_callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks; public, but set by a connector where no type checker sees it."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def overfits(trainer: Trainer) -> bool:
    """Whether ``overfit_batches`` is on; public, set by a connector."""
    return bool(trainer.overfit_batches)  # pyright: ignore[reportAttributeAccessIssue]


def log_interval(trainer: Trainer) -> int:
    """``log_every_n_steps``; public, set by a connector."""
    return trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]


def uses_distributed_sampler(trainer: Trainer) -> bool:
    """The Trainer's ``use_distributed_sampler`` argument; kept only on a private connector."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def uses_dataloader_iter(trainer: Trainer) -> bool:
    """Whether ``training_step`` takes a ``dataloader_iter`` and fetches batches itself."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    step = trainer.lightning_module.training_step
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


def keep_train_sampler(trainer: Trainer) -> Callable[[], None]:
    """Stops Lightning from rebuilding *train* loaders with a `DistributedSampler`; returns the undo function.

    The strategy divides the global batch itself. Rebuilding would lose custom batch samplers and fails for DataLoader
    subclasses with required arguments; the hook for strategies, ``process_dataloader``, runs only afterwards.
    """
    connector = trainer._data_connector
    original = type(connector)._prepare_dataloader

    def prepare(self: Any, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode == RunningStage.TRAINING:
            return dataloader
        return original(self, dataloader, shuffle, mode)

    connector._prepare_dataloader = types.MethodType(prepare, connector)  # type: ignore[method-assign]

    def undo() -> None:
        vars(connector).pop("_prepare_dataloader", None)

    return undo


def batch_results_open(trainer: Trainer) -> bool:
    """Whether values logged now belong to one training batch (and not to an epoch's end)."""
    if not trainer.training:
        return False
    results = trainer._results
    return results is not None and results.batch is not None


@contextmanager
def dummy_batch_unlogged(trainer: Trainer) -> Iterator[None]:
    """Inside, ``self.log`` of a mean, sum, maximum or minimum counts nothing: a rank without samples trains on a dummy.

    A mean counts with batch size 0, and a NaN as 0; the others take their neutral element. Logged on a step without
    ``sync_dist``, the neutral element is what this rank shows.
    """
    results = trainer._results
    if results is None:
        yield
        return

    def update(key: str, value: Any, batch_size: int) -> None:
        del batch_size
        if isinstance(value, Tensor):
            value = _neutral(results[key].meta, value)
        type(results).update_metrics(results, key, value, 0)  # pyright: ignore[reportAttributeAccessIssue]

    with _patched(results, "update_metrics", update):
        yield


def _neutral(meta: Any, value: Tensor) -> Tensor:
    """Returns what changes nothing under the reduction of a logged value; only its metadata tells which it is."""
    if meta.is_mean_reduction:  # counts with weight 0, but 0 * NaN is NaN
        return torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
    if not value.is_floating_point():
        value = value.to(torch.float32)
    if meta.is_max_reduction or meta.is_min_reduction:
        return torch.full_like(value, -math.inf if meta.is_max_reduction else math.inf)
    return torch.zeros_like(value) if meta.is_sum_reduction else value


@contextmanager
def metrics_frozen(module: nn.Module) -> Iterator[None]:
    """Undoes every torchmetrics update made inside: a dummy batch must not count.

    ``metric_state`` is public, the update counter and the cached value are not.
    """
    from torchmetrics import Metric

    saved = [
        (m, {k: _copied(v) for k, v in m.metric_state.items()}, m._update_count, m._computed)
        for m in module.modules()
        if isinstance(m, Metric)
    ]
    try:
        yield
    finally:
        for metric, state, count, computed in saved:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed


def _copied(state: Tensor | list[Any]) -> Tensor | list[Any]:
    return list(state) if isinstance(state, list) else state.clone()


# ---- batches that a rank skips, or trains in addition ---------------------------------------------------------------


def accumulates_now(trainer: Trainer) -> bool:
    """Whether the batch that is running only accumulates gradients."""
    return trainer.fit_loop._should_accumulate()


def step_limit(trainer: Trainer) -> int | None:
    """Optimizer steps still allowed by ``max_steps``; None without a limit."""
    limit = trainer.fit_loop.epoch_loop.max_steps
    return None if limit < 0 else max(0, limit - trainer.global_step)


def count_started(trainer: Trainer) -> None:
    """Counts a batch as started, as Lightning does not for None. Otherwise it takes a checkpoint of this batch for one
    from the middle of a batch, and the resumed run makes the batch a second time."""
    trainer.fit_loop.epoch_loop.batch_progress.increment_started()


def count_step(trainer: Trainer) -> None:
    """Counts an optimizer step that was made elsewhere, so that ``global_step`` and what follows from it agree."""
    step = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    step.increment_ready()
    step.increment_completed()


def is_train_iterator(trainer: Trainer, iterator: object) -> bool:
    """Whether the training loop fetches from this iterator of a train loader, or somebody else looks at its batches."""
    combined = trainer.fit_loop._combined_loader
    running = None if combined is None else combined._iterator
    return running is not None and any(iterator is i for i in running.iterators)


def resume_from(trainer: Trainer, checkpoint: str) -> None:
    """Lets the fit that has begun resume from ``checkpoint``, whatever ``ckpt_path`` it was given."""
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        del checkpoint_path
        vars(connector).pop("resume_start", None)
        if "weights_only" in kwargs:  # from 2.6 on; this very run has written the file
            kwargs["weights_only"] = False
        original(checkpoint, *args, **kwargs)

    connector.resume_start = resume_start  # type: ignore[method-assign]


def stop_sigterm_broadcast(trainer: Trainer) -> Callable[[], None]:
    """Stops the loop's broadcast before every batch, which would make all ranks wait for each other; returns undo."""
    loop = trainer.fit_loop.epoch_loop
    setattr(loop, "_broadcast_sigterm_tensor", lambda: None)  # noqa: B010 - an instance attribute over a method

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


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


@contextmanager
def as_batch(trainer: Trainer, batch: Any) -> Iterator[None]:
    """Inside, values logged belong to ``batch``: another one within the same step of the loop."""
    results = trainer._results
    assert results is not None
    before = results.batch, results.batch_size
    results.batch, results.batch_size = batch, None
    try:
        yield
    finally:
        results.batch, results.batch_size = before


@contextmanager
def steps_uncounted(trainer: Trainer) -> Iterator[None]:
    """Inside, the steps of manual optimization do not count: they belong to a batch already counted."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    before = [(p, p.ready, p.completed) for p in (progress.total, progress.current)]
    try:
        yield
    finally:
        for tracker, ready, completed in before:
            tracker.ready, tracker.completed = ready, completed


def run_again(trainer: Trainer, batch: Any, batch_idx: int, optimizer: Any, *, zero: bool = True) -> Callable[[], Any]:
    """Returns the loop's closure (training step, zeroing, backward) for another batch within the same step.

    Args:
        zero: let it zero the gradients as for the first batch of an accumulation window.
    """
    loop = trainer.fit_loop.epoch_loop
    kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
    optimization = loop.automatic_optimization
    closure = optimization._make_closure(kwargs, optimizer, batch_idx)
    if not zero:
        closure._zero_grad_fn = None
    return closure


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

    with _patched(trainer.precision_plugin, "clip_gradients", clip):
        yield


def averaged_weights(trainer: Trainer) -> list[Tensor]:
    """Parameters and buffers that Lightning's `WeightAveraging` callbacks (2.6 and later) keep of the model."""
    models = [getattr(callback, "_average_model", None) for callback in trainer_callbacks(trainer)]
    averages = [m for m in models if isinstance(m, torch.optim.swa_utils.AveragedModel)]
    return [tensor for model in averages for tensor in (*model.parameters(), *model.buffers())]
