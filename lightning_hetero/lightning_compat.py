"""Every private name of Lightning and torchmetrics we need, in one place (layer L).

Each function says what it reads, why no public way exists, and which test pins it to the installed versions
(`tests/ranks/test_lightning_compat.py`). Verified with Lightning 2.5 and 2.6.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = [
    "batch_results_open",
    "batches_trained",
    "dummy_batch_unlogged",
    "epoch_running",
    "keep_train_sampler",
    "last_batch_done",
    "log_interval",
    "metrics_frozen",
    "overfits",
    "train_loaders",
    "trainer_callbacks",
    "upcoming_batch",
    "uses_dataloader_iter",
    "uses_distributed_sampler",
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


def last_batch_done(trainer: Trainer) -> bool:
    """Whether the checkpoint or the loop stands behind the last batch of an epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def train_loaders(trainer: Trainer) -> list[Any]:
    """The processed train loaders in order. Public ``trainer.train_dataloader`` gives them in the user's nesting."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


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
