"""State of one fit: everything that exists only between set-up and teardown (layer L)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.decide.controlled import ControlledPolicy
from lightning_hetero.balanced.decide.policy import BalancePolicy, Decision
from lightning_hetero.balanced.fit.loaders import BalancedBinder, BatchSettings
from lightning_hetero.balanced.fit.rebalancer import BatchRebalancer
from lightning_hetero.balanced.runtime.batch_norm import statistics_kept
from lightning_hetero.balanced.runtime.loss_weight import LossWeight
from lightning_hetero.data import Part
from lightning_hetero.glue.loaders import SharedSettings
from lightning_hetero.glue.run import EngineRun
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.types import StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["BalanceSettings", "BalancedRun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    """The strategy's own arguments; see `LoadBalancedStrategy`."""

    policy: BalancePolicy
    rebalance: bool
    batches: BatchSettings
    waiting_modules: tuple[type[nn.Module], ...]
    ddp_arguments: Mapping[str, Any]


class BalancedRun(EngineRun[BalancedBinder]):
    """One fit on one rank: the bound loaders, the stopwatch and the weight of the current batch.

    Args:
        trainer: the running trainer.
        shared, settings: the strategy's arguments.
        timeout: of collectives.
        device: of this rank.

    Attributes:
        part: this rank's part of the batch that runs, or ran last; None: a batch of stock DDP's.
        rebalancer: the Trainer's, or one of our own.
        policy: decides the shares.
    """

    def __init__(
        self,
        trainer: Trainer,
        shared: SharedSettings,
        settings: BalanceSettings,
        *,
        timeout: timedelta | None,
        device: torch.device,
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
        agreed = {name: repr(getattr(settings.batches, name)) for name in BatchSettings.__slots__}
        agreed |= {
            "global_batch_size": str(shared.global_batch_size),
            "batch_sampler": shared.batch_sampler,
            "loss_reduction": shared.loss_reduction,
            "rebalance": str(self.rebalancer.enabled),
            "ddp": repr(sorted(settings.ddp_arguments.items())),
            **self.policy.settings(),
        }
        super().__init__(trainer, timeout=timeout, settings=agreed)
        self.automatic = self.module.automatic_optimization
        self.part: Part | None = None
        self.binder = BalancedBinder(trainer, self.channel, self.policy, shared, settings.batches)
        self.undo.callback(self.binder.restore_trainer)
        self.undo.callback(compat.watch_train_source(trainer, self.binder.announce))
        self.weight = LossWeight(
            channel=self.channel,
            world_size=self.channel.world_size,
            reduction=shared.loss_reduction,
            batch_weight=shared.weight_in(self.module),
        )
        self.probe = StepProbe(device, waiting=(nn.SyncBatchNorm, *settings.waiting_modules))
        self.undo.callback(self.probe.detach)
        self._model: nn.Module | None = None
        self._measured: deque[Part] = deque()  # closed steps whose time is not yet known
        self._finished: tuple[Part, float] | None = None  # a step whose time is known, but not yet its wait
        self._voided: list[Any] = []  # hooks that keep a batch of weight 0 out of the gradients
        self._wait_s = 0.0
        self._returned_s: float | None = None
        self._sent = False
        self._synced = False

    def attach(self, model: nn.Module | None) -> None:
        """Takes the module as it is trained, wrapped or not, once set-up is over."""
        self._model = model
        self.probe.attach(self.module)

    def resume(self, state: Mapping[str, Any]) -> None:
        self.binder.resume(state)
        if state.get("policy"):
            self.policy.load_state_dict(state["policy"])

    def state_dict(self) -> dict[str, Any]:
        return self.binder.state_dict()

    # ---- what others may ask ----------------------------------------------------------------------------------

    def current_samples(self) -> int | None:
        return None if self.part is None else self.part.samples

    @property
    def user_accumulation(self) -> int:
        return self.binder.user_accumulation

    @property
    def shares(self) -> tuple[int, ...]:
        controller = self.binder.controller
        return () if controller is None else controller.policy.shares

    def step_report(self) -> StepReport | None:
        controller = self.binder.controller
        return controller.report if controller is not None else None

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

    def open(self, batch: Any, transfer_s: float) -> None:
        """The next batch is on the device: which part is it, what does it weigh."""
        if self.binder.equal is not None:
            self.part = None
            self.weight.open_equal(batch)
            return
        part = self.binder.open(compat.upcoming_batch(self.trainer))
        self.part = part
        self._sent = self._synced = False
        self._returned_s = None
        self.weight.open(part, batch)
        self.probe.arm(part.fetch_s + transfer_s)

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
        if weighted.requires_grad and self.part is not None:
            when_backward_ends(weighted, self._backward_ended)
        return weighted

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
        self._wait_s = self.probe.wait_s
        if self.automatic:
            self._note_step()
            self._returned_s = time.perf_counter()
        else:
            self.probe.resume()

    def manual_step_done(self) -> None:
        """Manual optimization: the step ends with ``training_step``, optimizers included."""
        self._step_measured()

    def optimizer_stepped(self) -> None:
        """Clipping and update ran since the gradients were there; their time belongs to the next measurement."""
        if self._returned_s is not None:
            self.probe.add(time.perf_counter() - self._returned_s)
            self._returned_s = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective, e.g. of ``self.log(..., sync_dist=True)``: waiting for peers is not this rank's work."""
        started_s = time.perf_counter()
        with self.probe.paused():
            yield
        if self._returned_s is not None:
            self._returned_s += time.perf_counter() - started_s

    def _step_measured(self) -> None:
        controller, part = self.binder.controller, self.part
        if self._sent or controller is None or part is None:  # a closure may run more than once per step
            return
        self._sent = True
        self.probe.close()
        self._measured.append(part)
        while (compute_s := self.probe.take()) is not None:  # CUDA: of the step before
            done = self._measured.popleft()
            # Sent while the gradients still travel, so the wait is the last known one.
            controller.measured(done.computed, compute_s, self._wait_s)
            self._finished = (done, compute_s)
            if done is not part or not self.automatic:
                self._note_step()
        if self._synced and self.rebalancer.enabled and controller.wants_exchange(part.epoch, part.step):
            wait = self.channel.all_gather_row(controller.row(part.epoch, part.step))
            controller.sent(part.epoch, part.step, wait)
        controller.catch_up()  # beside the gradient exchange, where it delays nobody
        while controller.news:
            self._note_decision(part, controller.news.popleft())

    def _note_decision(self, part: Part, decision: Decision) -> None:
        if decision.outcome:
            self.events.note("outcome", part.epoch, part.step, decision.outcome)
        if decision.changed:
            data = {
                "shares": list(decision.shares),
                "predicted_s": decision.predicted_s,
                "reason": decision.reason,
                **decision.data,
            }
            self.events.note("decision", part.epoch, part.step, data)

    def _note_step(self) -> None:
        """Notes the measured step once its own wait is known."""
        if self._finished is not None:
            (part, compute_s), self._finished = self._finished, None
            data = {"samples": part.samples, "compute_s": compute_s, "wait_s": self._wait_s}
            self.events.note("step", part.epoch, part.step, data)

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        controller = self.binder.controller
        if controller is not None and self.failed:
            controller.abandon()
        elif controller is not None:
            controller.drain()
        super().close()
