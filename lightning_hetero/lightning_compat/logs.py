"""``self.log`` diverted and made again, and metrics combined over some of the ranks only (layer L).

Lightning's `ThroughputMonitor` counting what all ranks have trained.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torchmetrics import Metric

from lightning_hetero.lightning_compat.batches import trainer_callbacks
from lightning_hetero.lightning_compat.patches import replace_methods


def results_of(trainer: Trainer) -> Any:
    """Where values logged now are collected; None in a prediction. Its identity tells one loop's from another's."""
    return trainer._results


def running_hook(trainer: Trainer) -> str | None:
    """Name of the module's hook that Lightning is calling, which values are logged for."""
    return trainer.lightning_module._current_fx_name


def divert_logs(trainer: Trainer, take: Callable[..., None]) -> Callable[[], None]:
    """Lets ``take(log, fx, name, value, **options)`` have what ``self.log`` has found valid; returns the undo function.

    ``log`` is what Lightning would have called. A user's own ``log`` method and Lightning's checks run before, as does
    ``log_dict``; there is no public place behind them.
    """
    results: Any = trainer._results
    log = functools.partial(type(results).log, results)
    return replace_methods(results, log=functools.partial(take, log))


def logged_reduction(fx: str, name: str, options: Mapping[str, Any]) -> str:
    """Returns ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

    Raises:
        MisconfigurationException: Lightning's own, where the options of a log call do not go together.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata

    meta = _Metadata(
        fx=fx, name=name, on_step=options["on_step"], on_epoch=options["on_epoch"], reduce_fx=options["reduce_fx"]
    )
    if meta.is_mean_reduction:
        return "mean"
    return "sum" if meta.is_sum_reduction else "min" if meta.is_min_reduction else "max"


def size_of_batch(trainer: Trainer, *, required: bool, batch: Any = None) -> int:
    """Returns the samples of a batch, as Lightning counts them for a mean over an epoch.

    Args:
        batch: None: the loop's.
        required: raise where they cannot be counted, as Lightning does for such a mean; else 1.

    Raises:
        MisconfigurationException: Lightning's own.
    """
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    results = trainer._results
    if results is None or (batch is None and results.batch is None):
        return 1
    if batch is None and results.batch_size is not None:
        return results.batch_size
    try:
        size: int = extract_batch_size(results.batch if batch is None else batch)  # pyright: ignore[reportArgumentType]
    except MisconfigurationException:
        if required:
            raise
        return 1
    if batch is None:
        results.batch_size = size
    return size


def log_again(
    trainer: Trainer, fx: str, name: str, value: Tensor | Metric, *, batch_size: int,
    step_value: Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    """Logs a value that is equal on all ranks, as ``self.log`` would in hook ``fx``, past its checks.

    What was accumulated is taken for synchronised, so that an epoch's end neither communicates nor recommends to.

    Args:
        value: a tensor; or a metric, which synchronises itself.
        batch_size: weight in the epoch's mean.
        step_value: of a metric: what is shown on this step instead of its last value.
        options: of `_ResultCollection.log`.
    """
    connector, results = trainer._logger_connector, results_of(trainer)
    if connector.should_reset_tensors(fx):  # the first values of an epoch
        results.reset(metrics=False, fx=fx)
    options = {**options, "sync_dist": True, "sync_dist_fn": _as_it_is}
    type(results).log(results, fx, name, value, batch_size=batch_size, **options)
    if step_value is not None:
        key = f"{fx}.{name}"
        if options["add_dataloader_idx"] and results.dataloader_idx is not None:
            key += f".{results.dataloader_idx}"
        results[key]._forward_cache = step_value
    connector._current_fx = fx


def _as_it_is(value: Tensor, **_: Any) -> Tensor:
    return value


# ---- metrics ---------------------------------------------------------------------------------------------------


def combine_metric_with(
    metric: Metric, gather: Callable[[Any], Sequence[Any]], *, inside: Callable[[], bool],
    computed: Callable[[Metric], object],
) -> Callable[[], None]:  # fmt: skip
    """Lets a metric's ``compute`` combine the states of those ranks that have updated it; returns the undo function.

    torchmetrics takes every rank of the group for one with data. From one without, a list of rows of scores comes as an
    empty list of numbers, which cannot be gathered; a mean of means counts it; and its ``compute`` warns. Public
    ``dist_sync_fn`` is asked tensor by tensor, which is too late.

    Args:
        metric: of the module; the same one on all ranks.
        gather: returns all ranks' objects in order; a collective.
        inside: whether this rank is in a step that the others are not in, so that nothing can be gathered.
        computed: told of the metric, or a copy of it, before it keeps a value; see `forget_computed`.
    """

    def _sync_dist(self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        if undone:  # a copy that was made before
            return type(self)._sync_dist(self, dist_sync_fn, process_group)
        computed(self)
        if not inside():
            states = {name: _moved(getattr(self, name), torch.device("cpu")) for name in self._reductions}
            updates = vars(self).get("_own_update_count", self._update_count)
            everyone = [state for state in gather(states if updates else None) if state is not None]
            _put_together(self, everyone or [states])

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        count = self._update_count
        self.__dict__["_own_update_count"] = count
        self._update_count = max(1, count)  # what has no updates here may have some elsewhere
        try:
            return original(*args, **kwargs)
        finally:
            self._update_count = count
            del self.__dict__["_own_update_count"]

    undone = False
    original = metric.compute
    functools.update_wrapper(compute, original)
    # Methods, so that a copy of the metric has copies that belong to it.
    metric._sync_dist = types.MethodType(_sync_dist, metric)  # type: ignore[method-assign]
    metric.compute = types.MethodType(compute, metric)  # type: ignore[method-assign]

    def undo() -> None:
        nonlocal undone
        undone = True
        vars(metric).pop("_sync_dist", None)
        metric.compute = original  # type: ignore[method-assign]

    return undo


def forget_computed(metrics: list[Metric]) -> None:
    """Lets metrics compute again, and empties the list.

    An update does so on the ranks that make it. The others would return what they have kept, while those gather.
    """
    while metrics:
        metrics.pop()._computed = None


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_moved(item, device) for item in state]
    return state.detach().to(device) if isinstance(state, Tensor) else state


def _put_together(metric: Any, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Sets the states to the ranks' together, as torchmetrics does: stacked or in one list, then reduced."""
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in everyone]
        if all(isinstance(value, Tensor) for value in values):
            together: Any = torch.stack(values).to(metric.device)
        else:
            items = [item for value in values for item in (value if isinstance(value, list) else [value])]
            together = _moved(items, metric.device)
        if reduction is not None and len(together):
            together = reduction(together)
        setattr(metric, name, together)


