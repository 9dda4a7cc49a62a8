"""One fit: the bound loaders, the weight of each batch, the stopwatch around a step (layer L)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.beforehand import EarlierRuns
from lightning_hetero.balanced.fit.loaders import BalancedBinder, BalanceSettings
from lightning_hetero.balanced.fit.plain_backward import Trained
from lightning_hetero.balanced.fit.recovery import Recovery
from lightning_hetero.balanced.fit.step_times import SignalsTogether, StepTimes
from lightning_hetero.balanced.runtime.pieces import LossWeight, statistics_kept
from lightning_hetero.base.elastic.join import Invitation
from lightning_hetero.base.run import EngineRun
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.callbacks.balancing import BatchRebalancer
from lightning_hetero.callbacks.reporting import CountedOnHost, RequeueTogether, cost_in, count_work
from lightning_hetero.data.batches import Part
from lightning_hetero.data.order import Channel
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from lightning_hetero.record.ledger import too_few
from lightning_hetero.shares.caps import MemoryCap
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.transport.side_channel import PartChannel
from lightning_hetero.types import StepReport


class BalancedRun(EngineRun[BalancedBinder]):
    """One fit on one rank: the bound loaders, the stopwatch and the weight of the current batch.

    Args:
        trainer: the running trainer.
        strategy: that of the trainer.
        settings: the arguments that only this engine has.
        members: ranks that train on the same part of a batch, neighbours.

    Attributes:
        part: this rank's part of the batch that runs, or ran last; None: a batch of stock DDP's.
        rebalancer: the Trainer's, or ours.
        policy: decides the shares.
        weight: of the loss of that batch.
        cap: what is known of this rank's memory.
        probe: the stopwatch around a step.
        times: what steps took, for the controller and for traces.
        signals: end all ranks together.
    """

    engine = "balanced"
    loses_ranks: ClassVar[bool] = False
    binders: ClassVar[type[BalancedBinder]] = BalancedBinder

    def __init__(
        self, trainer: Trainer, strategy: HeteroStrategy[Any], settings: BalanceSettings, *, members: int = 1
    ) -> None:
        given = [c for c in compat.trainer_callbacks(trainer) if isinstance(c, BatchRebalancer)]
        # Not added to the Trainer's callbacks: it has no hook to call, and calling none costs some 10 us each.
        self.rebalancer = given[0] if given else BatchRebalancer(settings.policy, enabled=settings.rebalance)
        self.policy = self.rebalancer.policy or settings.policy
        shared, timeout = strategy.shared, strategy.timeout
        cost = cost_in(trainer.lightning_module, settings.batch_cost)
        own = "bounds", "learns", "quantum", "stream", "exchange_every", "min_ranks"
        agreed = {name: repr(getattr(settings, name)) for name in own} | {
            "global_batch_size": str(shared.global_batch_size), "batch_sampler": shared.batch_sampler,
            "own_data": str(shared.own_data), "loss_reduction": shared.loss_reduction,
            "rebalance": str(self.rebalancer.enabled), "stock": repr(sorted(strategy.agreed.items())),
            "batch_cost": getattr(cost, "__qualname__", str(cost is not None)), **self.policy.settings(),
        }  # fmt: skip
        joins = self.invitation(strategy)
        store, said = (None, agreed) if joins is None else (joins.store, None)
        super().__init__(trainer, timeout=timeout, settings=said, store=store)
        self.automatic = self.module.automatic_optimization
        self.part: Part | None = None
        small = self.small_channel(strategy, settings)
        channel = small if members == 1 else PartChannel(self.channel, members)
        own_device, name = device_of(strategy.root_device), type(strategy).__name__
        earlier = EarlierRuns(trainer, own_device, counts=self.fitting and self.rebalancer.enabled)
        self.binder = self.binders(trainer, channel, self.policy, shared, settings, strategy_name=name, earlier=earlier)
        self.undo.callback(compat.watch_train_source(trainer, self.binder.announce))
        self.weigh_logs(self.current_samples)
        world, counts = channel.world_size, shared.weight_in(self.module)
        self.weight = LossWeight(
            channel=channel, world_size=world, reduction=shared.loss_reduction, batch_weight=counts
        )
        self._cost = cost
        self._counts = CountedOnHost(trainer, self._count)
        if self.rebalancer.enabled and own_device.tunes_each_shape():
            rank_zero_warn(
                "torch.backends.cudnn.benchmark is on: cuDNN tries its kernels again for every number of samples, and"
                f" hetero_{self.engine} changes them. Trainer(benchmark=False) switches it off; a larger quantum keeps"
                " the numbers few"
            )
        if settings.learns and not self.automatic:
            raise ValueError(
                "max_samples='auto' needs automatic optimization: a step by hand that memory is too short for cannot be"
                " done in pieces. Give max_samples as numbers"
            )
        self.cap = MemoryCap(careful=own_device.asynchronous or settings.learns)
        self.probe = StepProbe(own_device, waiting=(nn.SyncBatchNorm,))
        self.undo.callback(self.probe.detach)
        self.times = StepTimes(self.binder, self.probe, small, self.events, self.cap, own_device)
        self.undo.callback(self.times.compiles.close)
        self._recovery: Recovery | None = None  # where there is a batch and automatic optimization
        self._trained = Trained(trainer)
        self._model: nn.Module | None = None
        self._voided: list[Callable[[], object]] = []  # ends what keeps a batch of weight 0 out of the gradients
        requeue = None
        if self.fitting and compat.requeues(trainer):
            requeue = RequeueTogether(trainer, self.channel.rank)
            self.undo.callback(requeue.close)
        self.signals = SignalsTogether(trainer, small, requeue, begins=self.batch_begins)
        self.undo.callback(self.signals.undo)

    def invitation(self, strategy: HeteroStrategy[Any]) -> Invitation | None:
        """Returns that into a run of others; None: this rank is there from the start."""
        return None

    def small_channel(self, strategy: HeteroStrategy[Any], settings: BalanceSettings) -> Channel:
        """Returns what carries a few numbers in each batch."""
        return self.channel

    def batch_begins(self) -> None:
        """All ranks are about to fetch a batch."""

    def backward_begins(self) -> None:
        """This rank's backward pass begins."""

    def backward_is_over(self, part: Part) -> None:
        """It is over, of this part of a batch."""

    def keeps_sigterm(self) -> bool:
        return self.signals.keeps_sigterm()

    def attach(self, model: nn.Module | None) -> None:
        """Takes the module as it is trained, wrapped or not, once set-up is over or it was wrapped again."""
        self._model = model
        self._trained.wrapped()
        self.probe.attach(self.module)
        if self._recovery is not None:
            self._recovery.close()
        if self.automatic and model is not None and not compat.uses_dataloader_iter(self.trainer):
            self._recovery = self.make_recovery(
                self.trainer, model, device=device_of(self.trainer.strategy.root_device), weight=self.weight,
                cap=self.cap, constant=self.binder.stands_for_part, learned=self._learned,
            )  # fmt: skip
            self.undo.callback(self._recovery.close)

    def make_recovery(self, *args: Any, **kwargs: Any) -> Recovery:
        """Returns what survives a lack of memory."""
        return Recovery(*args, **kwargs)

    def _learned(self, data: Mapping[str, Any]) -> None:
        if self.part is not None:
            self.events.note("memory", self.part.epoch, self.part.step, data)

    def wants_wrapping(self) -> bool:
        """Whether DDP has to wrap the module again, see `Trained`."""
        return self._trained.want_wrapping(self._model)

    def resume(self, state: Mapping[str, Any]) -> None:
        learned = state.get("policy")
        if learned and not self.rebalancer.enabled:  # shares stay equal, whatever speeds the earlier run has learned
            state = {**state, "policy": {**learned, "predictors": []}}
        self.binder.resume(state)

    def state_dict(self) -> dict[str, Any]:
        return self.binder.state_dict()

    # ---- what others may ask ----------------------------------------------------------------------------------

    def current_samples(self) -> int | None:
        return None if self.part is None else self.part.samples

    @property
    def shares(self) -> tuple[int, ...]:
        controller = self.binder.controller
        return () if controller is None else controller.shares

    def step_report(self) -> StepReport | None:
        controller = self.binder.controller
        return controller.report if controller is not None else None

    def take_reports(self) -> list[StepReport]:
        controller = self.binder.controller
        if controller is None:
            return []
        reports = list(controller.reports)
        controller.reports.clear()
        return reports

    def summary(self) -> str | None:
        """One line on the shares in force and what equal ones would cost; ``None`` before anything was measured."""
        if self.step_report() is None:
            return None
        shares = self.policy.shares
        slowest_s = max(self.policy.predict_s(shares))
        equal_s = max(self.policy.predict_s(scale_shares([1] * len(shares), sum(shares))))
        if not slowest_s > 0:
            return None
        longer = f"with equal shares the slowest rank would work {equal_s / slowest_s:.2f} times as long"
        kept, alone_s = self.policy.fastest_alone()
        if alone_s < (1.0 - self.policy.dead_band) * slowest_s:
            idle = ", ".join(str(rank) for rank in range(len(shares)) if rank not in kept)
            longer += f"; without rank(s) {idle} a batch would take {alone_s * 1e3:.1f} ms: leave out such devices"
        return (
            f"hetero_{self.engine}: shares {'/'.join(map(str, shares))}, {slowest_s * 1e3:.1f} ms of work per batch;"
            f" {too_few(self.trainer.global_step) or longer}"
        )

    # ---- one step ---------------------------------------------------------------------------------------------

    def transfer(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """The next batch was fetched: which part is it, what does it weigh. Returns it, moved to the device."""
        self._open()

        def timed(host: Any) -> Any:
            with self.probe.transferring():
                return move(host)

        return self._counts.moved(batch, timed)

    def _open(self) -> None:
        if self.binder.equal is not None:
            self.part = None
            return
        self.part = self.binder.open(compat.upcoming_batch(self.trainer))
        self._go_on()
        self.times.opened(self.part)

    def _go_on(self) -> None:
        """Takes over, once, what an earlier run has learned of this rank's memory."""
        earlier = self.binder.earlier
        known, earlier.most = earlier.most, None
        if known is not None:
            self.cap.goes_on(-(-known // self.binder.pieces))

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
        if self.weight.counts:
            return self.weight.local if self.weight.local > 0 else math.nan
        return float(part.computed)

    def dummy_guard(self) -> AbstractContextManager[Any]:
        """A rank without samples trains on a dummy batch: no metric, logged mean or BatchNorm statistic counts it."""
        stack = ExitStack()
        if self.part is not None and not self.part.samples:
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
        factor = 1.0 if self._recovery is not None and self._recovery.weighed else self.weight.factor()
        if factor == 0.0:  # not by the product alone: 0 * NaN is NaN, e.g. a mean over no tokens
            self._voided = self.void()
        weighted = loss if factor == 1.0 else loss * factor
        self._stamp_end(weighted)
        return weighted

    def void(self) -> list[Callable[[], object]]:
        """Keeps a backward pass of weight 0 out of the gradients; returns what ends that."""
        return [p.register_hook(torch.zeros_like).remove for p in self.module.parameters() if p.requires_grad]

    def _stamp_end(self, loss: Tensor) -> None:
        if loss.requires_grad and self.part is not None:
            when_backward_ends(loss, self._backward_ended)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None], holders: Sequence[Tensor]) -> None:
        """Weighs a loss and differentiates it with ``run``, in pieces if memory is short; see `Recovery.backward`."""
        weighted = self.weigh(loss)
        self.backward_begins()
        if self._recovery is None:
            run(weighted)
        else:
            self._recovery.backward(weighted, run, holders=(loss, *holders), ended=self._stamp_end)
        while self._voided:
            self._voided.pop()()
        if self.part is None:
            return
        self.backward_is_over(self.part)
        self.probe.exchanged()
        if self.automatic:
            self.times.note()
            self.probe.updating()
        else:
            self.probe.resume()

    def _backward_ended(self) -> None:
        """This rank's own gradients are complete."""
        self.probe.backward_ended()
        self.times.synced |= self.exchanges_gradients()
        if self.automatic:
            self.step_over()

    def exchanges_gradients(self) -> bool:
        """Whether the ranks' gradients meet at the end of the backward pass that runs."""
        wrapped = isinstance(self._model, DistributedDataParallel) and self._model.require_backward_grad_sync
        return self.loses_ranks or wrapped

    def step_over(self) -> None:
        """This rank's own work is over: under manual optimization with ``training_step``, optimizers included."""
        if self.part is None:
            return
        recovery = self._recovery
        self.times.step_over(
            self.part,
            tells_speed=recovery is None or recovery.tells_speed(self.policy.limits.fit),
            decides=self.rebalancer.enabled,
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective, e.g. of ``self.log(..., sync_dist=True)``: waiting for peers is not this rank's work."""
        if self._recovery is not None:
            self._recovery.communicates()
        with self.probe.paused():
            yield

    def gather(self, tensor: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Gathers rows with their gradients, which in a backward pass of weight 0 are 0, and for which it waits."""
        if self._recovery is not None:
            self._recovery.needs_all_rows()
        everyone = self.probe.exchanging(tensor, gather)
        everyone.register_hook(lambda grad: torch.zeros_like(grad) if self._voided else None)
        return everyone

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        controller = self.binder.controller
        if controller is not None and self.failed:
            controller.abandon()
        elif controller is not None:
            controller.drain()
            self.binder.keep_speed()
        super().close()
