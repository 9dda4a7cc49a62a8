"""`StragglerMonitor`: who is slow, who waits, and how good the prediction was (layer L)."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hetero.callbacks.reporting import EventSource, Reporting, reporting_of
from lightning_hetero.callbacks.samples import count_samples
from lightning_hetero.cluster.score import imbalance, straggler_scores
from lightning_hetero.lightning_compat import log_interval
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from lightning_hetero.types import Event, SpeedSample

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["StragglerMonitor"]


class StragglerMonitor(Callback, EventSource):
    """Logs ``hetero/*`` and shows the imbalance on the progress bar.

    Per rank: ``share`` [samples], ``compute_s`` (own work), ``wait_s`` (in the gradient exchange), ``predicted_s``,
    ``score`` (speed relative to the fastest rank), and over the ranks ``max`` and ``min``;
    ``hetero/imbalance`` is the slowest rank's work over the mean (1.0 = balanced).

    With an engine of this package the values come from what its ranks exchange anyway, at no cost, and the engine may
    add its own (``engine_metrics() -> dict``; see its page in docs/). With stock DDP the monitor times its own rank and
    gathers means once per epoch, so the same numbers tell what the engine would gain.

    At the end of the fit one line tells the final shares and what equal ones would have cost.

    Args:
        every_n_steps: log every n optimizer steps and in each epoch's last; ``None``: the Trainer's
            ``log_every_n_steps``.
        prog_bar: show the imbalance on the progress bar.
        most_ranks: with more ranks than this, log only ``max`` and ``min`` over them.
    """

    def __init__(self, *, every_n_steps: int | None = None, prog_bar: bool = True, most_ranks: int = 16) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r} must be at least 1")
        self.every_n_steps = every_n_steps
        self.prog_bar = prog_bar
        self.most_ranks = most_ranks
        self._strategy: Reporting | None = None  # of the running fit
        self._own: _OwnTiming | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy = reporting_of(trainer)
        self._own = _OwnTiming(trainer, pl_module) if self._strategy is None else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._own is not None:
            self._own.open(count_samples(trainer, batch), trainer.current_epoch, batch_idx)

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
        if self._strategy is None:
            return
        every = self.every_n_steps or log_interval(trainer)
        if not trainer.is_last_batch and (not every or trainer.global_step % every):
            return
        report = self._strategy.step_report()
        if report is not None:
            self._log(trainer, pl_module, report.records, report.predicted_s, on_step=True)
        if values := self._strategy.engine_metrics():
            named = {f"hetero/{name}": float(value) for name, value in values.items()}
            pl_module.log_dict(named, logger=bool(trainer.loggers), on_step=True, on_epoch=False, batch_size=1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is None:
            return
        means = self._own.take_means().to(trainer.strategy.root_device)
        rows = trainer.strategy.all_gather(means).reshape(-1, 3).tolist()
        records = [
            SpeedSample(rank=r, step=0, samples=round(row[0]), compute_s=row[1], wait_s=row[2])
            for r, row in enumerate(rows)
        ]
        self._log(trainer, pl_module, records, [math.nan] * len(records), on_step=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is not None:
            self._own.probe.detach()
        elif self._strategy is not None and (summary := self._strategy.summary()):
            rank_zero_info(summary)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._own is not None:
            self._own.probe.detach()

    def step_events(self) -> list[Event]:
        """Returns and forgets this rank's step events; only with a strategy that has none of its own."""
        return self._own.take_events() if self._own is not None else []

    def _log(
        self, trainer: Trainer, pl_module: LightningModule, records: Any, predicted_s: Any, *, on_step: bool
    ) -> None:
        columns = {
            "share": [float(r.samples) for r in records],
            "compute_s": [r.compute_s for r in records],
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
        # All ranks log the same values; the maximum over them keeps Lightning from advising to synchronise.
        # Without a logger Lightning would warn of every name.
        where = {"on_step": on_step, "on_epoch": not on_step, "batch_size": 1, "logger": bool(trainer.loggers)}
        where |= {} if on_step else {"sync_dist": True, "reduce_fx": "max"}
        pl_module.log_dict(values, **where)
        unevenness = imbalance(columns["compute_s"])
        if not math.isnan(unevenness):
            pl_module.log("hetero/imbalance", unevenness, prog_bar=self.prog_bar, **where)


class _OwnTiming:
    """Times this rank's steps under a strategy that does not."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.probe = StepProbe(trainer.strategy.root_device, waiting=(nn.SyncBatchNorm,))
        self.probe.attach(module)
        self._rank = trainer.global_rank
        self._sizes: deque[tuple[int, int, int]] = deque()
        self._rows: list[tuple[float, float, float]] = []
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
        self._rows.append((float(samples), compute_s, wait_s))
        data = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
        self._events.append(
            Event(kind="step", rank=self._rank, epoch=epoch, step=step, t_s=self._clock_s, data=data)
        )

    def take_means(self) -> Tensor:
        rows, self._rows = self._rows, []
        return torch.tensor(rows, dtype=torch.float64).mean(0) if rows else torch.zeros(3, dtype=torch.float64)

    def take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events
