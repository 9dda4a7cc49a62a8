"""State of one fit: everything that exists only between set-up and teardown (layer L)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.decide.controlled import ControlledPolicy
from lightning_hetero.balanced.decide.rows import RankState
from lightning_hetero.balanced.fit.loaders import BalancedBinder, BatchSettings
from lightning_hetero.balanced.fit.rebalancer import BatchRebalancer
from lightning_hetero.balanced.fit.recovery import Recovery
from lightning_hetero.balanced.fit.shapes import warn_of_tuning
from lightning_hetero.balanced.fit.sigterm import EndTogether
from lightning_hetero.balanced.fit.trained import Trained
from lightning_hetero.balanced.runtime.batch_norm import statistics_kept
from lightning_hetero.balanced.runtime.checksum import ParameterChecksum
from lightning_hetero.balanced.runtime.loss_weight import LossWeight
from lightning_hetero.base.loaders import SharedSettings
from lightning_hetero.base.run import EngineRun
from lightning_hetero.callbacks.requeue import RequeueInStep
from lightning_hetero.callbacks.work import BatchCost, CountedOnHost, cost_in, count_work
from lightning_hetero.data import Part
from lightning_hetero.data.costs import costs_digest
from lightning_hetero.measure.compiles import CompileWatch, NewSizes
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.host_load import HostLoad
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from lightning_hetero.shares.caps import MemoryCap
from lightning_hetero.shares.policy import BalancePolicy, Decision
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.transport.store import run_store
from lightning_hetero.types import StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["BalanceSettings", "BalancedRun"]

_CHECKED_AFTER_CHANGE = 100  # optimizer steps for a checksum of all parameters, once others are trained than at first


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    """The strategy's own arguments; see `LoadBalancedStrategy`."""

    policy: BalancePolicy
    rebalance: bool
    batches: BatchSettings
    waiting_modules: tuple[type[nn.Module], ...]
    batch_cost: BatchCost | None
    check_parameters_every: int | None
    ddp_arguments: Mapping[str, Any]


