"""`StragglerMonitor`: which rank is slow, which waits, and how good the prediction was (layer L)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks import reporting
from lightning_hetero.cluster.score import StragglerTest, imbalance, last_lines, shares_text, straggler_scores
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from lightning_hetero.record.ledger import Spent, Tally, idle_in, spent_together, total_of, waited_in
from lightning_hetero.record.run import RunStep, Turn
from lightning_hetero.types import Event, SpeedSample, StepReport

_OFTEN = 50  # steps between two looks for stragglers under stock DDP, where nothing is logged
_SELDOM = 5  # and at least so many where all is logged: to send something costs as much as some hooks


class StragglerMonitor(Callback, reporting.EventSource):
    """Gives ``hetero/*`` to the Trainer's loggers; progress bars show shares and waiting, ``shares=21/11, wait=3%``.

    Per rank: ``share`` [samples], ``compute_s`` (own work), ``wait_s`` (in the gradient exchange), ``predicted_s``,
    ``score`` (speed relative to the fastest rank), ``straggler`` (1, or of a rank found to be slow its seconds per item
    over the others'), and over the ranks ``max`` and ``min``; ``hetero/imbalance`` is the slowest rank's work over the
    mean (1.0 = balanced), ``hetero/waiting`` the part of the ranks' time that is waiting, or,
    where waiting cannot be separated from the rest, ``hetero/idle`` the part that is not own work.

    A rank that has become slow is named in one line, once per fit: since which step, and by how much. A test watches
    seconds per item of work, see `lightning_hetero.cluster.score`, so that a long batch is no slow device.

    As with Lightning's `DeviceStatsMonitor` only rank 0 reports, and straight to ``trainer.loggers``: nothing comes
    into ``callback_metrics`` or ``logged_metrics``. Nothing is built or sent in steps that are not reported.

    With an engine of this package the values come from what its ranks exchange anyway, and the engine may add its own
    (``engine_metrics() -> dict``; see docs/reference/metrics.md); at the end of the fit one line says what each rank
    did. With stock DDP the monitor times its own rank and tells rank 0 of its steps every ``log_every_n_steps``, though
    not more often than every fifth step, to look for stragglers; no rank waits for it. It shows means once per epoch,
    and tells at the end how long ranks waited and what each engine would give, see `lightning_hetero.record.ledger`.

    Args:
        most_ranks: with more ranks than this, report only ``max`` and ``min`` over them; 0: only values of all ranks,
            e.g. ``hetero/imbalance`` and ``hetero/waiting``.
        batch_cost: under stock DDP, the work of this rank's batch, padding included, e.g. its tokens, where samples
            differ in it. Default: a method ``batch_cost`` of the module, else ``batch_weight``, else samples count. An
            engine of this package does its own counting, see `LoadBalancedStrategy`.

    Raises:
        TypeError: ``batch_cost`` is no function.
    """

    def __init__(self, *, most_ranks: int = 16, batch_cost: reporting.BatchCost | None = None) -> None:
        reporting.check_batch_cost(batch_cost)
        self.most_ranks, self.batch_cost = most_ranks, batch_cost
        self._strategy: reporting.Reporting | None = None  # of the running fit, where this rank reports it
        self._due = False  # in this batch, or in the next that this rank trains on
        self._own: _OwnTiming | None = None
        self._test = StragglerTest(0)
        self._named: set[int] = set()  # ranks that a line has told of
        # Steps that the ranks have told one another of: epoch, numbers, and rows (`take_steps`) once the work is done.
        self._told: tuple[int, range, list[Tensor], Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, self._due = reporting.reporting_of(trainer), False
        reporting.watch_again(self)
        self._own = _OwnTiming(trainer, pl_module, self.batch_cost) if strategy is None else None
        parts = trainer.world_size // (1 if strategy is None else strategy.ranks_per_part)
        self._test, self._named, self._told = StragglerTest(parts), set(), None
        if strategy is not None and self.batch_cost is not None:
            rank_zero_warn(
                "StragglerMonitor(batch_cost=...) has no effect under a strategy of lightning_hetero, which measures"
                " its own times: give it to LoadBalancedStrategy, or drop it"
            )
        self._strategy = strategy if trainer.is_global_zero else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        work = None
        if self._own is not None:
            self._own.reach(trainer.current_epoch, batch_idx)
            work = self._own.work_of(batch)
        self._begin_batch(trainer, batch, work)

    @reporting.never_raises
    def _begin_batch(self, trainer: Trainer, batch: Any, work: float | None) -> None:
        if self._own is not None:
            self._own.open(reporting.count_samples(trainer, batch), work)
        elif self._strategy is not None and self._is_due(trainer):
            self._strategy.ask_report()

    @reporting.never_raises
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._own is not None and loss.requires_grad:
            when_backward_ends(loss, self._own.probe.backward_ended)

    @reporting.never_raises
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is not None:
            self._own.probe.exchanged()
            if not pl_module.automatic_optimization:
                self._own.probe.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_batch(trainer, batch)
        if self._own is not None:  # though nothing was measured here: the other ranks gather
            every = compat.log_interval(trainer) or _OFTEN
            if (batch_idx + 1) % max(every, _SELDOM) == 0:
                self._compare_own(trainer, self._own)

    @reporting.never_raises
    def _end_batch(self, trainer: Trainer, batch: Any) -> None:
        if self._own is not None:
            self._own.close()
        elif self._strategy is not None:
            self._compare(self._strategy.take_reports() or ())
            if self._is_due(trainer) and batch is not None:
                self._due = not self._report(trainer, self._strategy)

    def _compare_own(self, trainer: Trainer, own: _OwnTiming, *, ended: bool = False) -> None:
        """Tells of the steps that no rank has told of yet, and looks for stragglers in those told of before.

        A collective that no rank waits for: what is sent now is read when the next is sent.
        """
        self._compare_told(trainer)
        if steps := range(own.begun, own.until - own.late + ended):  # on an accelerator times are late
            rows, gathering = own.take_steps(steps).to(trainer.strategy.root_device), None
            everyone = [torch.empty_like(rows) for _ in range(trainer.world_size)]
            if trainer.world_size > 1:
                gathering = dist.all_gather(everyone, rows, async_op=True)
            self._told = own.epoch, steps, everyone if trainer.world_size > 1 else [rows], gathering

    def _compare_told(self, trainer: Trainer) -> None:
        told, self._told = self._told, None
        if told is None:
            return
        epoch, steps, everyone, gathering = told
        if gathering is not None:
            gathering.wait()
        if trainer.is_global_zero and self._own is not None:
            self._compare_gathered(trainer, self._own, epoch, steps, everyone)

    @reporting.never_raises
    def _compare_gathered(
        self, trainer: Trainer, own: _OwnTiming, epoch: int, steps: range, everyone: list[Tensor]
    ) -> None:
        told: list[dict[int, Spent]] = []
        for step, ranks in zip(steps, torch.stack(everyone, 1).tolist(), strict=True):
            turns = {
                r: Turn(rank=r, step=step, samples=int(n), work=work, compute_s=own_s, wait_s=wait_s, end_s=math.nan)
                for r, (n, work, own_s, wait_s) in enumerate(ranks)
            }
            if len(turns) > 1:
                self._compare([StepReport(epoch=epoch, step=step, records=tuple(turns.values()), predicted_s=())])
            if all(turn.compute_s > 0.0 for turn in turns.values()):
                told.append(spent_together(turns, sees_waiting=own.sees_waiting))
                own.tally.add(RunStep(epoch=epoch, index=step, turns=turns), told[-1])
                own.spent = total_of([own.spent, *told[-1].values()])
                own.rows += torch.tensor([[1.0, *row] for row in ranks], dtype=torch.float64)
        self._show_on_bar(trainer, [], "waiting", waited_in(told))

    def _compare(self, reports: Sequence[StepReport]) -> None:
        """Names ranks that have become slow."""
        for report in reports:
            for found in self._test.add(report.records, epoch=report.epoch, step=report.step):
                if found.rank not in self._named:
                    self._named.add(found.rank)
                    compat.tell_past_bar(
                        f"StragglerMonitor: rank {found.rank} is slow since epoch {found.epoch}, step {found.step}: it"
                        f" needs {found.slowdown:.2f} times as long for the same work as the other ranks' median"
                    )

    def _is_due(self, trainer: Trainer) -> bool:
        if not self._due:
            every = compat.log_interval(trainer)
            reached = every > 0 and (compat.logging_step(trainer) + 1) % every == 0
            self._due = trainer.is_last_batch or (reached and not compat.accumulates_now(trainer))
        return self._due

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is not None:
            self._compare_own(trainer, self._own, ended=True)
            self._compare_told(trainer)
            if trainer.is_global_zero:
                self._show_epoch(trainer, self._own)

    @reporting.never_raises
    def _show_epoch(self, trainer: Trainer, own: _OwnTiming) -> None:
        if means := own.take_means():
            waited, own.spent = waited_in([{0: own.spent}]), Spent()
            self._show_on_bar(trainer, means, "waiting", waited)
            # Lightning's own step of the epoch's values: the last batch's.
            self._show(trainer, self._values(means, [], {"waiting": waited}), step=compat.logging_step(trainer) - 1)

    @reporting.never_raises
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._own is not None:
            self._own.probe.detach()
            sharded = isinstance(trainer.strategy, ModelParallelStrategy)
            if trainer.is_global_zero and (told := last_lines(self._own.tally.ledger(), sharded=sharded)):
                compat.tell_past_bar(told)
        elif self._strategy is not None and (summary := self._strategy.summary()):
            compat.tell_past_bar(summary)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._own is not None:
            self._own.probe.detach()

    def step_events(self) -> list[Event]:
        """Returns and forgets this rank's step events; only with a strategy that has no step events."""
        events = self._own.events if self._own is not None else deque[Event]()
        return [events.popleft() for _ in range(len(events))]

    def _report(self, trainer: Trainer, strategy: reporting.Reporting) -> bool:
        """Reports what is known; returns whether anything is."""
        values: dict[str, float] = {}
        if (report := strategy.step_report()) is not None:
            if strategy.take_reports() is None:
                self._compare([report])
            name, part = "idle", idle_in(report.records)
            if strategy.meets:
                turns = {record.rank: record for record in report.records}
                seen = not device_of(trainer.strategy.root_device).asynchronous
                name, part = "waiting", waited_in([spent_together(turns, sees_waiting=seen)])
            values = self._values(report.records, report.predicted_s, {name: part})
            self._show_on_bar(trainer, report.records, name, part)
        values |= {f"hetero/{name}": float(value) for name, value in strategy.engine_metrics().items()}
        self._show(trainer, values, step=compat.logging_step(trainer))
        return bool(values)

    def _values(
        self, records: Sequence[SpeedSample], predicted_s: Sequence[float], parts: dict[str, float]
    ) -> dict[str, float]:
        columns = {
            "share": [float(r.samples) for r in records], "compute_s": [r.compute_s for r in records],
            "wait_s": [r.wait_s for r in records], "predicted_s": list(predicted_s),
            "score": straggler_scores(records), "straggler": self._test.slowdowns(),
        }  # fmt: skip
        values: dict[str, float] = {}
        for name, column in columns.items():
            if known := [v for v in column if not math.isnan(v)]:
                ranks = column if len(column) <= self.most_ranks else ()
                values |= {f"hetero/{name}/rank{r}": v for r, v in enumerate(ranks)}
                values |= {f"hetero/{name}/max": max(known), f"hetero/{name}/min": min(known)}
        of_all = {"imbalance": imbalance(columns["compute_s"]), **parts}
        return values | {f"hetero/{name}": value for name, value in of_all.items() if not math.isnan(value)}

    def _show(self, trainer: Trainer, values: dict[str, float], *, step: int) -> None:
        if not self.most_ranks:
            values = {name: value for name, value in values.items() if name.count("/") == 1}  # of no rank, no extreme
        for logger in trainer.loggers if values and trainer.is_global_zero else ():
            logger.log_metrics(dict(values), step=step)

    def _show_on_bar(self, trainer: Trainer, records: Sequence[SpeedSample], name: str, part: float) -> None:
        if not trainer.is_global_zero or math.isnan(part):
            return
        if records:
            compat.show_on_progress_bar(trainer, "shares", shares_text([r.samples for r in records]))
        compat.show_on_progress_bar(trainer, {"waiting": "wait"}.get(name, name), f"{100.0 * part:.0f}%")


class _OwnTiming:
    """Times this rank's steps under a strategy that does not.

    Attributes:
        probe: the stopwatch.
        sees_waiting: whether the host waits where its device does.
        tally: of rank 0, all ranks' steps of the fit.
        rows, spent: of rank 0, sums over the epoch's steps so far: by rank 1 and what `take_steps` tells; of all ranks
            what their time went into.
        epoch, begun, until, late: of the steps that are sent next; how many more of them are not known yet.
        events: of this rank, not taken yet.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, batch_cost: reporting.BatchCost | None) -> None:
        device = device_of(trainer.strategy.root_device)
        self.probe = StepProbe(device, waiting=(nn.SyncBatchNorm,))
        self.late, self.sees_waiting = int(device.asynchronous), not device.asynchronous
        self.probe.attach(module)
        self._rank = trainer.global_rank
        self._cost = reporting.cost_in(module, batch_cost)
        self._weight = getattr(module, "batch_weight", None)
        self._sizes: deque[tuple[int, int, int, float]] = deque()
        self.epoch, self.begun, self.until = 0, 0, -2  # steps not told of yet, up to the one that runs
        self._steps: dict[int, tuple[float, float, float, float]] = {}  # of each of them, see `take_steps`
        self.tally, self.spent = Tally(trainer.world_size), Spent()
        self.rows = torch.zeros(trainer.world_size, 5, dtype=torch.float64)
        self.events: deque[Event] = deque(maxlen=4096)

    def reach(self, epoch: int, step: int) -> None:
        """Says which step begins: ranks tell of the same ones, whether or not they are measured."""
        if (epoch, step) != (self.epoch, self.until + 1):
            self.epoch, self.begun = epoch, step
            self._steps.clear()
        self.until = step

    def work_of(self, batch: Any) -> float | None:
        """Returns a batch's work as the user counts it; None: samples."""
        if self._cost is not None:
            return reporting.count_work(self._cost, batch, self._rank)
        return None if self._weight is None else float(self._weight(batch))

    def open(self, samples: int, work: float | None) -> None:
        """Begins to measure that step."""
        self._sizes.append((self.epoch, self.until, samples, float(samples) if work is None else work))
        self.probe.arm()

    def take_steps(self, steps: range) -> Tensor:
        """Returns and forgets samples, work, own time and waiting [s] of each step; zeros: not measured."""
        self.begun = steps.stop
        rows = [self._steps.pop(step, (0.0,) * 4) for step in steps]
        return torch.tensor(rows, dtype=torch.float64)

    def close(self) -> None:
        self.probe.close()
        while self._sizes and (seconds := self.probe.take_both()) is not None:
            (compute_s, wait_s), (epoch, step, samples, work) = seconds, self._sizes.popleft()
            if epoch == self.epoch:
                self._steps[step] = samples, work, compute_s, wait_s
            data = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
            if work != samples:
                data["work"] = work
            now_s = time.perf_counter()
            self.events.append(Event(kind="step", rank=self._rank, epoch=epoch, step=step, t_s=now_s, data=data))

    def take_means(self) -> list[SpeedSample]:
        """Returns a step of each rank, the mean of the epoch's, and forgets it; empty: none was measured."""
        means, steps = (self.rows / self.rows[:, :1]).tolist(), int(self.rows[0, 0])
        self.rows.zero_()
        return [
            SpeedSample(rank=r, step=0, samples=round(samples), compute_s=compute_s, wait_s=wait_s, work=work)
            for r, (_, samples, work, compute_s, wait_s) in enumerate(means if steps else [])
        ]
