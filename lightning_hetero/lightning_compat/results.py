"""Values logged and metrics updated: what a batch counts in them, and what is reduced over ranks (layer L)."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric
from tqdm.auto import tqdm

from lightning_hetero.lightning_compat.patches import patched, replace_methods


def log_interval(trainer: Trainer) -> int:
    """``log_every_n_steps``; public, set by a connector."""
    return trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]


def show_on_progress_bar(trainer: Trainer, name: str, value: str) -> None:
    """Puts a text on the progress bar and nowhere else, on this rank.

    ``self.log`` would put it into ``callback_metrics``, too; reading public ``progress_bar_metrics`` in order to change
    them reduces over ranks at an epoch's end.
    """
    trainer._logger_connector._progress_bar_metrics[name] = value  # pyright: ignore[reportArgumentType]


def tell_past_bar(text: str) -> None:
    """As ``rank_zero_info``, above a progress bar that is being drawn, not into it.

    A bar of tqdm is cleared for the moment; one of Rich takes in what is written to ``sys.stderr`` meanwhile, which is
    not what Lightning's handlers have kept.
    """
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")  # the last one tells
    loggers = [logging.getLogger(name) for name in names]
    handlers = [h for logger in loggers for h in logger.handlers if type(h) is logging.StreamHandler]
    with tqdm.external_write_mode():
        before = [(handler, stream) for handler in handlers if (stream := handler.setStream(sys.stderr)) is not None]
        rank_zero_info(text)
        for handler, stream in before:
            handler.setStream(stream)


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


def batch_results_open(trainer: Trainer) -> bool:
    """Whether values logged now belong to one training batch (and not to an epoch's end)."""
    if not trainer.training:
        return False
    results, connector = trainer._results, trainer._logger_connector
    # A hook that skips the rest of an epoch leaves its batch there; the connector knows that the epoch's end has come.
    return results is not None and results.batch is not None and connector._first_loop_iter is not None


def weigh_logs(
    trainer: Trainer, samples: Callable[[], int | None], constant: Callable[[int], bool]
) -> Callable[[], None]:
    """Lets what is logged in a training batch count this rank's samples in the mean of an epoch; returns undo.

    Lightning infers the number from a tensor of the batch, which may have time steps, nodes or classes in front. Of
    batches of one size that cancels out; of parts of unequal size it does not.

    Args:
        samples: of the batch that begins, on this rank; None: as Lightning infers them.
        constant: whether a given ``batch_size=`` stands for equal parts, and the samples are to be counted instead.
    """
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results

    def on_batch_start(batch: Any, *args: Any, **kwargs: Any) -> None:
        type(connector).on_batch_start(connector, batch, *args, **kwargs)
        if trainer._results is results:
            results.batch_size = samples()

    def extract(value: Any, batch_size: int | None, meta: Any) -> int:
        if batch_size is not None and results.batch_size is not None and constant(batch_size):
            batch_size = None
        return type(results)._extract_batch_size(results, value, batch_size, meta)

    undo = ExitStack()
    undo.callback(replace_methods(connector, on_batch_start=on_batch_start))
    undo.callback(replace_methods(results, _extract_batch_size=extract))
    return undo.close


@contextmanager
def as_batch(trainer: Trainer, batch: Any, samples: int | None = None) -> Iterator[None]:
    """Inside, values logged belong to ``batch``, of so many samples: another one within the same step of the loop."""
    results: Any = trainer._results
    with patched(results, "batch", batch), patched(results, "batch_size", samples):
        yield


@contextmanager
def unlogged(module: LightningModule) -> Iterator[None]:
    """Inside, ``self.log`` does nothing: outside of a loop it would raise. ``log_dict`` ends up there, too.

    What is written to a logger directly is lost as well; Lightning's stand-in for loggers is not exported.
    """
    trainer = module.trainer
    with patched(module, "log", lambda *_, **__: None), ExitStack() as stack:
        stack.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        yield


@contextmanager
def dummy_batch_unlogged(trainer: Trainer) -> Iterator[None]:
    """Inside, ``self.log`` of a mean, sum, maximum or minimum counts nothing: a rank without samples trains on a dummy.

    A mean counts with batch size 0, and a NaN as 0; the others take their neutral element. Logged on a step without
    ``sync_dist``, the neutral element is what this rank shows.
    """
    results: Any = trainer._results
    if results is None:
        yield
        return

    def update(key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor):
            value = _neutral(results[key].meta, value)
        type(results).update_metrics(results, key, value, 0)

    with patched(results, "update_metrics", update):
        yield


def _neutral(meta: Any, value: Tensor) -> Tensor:
    """Returns what changes nothing under the reduction of a logged value; only its metadata say which it is."""
    if meta.is_mean_reduction:  # counts with weight 0, but 0 * NaN is NaN
        return torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
    if not value.is_floating_point():
        value = value.to(torch.float32)
    if meta.is_max_reduction or meta.is_min_reduction:
        return torch.full_like(value, -math.inf if meta.is_max_reduction else math.inf)
    return torch.zeros_like(value) if meta.is_sum_reduction else value


@contextmanager
def metrics_frozen(module: nn.Module) -> Iterator[None]:
    """Undoes every torchmetrics update made inside: a dummy batch must not count."""
    with ExitStack() as stack:
        stack.callback(save_metrics(module))
        yield


def save_metrics(module: nn.Module) -> Callable[[], None]:
    """Returns what puts the module's torchmetrics back as they are now, once.

    ``metric_state`` is public, the update counter and the cached value are not. What was updated meanwhile computes
    again: ranks whose updates stay have no cached value, and gather.
    """
    saved = [
        (m, {k: list(v) if isinstance(v, list) else v.clone() for k, v in m.metric_state.items()}, m._update_count,
         m._computed)
        for m in metrics_of(module)
    ]

    def put_back() -> None:
        for metric, state, count, computed in saved:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._computed = computed if metric._update_count == count else None
            metric._update_count = count

    return put_back


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns the module's torchmetrics."""
    return [metric for metric in module.modules() if isinstance(metric, Metric)]


def watch_epoch_values(trainer: Trainer, note: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Has ``note(take_back)`` called before a value logged in training counts in its epoch; returns the undo function.

    ``take_back`` leaves the value of the step as it is. There is no public place behind ``self.log``'s checks; an
    update makes new tensors, so that the old ones are all there is to keep.
    """
    results: Any = trainer.fit_loop.epoch_loop._results

    def update(key: str, value: Any, batch_size: int) -> None:
        metric = results[key]
        if metric.is_tensor and metric.meta.on_epoch:
            before = {name: vars(metric)[name] for name in ("value", "cumulated_batch_size") if name in vars(metric)}

            def take_back() -> None:  # in the type that the other ranks have
                vars(metric).update({n: old.to(vars(metric)[n]) for n, old in before.items()}, _computed=None)

            note(take_back)
        type(results).update_metrics(results, key, value, batch_size)

    return replace_methods(results, update_metrics=update)


def save_logs(trainer: Trainer) -> Callable[[], None]:
    """Returns what puts the values logged by ``self.log`` back as they are now, once.

    An update makes new tensors, so what a value's collector refers to is all there is to keep; besides that, whether an
    epoch's first values have come, and what the results know of the batch.
    """
    results, connector = trainer._results, trainer._logger_connector
    if results is None:
        return lambda: None
    saved = {key: (metric, dict(vars(metric))) for key, metric in results.items()}
    batch, fx = (results.batch, results.batch_size), connector._current_fx

    def put_back() -> None:
        for key in results.keys() - saved.keys():
            del results[key]
        for metric, state in saved.values():
            vars(metric).clear()
            vars(metric).update(state)
        (results.batch, results.batch_size), connector._current_fx = batch, fx

    return put_back
