"""`StragglerMonitor`: who is slow, who waits, and how good the prediction was (layer L)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.reporting import EventSource, Reporting, reporting_of
from lightning_hetero.callbacks.samples import count_samples
from lightning_hetero.cluster.score import imbalance, straggler_scores
from lightning_hetero.cluster.what_if import exchange_alone, what_if
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from lightning_hetero.types import Event, SpeedSample

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["StragglerMonitor"]


class StragglerMonitor(Callback, EventSource):
    """Gives ``hetero/*`` to the Trainer's loggers and shows the imbalance on the progress bar.

    Per rank: ``share`` [samples], ``compute_s`` (own work), ``wait_s`` (in the gradient exchange), ``predicted_s``,
    ``score`` (speed relative to the fastest rank), and over the ranks ``max`` and ``min``;
    ``hetero/imbalance`` is the slowest rank's work over the mean (1.0 = balanced).

    As with Lightning's `DeviceStatsMonitor` only rank 0 reports, and straight to ``trainer.loggers``: nothing comes
    into ``callback_metrics`` or ``logged_metrics``. Nothing is built or sent in steps that are not reported.

    With an engine of this package the values come from what its ranks exchange anyway, and the engine may add its own
    (``engine_metrics() -> dict``; see its page in docs/); at the end of the fit one line tells who did what. With stock
    DDP the monitor times its own rank, gathers means once per epoch, and tells at the end how long ranks waited and
    what each engine would give, see `lightning_hetero.cluster.what_if`.

    Args:
        every_n_steps: report every n optimizer steps and in each epoch's last; ``None``: the Trainer's
            ``log_every_n_steps``.
        prog_bar: show the imbalance on the progress bar.
        most_ranks: with more ranks than this, report only ``max`` and ``min`` over them.

    Raises:
        ValueError: ``every_n_steps`` < 1.
    """

    def __init__(self, *, every_n_steps: int | None = None, prog_bar: bool = True, most_ranks: int = 16) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} must be at least 1")
        self.every_n_steps = every_n_steps
        self.prog_bar = prog_bar
        self.most_ranks = most_ranks
        self._strategy: Reporting | None = None  # of the running fit, where this rank reports it
        self._due = False  # in this batch, or in the next that this rank trains on
        self._own: _OwnTiming | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, self._due = reporting_of(trainer), False
        self._own = _OwnTiming(trainer, pl_module) if strategy is None else None
        self._strategy = strategy if trainer.is_global_zero else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._own is not None:
            self._own.open(count_samples(trainer, batch), trainer.current_epoch, batch_idx)
        elif self._strategy is not None and self._is_due(trainer):
            self._strategy.ask_report()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._own is not None and loss.requires_grad:
            when_backward_ends(loss, self._own.probe.backward_ended)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is not None:
            self._own.backward_returned(more=not pl_module.automatic_optimization)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._own is not None:
            self._own.close()
        elif self._strategy is not None and self._is_due(trainer) and batch is not None:
            self._due = not self._report(trainer, self._strategy)

    def _is_due(self, trainer: Trainer) -> bool:
        if not (trainer.loggers or self.prog_bar):
            return False
        if not self._due:
            every = self.every_n_steps or compat.log_interval(trainer)
            reached = every > 0 and (compat.logging_step(trainer) + 1) % every == 0
            self._due = trainer.is_last_batch or (reached and not compat.accumulates_now(trainer))
        return self._due

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is None:
            return
        sums = self._own.take_sums().to(trainer.strategy.root_device)
        rows = trainer.strategy.all_gather(sums).reshape(-1, sums.numel()).cpu()
        if (rows[:, 0] > 0).all():
            self._own.fit_rows += rows
            values = self._values(_means(rows), [])
            # Lightning's own step of the epoch's values: the last batch's.
            self._show(trainer, values, step=compat.logging_step(trainer) - 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is not None:
            self._own.probe.detach()
            rows = self._own.fit_rows
            exchange_s = float((rows[:, 4] / rows[:, 0]).min())
            if (told := what_if(_means(rows), exchange_s)) is not None:
                rank_zero_info(told.text(steps=int(rows[0, 0])))
        elif self._strategy is not None and (summary := self._strategy.summary()):
            rank_zero_info(summary)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._own is not None:
            self._own.probe.detach()

    def step_events(self) -> list[Event]:
        """Returns and forgets this rank's step events; only with a strategy that has none of its own."""
        return self._own.take_events() if self._own is not None else []

    def _report(self, trainer: Trainer, strategy: Reporting) -> bool:
        """Reports what is known; returns whether anything is."""
        values: dict[str, float] = {}
        if (report := strategy.step_report()) is not None:
            values = self._values(report.records, report.predicted_s)
        values |= {f"hetero/{name}": float(value) for name, value in strategy.engine_metrics().items()}
        self._show(trainer, values, step=compat.logging_step(trainer))
        return bool(values)

    def _values(self, records: Sequence[SpeedSample], predicted_s: Sequence[float]) -> dict[str, float]:
        compute_s = [r.compute_s for r in records]
        columns = {
            "share": [float(r.samples) for r in records],
            "compute_s": compute_s,
            "wait_s": [r.wait_s for r in records],
            "predicted_s": list(predicted_s),
            "score": straggler_scores(records),
        }
        values: dict[str, float] = {}
        for name, column in columns.items():
            known = [v for v in column if not math.isnan(v)]
            if not known:
                continue
            if len(column) <= self.most_ranks:
                values |= {f"hetero/{name}/rank{r}": v for r, v in enumerate(column)}
            values |= {f"hetero/{name}/max": max(known), f"hetero/{name}/min": min(known)}
        unevenness = imbalance(compute_s)
        return values if math.isnan(unevenness) else {**values, "hetero/imbalance": unevenness}

    def _show(self, trainer: Trainer, values: dict[str, float], *, step: int) -> None:
        if not (values and trainer.is_global_zero):
            return
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=step)
        if self.prog_bar and "hetero/imbalance" in values:
            compat.show_on_progress_bar(trainer, "hetero/imbalance", values["hetero/imbalance"])


def _means(rows: Tensor) -> list[SpeedSample]:
    """Returns a step of each rank, from its sums, see `_OwnTiming.take_sums`; nothing without steps."""
    if not (rows[:, 0] > 0).all():
        return []
    return [
        SpeedSample(rank=r, step=0, samples=round(samples / steps), compute_s=compute_s / steps, wait_s=wait_s / steps)
        for r, (steps, samples, compute_s, wait_s) in enumerate(rows[:, :4].tolist())
    ]


class _OwnTiming:
    """Times this rank's steps under a strategy that does not.

    Attributes:
        probe: the stopwatch.
        fit_rows: per rank, sums over the fit's epochs so far, see `take_sums`.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.probe = StepProbe(trainer.strategy.root_device, waiting=(nn.SyncBatchNorm,))
        self.probe.attach(module)
        self._rank = trainer.global_rank
        self._sizes: deque[tuple[int, int, int]] = deque()
        self._world_size = trainer.world_size
        self._sums = [0.0] * 4
        self._waits_s: deque[float] = deque(maxlen=4096)
        self.fit_rows = torch.zeros(self._world_size, 5, dtype=torch.float64)
        self._events: deque[Event] = deque(maxlen=4096)
        self._clock_s = 0.0

    def open(self, samples: int, epoch: int, step: int) -> None:
        self._sizes.append((epoch, step, samples))
        self.probe.arm()

    def backward_returned(self, *, more: bool) -> None:
        self.probe.exchanged()
        if more:
            self.probe.resume()

    def close(self) -> None:
        self.probe.close()
        compute_s = self.probe.take()
        if compute_s is None or not self._sizes:
            return
        epoch, step, samples = self._sizes.popleft()
        wait_s = self.probe.wait_s
        self._clock_s += compute_s + wait_s
        self._sums = [a + b for a, b in zip(self._sums, (1.0, samples, compute_s, wait_s), strict=True)]
        self._waits_s.append(wait_s)
        data = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
        self._events.append(
            Event(kind="step", rank=self._rank, epoch=epoch, step=step, t_s=self._clock_s, data=data)
        )

    def take_sums(self) -> Tensor:
        """Returns and forgets this epoch's sums over steps: 1, samples, own work, waiting, exchange alone [s]."""
        exchange_s = exchange_alone(self._waits_s, self._world_size)
        sums, self._sums = [*self._sums, self._sums[0] * exchange_s], [0.0] * 4
        self._waits_s.clear()
        return torch.tensor(sums, dtype=torch.float64)

    def take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events
