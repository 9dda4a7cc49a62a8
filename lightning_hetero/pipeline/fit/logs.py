"""What a step logs: collected from its micro-batches on the leaders, logged once, the same on all ranks (layer L).

    leader of group 0:   loss 0.9 (8 samples), loss 0.7 (4 samples) \\
    leader of group 1:   loss 0.4 (6 samples)                        >  all ranks: self.log("loss", 0.66, batch_size=18)
    all other ranks:     nothing                                    /

Lightning's loggers, callbacks and progress bar then behave as under one process with the whole global batch, on any
rank, and the end of an epoch has nothing left to reduce. Step by step all ranks exchange a few numbers per logged name;
names and arguments only when a rank has logged something that not all ranks know of.

| logged                          | shown on the step                          | shown of the epoch                  |
|---------------------------------|--------------------------------------------|-------------------------------------|
| a number, ``reduce_fx="mean"``  | mean over micro-batches, by their weight   | mean over steps, by sums of weights |
| ``"sum"``, ``"min"``, ``"max"`` | that of the micro-batches of all groups    | that of the steps                   |
| a torchmetrics Metric           | mean of what it returned for micro-batches | its own, from all leaders' states   |

The weight is the ``batch_size`` given to ``self.log``, or the samples of the micro-batch.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_hetero import lightning_compat as compat
from lightning_hetero.transport.one_round import start_sum
from lightning_hetero.transport.side_channel import SideChannel

_SAME = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute", "rank_zero_only")
"""Arguments of a log call that are agreed by all ranks as they were given; the others are settled here."""


@dataclass(frozen=True, slots=True)
class _Key:
    """One of the log calls of a step, told from the others.

    Attributes:
        name: as logged.
        call: how often the same was logged in this step before.
        reduction: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``; or ``"metric"``.
        options: of `_SAME`, in that order.
        dtype: of the value, e.g. ``"float32"``; the first one counts.
    """

    name: str
    call: int
    reduction: str
    options: tuple[Any, ...]
    dtype: str = field(compare=False)


@dataclass(slots=True)
class _Sums:
    """Sums of the values logged under one key.

    Attributes:
        weighted, weight: sums of weight times value, and of the weights.
        plain, times: sum of the values, and how many there were.
        extreme: the largest value, or with its sign changed the smallest.
    """

    weighted: float = 0.0
    weight: float = 0.0
    plain: float = 0.0
    times: float = 0.0
    extreme: float = -math.inf

    def add(self, value: float | None, weight: float, reduction: str) -> None:
        self.times += 1
        if value is None:
            return
        self.plain += value
        if weight > 0:  # 0 * NaN is NaN
            self.weighted += weight * value
            self.weight += weight
        sign = -1.0 if reduction == "min" else 1.0
        self.extreme = sign * value if math.isnan(value) else max(self.extreme, sign * value)


@dataclass(slots=True)
class _Record:
    """What one micro-batch has logged."""

    samples: int | None
    batch: Any
    entries: list[tuple[_Key, Tensor | float | None, float]] = field(default_factory=list)


_CURRENT: contextvars.ContextVar[_Record | None] = contextvars.ContextVar("logging_micro_batch", default=None)


class StepLogs:
    """Stands between ``self.log`` in a step and Lightning, for one module on one rank.

    Args:
        module: with a trainer; its metrics are known by then.
        channel: over all ranks of the run, those that log nothing, too.
        wait: waits for a collective, e.g. with a look at what became of the others.
    """

    def __init__(
        self, module: LightningModule, channel: SideChannel, *, wait: Callable[[dist.Work], object] = dist.Work.wait
    ) -> None:
        self._module = module
        self._channel = channel
        self._wait = wait
        self._tables: dict[str, dict[_Key, None]] = {}  # by hook: the keys that all ranks know, in order
        self._records: list[_Record] = []
        self._open = 0
        self._stop_diverting: Callable[[], None] = lambda: None
        self._watched: dict[int, tuple[Metric, Callable[[], None]]] = {}
        self._computed: list[Metric] = []  # since the last step
        for metric in compat.metrics_of(module):
            self._watch(metric)

    # ---- collecting ------------------------------------------------------------------------------------------------

    @contextmanager
    def collecting(self, samples: int | None, batch: Any = None) -> Iterator[None]:
        """Inside, ``self.log`` and ``self.log_dict`` are noted for this micro-batch instead of executed.

        To be entered by the body of the step, which may be suspended meanwhile and others begun: what is logged belongs
        to the body that logs. Errors of ``self.log`` are Lightning's own.

        Args:
            samples: of the micro-batch; None: a whole batch, of which Lightning finds the size.
            batch: this batch; None: the loop's.
        """
        record = _Record(samples, batch)
        results = compat.results_of(self._module.trainer)
        if results is None:  # a prediction: Lightning's own error says that it logs nothing
            yield
            return
        if not self._open:
            self._stop_diverting = compat.divert_logs(self._module.trainer, self._take)
        self._open += 1
        self._records.append(record)
        token = _CURRENT.set(record)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self._open -= 1
            if not self._open:
                self._stop_diverting()

    def _take(self, log: Callable[..., None], fx: str, name: str, value: Tensor | Metric, **options: Any) -> None:
        record = _CURRENT.get()
        if record is None:
            log(fx, name, value, **options)
            return
        reduction = compat.logged_reduction(fx, name, options)
        shown: Tensor | None
        if isinstance(value, Metric):
            last = getattr(value, "_forward_cache", None)  # what self.log would show
            scalar = isinstance(last, Tensor) and last.numel() == 1 and options["on_step"]
            reduction, shown = "metric", last.detach() if scalar else None  # type: ignore[union-attr]
        else:
            shown = value.detach()
        dtype = torch.get_default_dtype() if shown is None or not shown.is_floating_point() else shown.dtype
        dtype = torch.promote_types(dtype, torch.float32)
        same = tuple(options.get(option) for option in _SAME)
        call = sum((k.name, k.reduction, k.options) == (name, reduction, same) for k, _, _ in record.entries)
        key = _Key(name, call, reduction, same, str(dtype).removeprefix("torch."))
        weight = record.samples if options.get("batch_size") is None else options["batch_size"]
        if weight is None:
            needed = reduction == "mean" and options["on_epoch"]
            weight = compat.size_of_batch(self._module.trainer, required=needed, batch=record.batch)
        record.entries.append((key, shown, float(weight)))

    def read(self, values: Sequence[Tensor | float]) -> list[float]:
        """Returns the values as numbers, and reads with them what was collected: so the device is waited for once."""
        logged = [value for record in self._records for _, value, _ in record.entries]
        numbers = iter(_numbers([*values, *logged]))
        found = [float(number) for _, number in zip(values, numbers, strict=False) if number is not None]
        for record in self._records:
            record.entries = [(key, next(numbers), weight) for key, _, weight in record.entries]
        return found

    # ---- publishing ------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Logs what was collected on any rank since the last call; a collective, in the same hook on all ranks.

        Raises:
            MisconfigurationException, RuntimeError: as `send`, and what it returns.
        """
        self.send()()

    def send(self, extra: Sequence[float] = ()) -> Callable[[], list[float]]:
        """Starts `publish`; the rest, which waits for all ranks and logs, is what it returns, called in the same hook.

        Args:
            extra: other numbers, to be summed over the ranks by the same message; as many on every rank.

        Returns:
            To be called once, on all ranks; it returns the sums of the other numbers, in float64. It raises
            MisconfigurationException, Lightning's, e.g. for one name logged with different arguments, on all ranks;
            RuntimeError if a metric was logged that other ranks do not have.

        Raises:
            RuntimeError: not called within a hook of the module.
        """
        records, self._records = self._records, []
        compat.forget_computed(self._computed)
        trainer = self._module.trainer
        if compat.results_of(trainer) is None or getattr(trainer, "barebones", False):
            return self._start_sum(extra) if extra else list
        fx = compat.running_hook(trainer)
        if fx is None:
            raise RuntimeError("StepLogs.send() is for the hook that logs, e.g. within the strategy's training_step")
        table, mine, others = self._tables.setdefault(fx, {}), _summed(records), list(extra)
        first = self._start_exchange(table, mine, others)

        def receive() -> list[float]:
            sums, totals = self._exchanged(table, mine, others, first)
            for key, total in totals.items():
                if total.times > 0:
                    self._log(fx, key, total)
            return sums

        return receive

    def _log(self, fx: str, key: _Key, total: _Sums) -> None:
        options: dict[str, Any] = dict(zip(_SAME, key.options, strict=True))
        mean = total.weighted / total.weight if total.weight > 0 else total.plain / total.times
        number = {"sum": total.plain, "max": total.extreme, "min": -total.extreme}.get(key.reduction, mean)
        value = torch.full((), number, dtype=getattr(torch, key.dtype), device=self._module.device)
        if key.reduction == "metric":
            shown = value if total.weight > 0 else None
            metric = self._metric(key.name, options["metric_attribute"])
            compat.log_again(self._module.trainer, fx, key.name, metric, batch_size=1, step_value=shown, **options)
            return
        weight = int(total.weight) if total.weight.is_integer() else total.weight
        options["reduce_fx"] = key.reduction
        compat.log_again(self._module.trainer, fx, key.name, value, batch_size=weight, **options)  # type: ignore[arg-type]

    def _metric(self, name: str, attribute: str) -> Metric:
        try:
            metric = self._module.get_submodule(attribute)
        except AttributeError:
            metric = None
        if not isinstance(metric, Metric):
            raise RuntimeError(
                f"self.log({name!r}, ...) logs the metric {attribute!r}, which this rank's module does not have: make"
                " it an attribute of the LightningModule in the constructor or in setup()"
            )
        self._watch(metric)
        return metric

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def _start_exchange(
        self, table: Mapping[_Key, None], mine: Mapping[_Key, _Sums], extra: list[float]
    ) -> Callable[[], list[float]]:
        """Starts to sum: ranks whose keys are not all in the table; the other numbers; those of the table's keys."""
        own = [mine.get(key) or _Sums() for key in table]
        numbers = [x for s in own for x in (s.weighted, s.weight, s.plain, s.times)]
        return self._start_sum([float(any(key not in table for key in mine)), *extra, *numbers])

    def _exchanged(
        self, table: dict[_Key, None], mine: dict[_Key, _Sums], extra: list[float],
        message: Callable[[], list[float]],
    ) -> tuple[list[float], dict[_Key, _Sums]]:  # fmt: skip
        """Returns sums over all ranks: of the other numbers; and by key, in the order of the table.

        The table is extended where a rank needs it, and the message repeated.
        """
        while True:
            found, *packed = message()
            if not found:
                break
            for keys in self._channel.all_gather_object([key for key in mine if key not in table]):
                table.update((key, None) for key in keys)
            message = self._start_exchange(table, mine, extra)
        own = [mine.get(key) or _Sums() for key in table]
        sums, packed = packed[: len(extra)], packed[len(extra) :]
        totals = {key: _Sums(*packed[4 * i : 4 * i + 4]) for i, key in enumerate(table)}
        ends = [i for i, key in enumerate(table) if key.reduction in ("min", "max")]
        if ends:
            keys = list(table)
            extremes = self._start_sum([own[i].extreme for i in ends], largest=True)()
            for i, extreme in zip(ends, extremes, strict=True):
                totals[keys[i]].extreme = math.nan if math.isnan(totals[keys[i]].plain) else extreme
        return sums, totals

    def _start_sum(self, numbers: Sequence[float], *, largest: bool = False) -> Callable[[], list[float]]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        under_way = start_sum(tensor, self._channel.group, largest=largest)

        def wait() -> list[float]:
            self._wait(under_way.work)
            return under_way.result().tolist()

        return wait

    # ---- metrics ---------------------------------------------------------------------------------------------------

    def _watch(self, metric: Metric) -> None:
        """Lets a metric's ``compute`` combine the states of the ranks that have updated it, wherever it is called."""
        if id(metric) not in self._watched:
            gather = self._channel.all_gather_object
            undo = compat.combine_metric_with(
                metric, gather, inside=lambda: _CURRENT.get() is not None, computed=self._computed.append
            )
            self._watched[id(metric)] = (metric, undo)

    def close(self) -> None:
        """Gives ``self.log`` and the metrics back."""
        for _, undo in self._watched.values():
            undo()


def _summed(records: Sequence[_Record]) -> dict[_Key, _Sums]:
    """Returns the sums by key, in the order of the first micro-batch that logged it."""
    entries = [entry for record in records for entry in record.entries]
    values = _numbers([value for _, value, _ in entries])
    sums: dict[_Key, _Sums] = {}
    for (key, _, weight), value in zip(entries, values, strict=True):
        sums.setdefault(key, _Sums()).add(value, weight, key.reduction)
    return sums


def _numbers(values: Sequence[Tensor | float | None]) -> list[float | None]:
    """Returns the values, with one wait per device."""
    numbers: list[float | None] = [None if isinstance(value, Tensor) else value for value in values]
    tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, Tensor)]
    for device in {value.device for _, value in tensors}:
        where = [(i, value) for i, value in tensors if value.device == device]
        stacked = torch.stack([value.reshape(()).to(torch.float64) for _, value in where])
        for (i, _), number in zip(where, stacked.tolist(), strict=True):
            numbers[i] = number
    return numbers