class BalancedRun(EngineRun[BalancedBinder]):
    """One fit on one rank: the bound loaders, the stopwatch and the weight of the current batch.

    Args:
        trainer: the running trainer.
        shared, settings: the strategy's arguments.
        timeout: of collectives.
        device: of this rank.
        main_address: of the host that rank 0 is on.

    Attributes:
        part: this rank's part of the batch that runs, or ran last; None: a batch of stock DDP's.
        rebalancer: the Trainer's, or one of our own.
        policy: decides the shares.
        cap: what is known of this rank's memory.
        sigterm: ends all ranks together.
    """

    def __init__(
        self,
        trainer: Trainer,
        shared: SharedSettings,
        settings: BalanceSettings,
        *,
        timeout: timedelta | None,
        device: torch.device,
        main_address: str,
    ) -> None:
        given = [c for c in compat.trainer_callbacks(trainer) if isinstance(c, BatchRebalancer)]
        # Not added to the Trainer's callbacks: it has no hook to call, and calling none costs some 10 us each.
        self.rebalancer = given[0] if given else BatchRebalancer(settings.policy, enabled=settings.rebalance)
        self.policy = self.rebalancer.policy or settings.policy
        if isinstance(settings.policy, ControlledPolicy):
            if self.policy is not settings.policy:
                raise ValueError(
                    "BatchRebalancer(policy=...) would decide in the place of LoadBalancedStrategy(controller=...):"
                    " drop one of them"
                )
            settings.policy.begin_fit()
        cost = cost_in(trainer.lightning_module, settings.batch_cost)
        agreed = {name: repr(getattr(settings.batches, name)) for name in BatchSettings.__slots__}
        agreed |= {"sample_costs": costs_digest(settings.batches.sample_costs)}
        agreed |= {
            "global_batch_size": str(shared.global_batch_size),
            "batch_sampler": shared.batch_sampler,
            "own_data": str(shared.own_data),
            "loss_reduction": shared.loss_reduction,
            "rebalance": str(self.rebalancer.enabled),
            "batch_cost": getattr(cost, "__qualname__", str(cost is not None)),
            "check_parameters_every": str(settings.check_parameters_every),
            "ddp": repr(sorted(settings.ddp_arguments.items())),
            **self.policy.settings(),
        }
        super().__init__(trainer, timeout=timeout, settings=agreed)
        if self.fitting and self.channel.world_size > 1 and compat.requeues(trainer):
            store = run_store(self.channel, main_address, timeout)
            requeue = RequeueInStep(trainer, self.channel.rank, self.channel.world_size, store)
            self.undo.callback(requeue.close)
        self.automatic = self.module.automatic_optimization
        self.part: Part | None = None
        self.binder = BalancedBinder(trainer, self.channel, self.policy, shared, settings.batches)
        self.undo.callback(compat.watch_train_source(trainer, self.binder.announce))
        self.weigh_logs(self.current_samples)
        self.weight = LossWeight(
            channel=self.channel,
            world_size=self.channel.world_size,
            reduction=shared.loss_reduction,
            batch_weight=shared.weight_in(self.module),
        )
        self._cost = cost
        self._counts = CountedOnHost(trainer, self._count)
        self._device, self._waiting = device_of(device), (nn.SyncBatchNorm, *settings.waiting_modules)
        self.cap = MemoryCap(careful=self._device.asynchronous)
        if self.rebalancer.enabled:
            warn_of_tuning(self._device)
        self._recovery: Recovery | None = None  # where there is a batch and automatic optimization
        self.probe = StepProbe(self._device, waiting=self._waiting)
        self.undo.callback(self.probe.detach)
        self._compiles = CompileWatch()
        self.undo.callback(self._compiles.close)
        every = settings.check_parameters_every
        self._checksum = None if every is None else ParameterChecksum(every, self._optimized, device=self._device)
        self._trained = Trained(trainer)
        self._model: nn.Module | None = None
        self._measured: deque[tuple[Part, bool]] = deque()  # closed steps whose time is not yet known; to be believed?
        self._finished: deque[tuple[Part, float]] = deque()  # steps whose time is known, but not yet their wait
        self._voided: list[Any] = []  # hooks that keep a batch of weight 0 out of the gradients
        self.sigterm = EndTogether(trainer, self.channel)
        self.undo.callback(self.sigterm.undo)
        self._load = HostLoad() if self.policy.wants_load else None
        self._wait_s = 0.0
        self._sizes = NewSizes(self._device)
        self._sent = False
        self._synced = False
        self._told: int | None = None  # the most samples of a part, by an earlier run

    def keeps_sigterm(self) -> bool:
        return self.sigterm.keeps()

    def attach(self, model: nn.Module | None) -> None:
        """Takes the module as it is trained, wrapped or not, once set-up is over or it was wrapped again."""
        self._model = model
        self._trained.wrapped()
        self.probe.attach(self.module)
        if self._recovery is not None:
            self._recovery.close()
        if self.automatic and model is not None and not compat.uses_dataloader_iter(self.trainer):
            self._recovery = Recovery(
                self.trainer,
                model,
                device=self._device,
                weight=self.weight,
                cap=self.cap,
                waiting=self._waiting,
                constant=self.binder.stands_for_part,
            )
            self.undo.callback(self._recovery.close)

    def wants_wrapping(self) -> bool:
        """Whether DDP has to wrap the module again, see `Trained`; then ranks compare their parameters from now on."""
        wanted = self._trained.want_wrapping(self._model)
        if self._checksum is None and self._trained.changed:
            self._checksum = ParameterChecksum(_CHECKED_AFTER_CHANGE, self._optimized, device=self._device)
        return wanted

    def _optimized(self) -> Iterator[Tensor]:
        """What is trained: neither frozen nor averaged weights, which one rank alone may hold.

        Also what is thawed by now, which DDP does not keep equal, and what is frozen for a moment, e.g. by
        ``toggle_optimizer``.
        """
        for optimizer in self.trainer.strategy.optimizers:
            for group in optimizer.param_groups:
                yield from (p for p in group["params"] if p.requires_grad or id(p) in self._trained.ids)

    def resume(self, state: Mapping[str, Any]) -> None:
        self.binder.resume(state)
        if state.get("policy"):
            self.policy.load_state_dict(state["policy"])
            told = state["policy"].get("most_samples", ())
            if len(told) == self.channel.world_size and (most := told[self.channel.rank]) is not None:
                self._told = most

    def state_dict(self) -> dict[str, Any]:
        return self.binder.state_dict()

    # ---- what others may ask ----------------------------------------------------------------------------------

    def current_samples(self) -> int | None:
        return None if self.part is None else self.part.samples

    @property
    def shares(self) -> tuple[int, ...]:
        controller = self.binder.controller
        return () if controller is None else controller.policy.shares

    def step_report(self) -> StepReport | None:
        controller = self.binder.controller
        return controller.report if controller is not None else None

    def engine_metrics(self) -> dict[str, float]:
        """Changes by a controller so far; nothing without one."""
        return self.policy.metrics() if isinstance(self.policy, ControlledPolicy) else {}

    def take_reports(self) -> list[StepReport]:
        controller = self.binder.controller
        if controller is None or not controller.reports:
            return []
        reports, shares = list(controller.reports), controller.policy.shares
        controller.reports.clear()
        if all(shares):
            return reports
        # What a rank at rest computes is a dummy: a step's fixed time, which says nothing of its speed.
        return [
            replace(report, records=tuple(r if shares[r.rank] else replace(r, compute_s=0.0) for r in report.records))
            for report in reports
        ]

    def summary(self) -> str | None:
        """One line on the shares in force and what equal ones would cost; ``None`` before anything was measured."""
        if self.step_report() is None:
            return None
        shares = self.policy.shares
        slowest_s = max(self.policy.predict_s(shares))
        equal_s = max(self.policy.predict_s(scale_shares([1] * len(shares), sum(shares))))
        if not slowest_s > 0:
            return None
        at_rest = self.policy.at_rest if isinstance(self.policy, ControlledPolicy) else {}
        without = "".join(f"; without rank {rank} {why or 'from the start'}" for rank, why in at_rest.items())
        return (
            f"hetero_balanced: shares {'/'.join(map(str, shares))}, {slowest_s * 1e3:.1f} ms of work per batch;"
            f" equal shares would take {equal_s / slowest_s:.2f} times as long{without}"
        )

    # ---- one step ---------------------------------------------------------------------------------------------

    def transfer(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """The next batch was fetched: which part is it, what does it weigh. Returns it, moved to the device."""
        self._open()
        counted = self._counts.before(batch)
        with self.probe.transferring():
            batch = move(batch)
        if not counted:
            self._count(batch)
        return batch

    def _open(self) -> None:
        if self.binder.equal is not None:
            self.part = None
            return
        part = self.binder.open(compat.upcoming_batch(self.trainer))
        self.part = part
        if self._told is not None:
            self.cap.goes_on(-(-self._told // self.binder.pieces))
            self._told = None
        self._sent = self._synced = False
        self.probe.arm(part.fetch_s)

    def _count(self, batch: Any) -> None:
        if self.part is None:
            self.weight.open_equal(batch)
            return
        self.weight.open(self.part, batch)
        self.part.work = self._work_of(self.part, batch)

    def memory_guard(self) -> AbstractContextManager[Any]:
        """Around ``training_step``: a batch that does not fit, or exceeds ``max_samples``, is computed in pieces."""
        if self._recovery is None:
            return nullcontext()
        if self.part is None:
            return self._recovery.guarding(None)
        return self._recovery.guarding(self.part.computed, self.binder.piece_sizes(self.part))

    def _work_of(self, part: Part, batch: Any) -> float:
        """Returns the work of the batch; NaN, which counts as that of mean samples, where a weight of 0 tells none."""
        if self._cost is not None:
            return count_work(self._cost, batch, self.channel.rank)
        if part.work > 0:  # of samples whose costs were known
            return part.work
        if self.weight.counts:
            return self.weight.local if self.weight.local > 0 else math.nan
        return float(part.computed)

    def dummy_guard(self) -> AbstractContextManager[Any]:
        """A rank without samples trains on a dummy batch: no metric, logged mean or BatchNorm statistic counts it."""
        if self.part is None or self.part.samples:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(compat.metrics_frozen(self.module))
        stack.enter_context(statistics_kept(self.module))
        stack.enter_context(compat.dummy_batch_unlogged(self.trainer))
        return stack

    @property
    def weighs_means(self) -> bool:
        """Whether ranks count differently in the means of a step: not if all have stock DDP's equal parts."""
        return self.part is not None or self.weight.counts

    def weigh(self, loss: Tensor) -> Tensor:
        """Returns the loss to differentiate and arranges the stamp at the end of its backward."""
        if self.weight.waits:  # for the peers' token counts
            with self.probe.paused():
                self.weight.factor()
        factor = self.weight.factor()
        if factor == 0.0:  # not by the product alone: 0 * NaN is NaN, e.g. a mean over no tokens
            parameters = self.module.parameters()
            self._voided = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
        weighted = loss if factor == 1.0 else loss * factor
        self._stamp_end(weighted)
        return weighted

    def _stamp_end(self, loss: Tensor) -> None:
        if loss.requires_grad and self.part is not None:
            when_backward_ends(loss, self._backward_ended)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None], holders: Sequence[Tensor]) -> None:
        """Weighs a loss and differentiates it with ``run``, in pieces if memory is short; see `Recovery.backward`."""
        weighted = self.weigh(loss)
        if self._recovery is None:
            run(weighted)
        else:
            self._recovery.backward(weighted, run, holders=(loss, *holders), ended=self._stamp_end)
        self.backward_returned()

    def _backward_ended(self) -> None:
        self.probe.backward_ended()
        model = self._model
        self._synced |= isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        if self.automatic:
            self._step_measured()

    def backward_returned(self) -> None:
        """The gradient exchange is over."""
        for handle in self._voided:
            handle.remove()
        self._voided = []
        if self.part is None:
            return
        self.probe.exchanged()
        if self.automatic:
            self._note_steps()
            self.probe.updating()
        else:
            self.probe.resume()

    def manual_step_done(self) -> None:
        """Manual optimization: the step ends with ``training_step``, optimizers included."""
        self._step_measured()

    def optimizer_stepped(self) -> None:
        """Clipping and update ran since the gradients were there; their time belongs to the next measurement."""
        self.probe.updated()
        if self._checksum is not None and self.part is not None:
            self._checksum.stepped()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective, e.g. of ``self.log(..., sync_dist=True)``: waiting for peers is not this rank's work."""
        if self._recovery is not None:
            self._recovery.communicates()
        with self.probe.paused():
            yield

    def _step_measured(self) -> None:
        controller, part = self.binder.controller, self.part
        if self._sent or controller is None or part is None:  # a closure may run more than once per step
            return
        self._sent = True
        self.probe.close()
        self._measured.append((part, self._believed(part)))
        while (compute_s := self.probe.take()) is not None:  # on an accelerator, of a step before
            done, believed = self._measured.popleft()
            # Sent while the gradients still travel, so the wait is the last known one.
            if believed:
                controller.measured(done.computed, compute_s, self._wait_s, done.work)
            self._finished.append((done, compute_s))
        self._note_steps()
        decides = self.rebalancer.enabled
        exchanges = self._synced and (decides or self._checksum is not None)
        if exchanges and controller.wants_exchange(part.epoch, part.step):
            ran = part.shares if self.binder.cuts_by_cost else ()
            wait = self.channel.all_gather_row(controller.row(part.epoch, part.step, self._state(), ran=ran))
            controller.sent(part.epoch, part.step, wait, decides=decides)
        controller.catch_up()  # beside the gradient exchange, where it delays nobody
        while controller.news:
            self._note_decision(part, controller.news.popleft())

    def _believed(self, part: Part) -> bool:
        """Whether the step's time says how fast this rank is; pieces do only where they are there to stay.

        The first one of a size does not where libraries look for the best kernels of that size. Where each part has a
        size of its own, all do.
        """
        new = not self.binder.cuts_by_cost and self._sizes.first(part.computed)
        if self._compiles.ask() or new:
            return False
        return self._recovery is None or self._recovery.believed or not (self._recovery.tried or self.policy.limits.fit)

    def _state(self) -> RankState:
        """What this rank tells besides the times of its steps."""
        free_cpu, free_mem = self._load.free() if self._load is not None else (math.nan, math.nan)
        return RankState(
            free_cpu=free_cpu,
            free_mem=free_mem,
            most_samples=math.nan if (most := self.cap.most) is None else most * self.binder.pieces,
            checksum=math.nan if self._checksum is None else self._checksum.take(),
        )

    def _note_decision(self, part: Part, decision: Decision) -> None:
        if decision.outcome:
            self.events.note("outcome", part.epoch, part.step, decision.outcome)
        if decision.changed:
            data = {
                "shares": list(decision.shares),
                "predicted_s": decision.predicted_s,
                "reason": decision.reason,
                "predicted_gain": decision.predicted_gain,
                **decision.data,
            }
            self.events.note("decision", part.epoch, part.step, data)
        elif decision.data.get("queues") and self.channel.rank == 0:
            self.events.note("queue", part.epoch, part.step, decision.data)

    def _note_steps(self) -> None:
        """Notes measured steps once their own wait is known."""
        if self._recovery is not None and self.part is not None and (learned := self._recovery.take_learned()):
            self.events.note("memory", self.part.epoch, self.part.step, learned)
        while self._finished and (wait_s := self.probe.take_wait()) is not None:
            self._wait_s = wait_s
            part, compute_s = self._finished.popleft()
            data = {"samples": part.samples, "compute_s": compute_s, "wait_s": wait_s}
            if part.work != part.computed:
                data["work"] = part.work
            self.events.note("step", part.epoch, part.step, data)

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        controller = self.binder.controller
        if controller is not None and self.failed:
            controller.abandon()
        elif controller is not None:
            controller.drain()
        super().close()