Trained = Callable[[], tuple[int, int] | None]
"""Returns the samples of all ranks and the global batches trained so far; None: parts are equal."""


def count_throughput(trainer: Trainer, trained: Trained) -> Callable[[], None]:
    """Lets the Trainer's monitors of throughput count what all ranks have trained; returns undo.

    They multiply rank 0's samples by the number of devices, although its part may be larger or smaller than others'.
    """

    def start(monitor: Any, trainer: Any) -> None:
        type(monitor)._start(monitor, trainer)
        if trainer.training:
            _AllRanks(monitor._throughputs[RunningStage.TRAINING], trained)

    undo = ExitStack()
    for monitor in trainer_callbacks(trainer):
        if isinstance(monitor, ThroughputMonitor):
            undo.callback(replace_methods(monitor, _start=functools.partial(start, monitor)))
    return undo.close


class _AllRanks:
    """Puts rates of all ranks instead of multiples of this rank's; those called ``device/`` stay its own.

    Items, e.g. tokens, are taken to be in proportion to samples.
    """

    def __init__(self, own: Throughput, trained: Trained) -> None:
        self._own, self._trained = own, trained
        self._all = Throughput(window_size=own._time.maxlen, separator=own.separator)
        self._begin = trained() or (0, 0)
        self._before, self._items = (0, 0, 0), 0  # samples of all, own samples and items
        own.update, own.compute = self.update, self.compute  # type: ignore[method-assign]

    def update(self, *, time: float, batches: int, samples: int, lengths: Any = None, flops: Any = None) -> None:
        own = self._own
        type(own).update(own, time=time, batches=batches, samples=samples, lengths=lengths, flops=flops)
        if (now := self._trained()) is None:
            return
        everyone, steps = (a - b for a, b in zip(now, self._begin, strict=True))
        if lengths is not None:
            new, own_new, own_items = everyone - self._before[0], samples - self._before[1], lengths - self._before[2]
            self._items += max(new, round(new * own_items / own_new))
        self._before = everyone, samples, lengths or 0
        items = None if lengths is None else self._items
        self._all.update(time=time, batches=steps, samples=everyone, lengths=items)

    def compute(self) -> dict[str, Any]:
        own = self._own
        metrics, device = type(own).compute(own), f"device{own.separator}"
        for name, value in self._all.compute().items() if self._all._time else ():
            name = name.removeprefix(device)
            if name in metrics and name.endswith("_per_sec"):
                metrics[name] = value * own.world_size if name.startswith("batches") else value
        return metrics
