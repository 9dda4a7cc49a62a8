"""State of one fit: everything that exists only between set-up and teardown (layer L)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.balanced.loaders import LoaderBinder
from lightning_hetero.balanced.policy import BalancePolicy
from lightning_hetero.balanced.weighting import LossWeight
from lightning_hetero.cluster.clock import StepProbe, when_backward_ends
from lightning_hetero.data import Part
from lightning_hetero.glue.checks import check_same_settings
from lightning_hetero.glue.setup import own_memory
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import Event

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_hetero.balanced.strategy import LoadBalancedStrategy

__all__ = ["BalancedRun"]


class BalancedRun:
    """One fit on one rank: a side channel, the bound loaders, the stopwatch and the weight of the current batch.

    Args:
        strategy: gives settings, device and timeout; its process group exists.
        trainer: the running trainer.
    """

    def __init__(self, strategy: LoadBalancedStrategy, trainer: Trainer) -> None:
        from lightning_hetero.callbacks import BatchRebalancer

        module = trainer.lightning_module
        self.trainer = trainer
        self.strategy = strategy
        self.automatic = module.automatic_optimization
        self.failed = False
        if strategy.world_size > 1:
            own_memory(module)
        self.part: Part | None = None
        group = dist.new_group(backend="gloo", timeout=strategy.timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.channel = SideChannel(group)
        given = [c for c in compat.trainer_callbacks(trainer) if isinstance(c, BatchRebalancer)]
        # Not added to the Trainer's callbacks: it has no hook to call, and calling none costs some 10 us each.
        self.rebalancer = given[0] if given else BatchRebalancer(strategy.policy, enabled=strategy.rebalance)
        self.policy: BalancePolicy = self.rebalancer.policy or strategy.policy
        check_same_settings(self.channel.all_gather_object(self._fingerprint()))
        self.binder = LoaderBinder(trainer, self.channel, self.policy, strategy._settings)
        self.weight = LossWeight(
            channel=self.channel,
            world_size=self.channel.world_size,
            reduction=strategy._loss_reduction,
            batch_weight=strategy._batch_weight or getattr(module, "batch_weight", None),
        )
        self.probe = StepProbe(strategy.root_device, waiting=strategy._waiting)
        self._undo_sampler = compat.keep_train_sampler(trainer)
        self._measured: deque[Part] = deque()  # closed steps whose time is not yet known
        self._finished: tuple[Part, float] | None = None  # a step whose time is known, but not yet its wait
        self._voided: list[Any] = []  # hooks that keep a batch of weight 0 out of the gradients
        self._wait_s = 0.0
        self._returned_s: float | None = None
        self._sent = False
        self._synced = False
        self._events: deque[tuple[str, Part, float, dict[str, Any]]] = deque(maxlen=4096)
        self._opened_s = time.perf_counter()
        self._last_decision: object = None

    def _fingerprint(self) -> dict[str, str]:
        settings = {name: repr(getattr(self.strategy._settings, name)) for name in self.strategy._settings.__slots__}
        return {
            "lightning_hetero": __version__,
            "torch": torch.__version__,
            "loss_reduction": self.strategy._loss_reduction,
            "rebalance": str(self.rebalancer.enabled),
            "accumulate_grad_batches": str(self.trainer.accumulate_grad_batches),
            "ddp": repr(sorted(self.strategy.ddp_arguments.items())),
            **settings,
            **self.policy.settings(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint brings, before the loaders are set up."""
        self.binder.orders.resume = state
        if state.get("policy"):
            self.policy.load_state_dict(state["policy"])

    # ---- one step ---------------------------------------------------------------------------------------------

    def open(self, batch: Any, transfer_s: float) -> None:
        """The next batch is on the device: which part is it, what does it weigh."""
        part = self.binder.open(compat.upcoming_batch(self.trainer))
        self.part = part
        self._sent = self._synced = False
        self._returned_s = None
        self.weight.open(part, batch)
        self.probe.arm(part.fetch_s + transfer_s)

    def dummy_guard(self) -> AbstractContextManager[Any]:
        """A rank without samples trains on a dummy batch, which neither metrics nor logged means may count."""
        if self.part is None or self.part.samples:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(compat.metrics_frozen(self.trainer.lightning_module))
        stack.enter_context(compat.dummy_batch_unlogged(self.trainer))
        return stack

    def weigh(self, loss: Tensor) -> Tensor:
        """Returns the loss to differentiate and arranges the stamp at the end of its backward."""
        if self.weight.waits:  # for the peers' token counts
            with self.probe.paused():
                self.weight.factor()
        factor = self.weight.factor()
        if factor == 0.0:  # not by the product alone: 0 * NaN is NaN, e.g. a mean over no tokens
            parameters = self.trainer.lightning_module.parameters()
            self._voided = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
        weighted = loss if factor == 1.0 else loss * factor
        if weighted.requires_grad:
            when_backward_ends(weighted, self._backward_ended)
        return weighted

    def _backward_ended(self) -> None:
        self.probe.backward_ended()
        model = self.strategy.model
        self._synced |= isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        if self.automatic:
            self._step_measured()

    def backward_returned(self) -> None:
        """The gradient exchange is over."""
        for handle in self._voided:
            handle.remove()
        self._voided = []
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
            # Sent while the gradients still travel, so the wait is the last known one. A dummy batch is one sample.
            controller.measured(max(1, done.samples), compute_s, self._wait_s)
            self._finished = (done, compute_s)
            if done is not part or not self.automatic:
                self._note_step()
        if self._synced and self.rebalancer.enabled and controller.wants_exchange(part.epoch, part.step):
            wait = self.channel.all_gather_row(controller.row(part.epoch, part.step))
            controller.sent(part.epoch, part.step, wait)
        controller.catch_up()  # beside the gradient exchange, where it delays nobody
        report = controller.report
        if report is not None and report.decision.changed and report.decision is not self._last_decision:
            self._last_decision = report.decision
            decision = report.decision
            data = {
                "shares": list(decision.shares),
                "predicted_s": decision.predicted_s,
                "reason": decision.reason,
            }
            self._note("decision", part, data)

    def _note_step(self) -> None:
        """Notes the measured step once its own wait is known."""
        if self._finished is not None:
            (part, compute_s), self._finished = self._finished, None
            data = {"samples": part.samples, "compute_s": compute_s, "wait_s": self._wait_s}
            self._note("step", part, data)

    def _note(self, kind: str, part: Part, data: dict[str, Any]) -> None:
        self._events.append((kind, part, time.perf_counter() - self._opened_s, data))

    def take_events(self) -> list[Event]:
        """Returns and forgets the noted events."""
        rank = self.channel.rank
        events = [
            Event(kind=kind, rank=rank, epoch=part.epoch, step=part.step, t_s=t_s, data=data)
            for kind, part, t_s, data in self._events
        ]
        self._events.clear()
        return events

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the run; after a failure without waiting for anybody."""
        self.probe.detach()
        self._undo_sampler()
        self.binder.restore_trainer()
        controller = self.binder.controller
        if controller is not None and self.failed:
            controller.abandon()
        elif controller is not None:
            controller.drain()
        self.channel.close(destroy=not self.failed)
