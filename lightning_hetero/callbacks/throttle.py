"""Lets every rank of a Trainer behave like a rank of a `Scenario` (layer L)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_hetero.callbacks.reporting import count_samples, reporting_of
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.emulate.throttle import Throttle, scenario_steps
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends


class ThrottleCallback(Callback):
    """Emulates unequal devices under any Trainer and any strategy; only training steps are slowed down.

    Forward and backward of a batch take the scenario's time, real work included. The sleep comes once per batch, before
    its first backward pass, so it is part of the rank's own compute and every peer waits for it in the gradient
    exchange, as for a slow device; it leaves as much time as the backward passes before took, see
    `lightning_hetero.emulate.Throttle`. A batch without a backward pass sleeps at its end. Under
    `HeteroPipelineStrategy` each stage sleeps for its own part of the work, by the same rule. Validation, testing and
    prediction run at full speed. On a GPU the host waits for the work before it reads the clock.

    Collectives inside of forward and backward, e.g. SyncBatchNorm's, count as work; DDP's broadcast of buffers and its
    gradient exchange do not.

    Args:
        scenario: what to emulate; the rank is the Trainer's global rank.
        step_every_s: let the scenario's steps pass with time, one every so many seconds since its first batch,
            instead of with the training's steps: a neighbour's load on a shared machine does not wait for us.
        throttle: makes the runtime, ``(scenario, rank) -> Throttle``; injectable for tests.

    Raises:
        TypeError: ``scenario`` is no `Scenario`.
        ValueError: ``step_every_s`` is not above 0.

    >>> callback = ThrottleCallback(Scenario(speeds=[1.0, 0.25], sample_s=0.003))
    """

    def __init__(
        self, scenario: Scenario, *, step_every_s: float | None = None, throttle: Callable[..., Throttle] = Throttle
    ) -> None:
        if not isinstance(scenario, Scenario):
            raise TypeError(f"scenario={scenario!r} must be a Scenario, e.g. Scenario(speeds=[1.0, 0.5])")
        if step_every_s is not None and not step_every_s > 0.0:
            raise ValueError(f"step_every_s={step_every_s!r} must be > 0 (seconds per step of the scenario)")
        self.scenario, self.step_every_s = scenario, step_every_s
        self._scenario_step: Callable[[int], int] = int  # made in fit, as the throttle: the callback is pickled before
        self._make_throttle = throttle
        self._throttle: Throttle | None = None
        self._own: StepProbe | None = None  # of a sharded module, or on a device that is asynchronous
        self._taken_over = False
        self._hooks, self._undo = ExitStack(), ExitStack()
        self._batch: Any = None  # that runs, and its samples
        self._counted = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A strategy whose ranks do different parts of a step sleeps on its own, see `Reporting.emulate`."""
        if stage == "fit" and (unused := self.scenario.unused(trainer.world_size)):
            rank_zero_warn(
                f"the emulated scenario describes more ranks than the {trainer.world_size} that train; without effect:"
                f" {'; '.join(unused)}"
            )
        reporting = reporting_of(trainer) if stage == "fit" else None
        self._taken_over = reporting is not None and reporting.emulate(self.scenario)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        device = device_of(trainer.strategy.root_device)
        sharded = any(isinstance(module, FSDPModule) for module in pl_module.modules())  # each layer waits for peers
        self._own = own = StepProbe(device) if sharded or device.asynchronous else None
        clock = {} if own is None else {"clock": lambda: own.passed_s}
        if sharded and own and (reporting := reporting_of(trainer)) is not None:
            reporting.pause_too(own)
        self._throttle = throttle = self._make_throttle(self.scenario, rank, **clock)
        if not self._taken_over and self.scenario.mem_cap(rank) is not None:
            self._undo.enter_context(self._memory_capped(trainer, pl_module, throttle))

    def _memory_capped(
        self, trainer: Trainer, module: LightningModule, throttle: Throttle
    ) -> AbstractContextManager[None]:
        """Inside, ``training_step`` runs out of the emulated memory, where a device would, too."""
        original = module.training_step

        @functools.wraps(original)  # Lightning looks at the signature
        def training_step(*args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else next(iter(kwargs.values()))
            # A batch that is not the loop's is a piece of it, of which no loader and no strategy tells the size.
            whole = batch is self._batch
            throttle.hold(self._counted if whole else count_samples(trainer, batch, whole=False))
            return original(*args, **kwargs)

        return patched(module, "training_step", training_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._scenario_step = scenario_steps(self.step_every_s)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Parameters may have been frozen or thawed since the last epoch."""
        self._hooks.close()
        throttle = self._throttle
        if throttle is None or self._taken_over:
            return
        if self._own is not None:
            self._own.attach(pl_module)
            self._hooks.callback(self._own.detach)
        if trainer.strategy.model is not pl_module:  # wrapped: DDP's forward waits before it calls the module's
            self._hooks.callback(pl_module.register_forward_pre_hook(lambda *_: throttle.begin_work()).remove)
        for parameter in pl_module.parameters():
            if parameter.requires_grad and self._own is None:
                hook = parameter.register_post_accumulate_grad_hook(lambda _: throttle.gradient_came())
                self._hooks.callback(hook.remove)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._throttle is None:
            return
        counts = self._throttle.counts_samples and not self._taken_over
        samples = count_samples(trainer, batch) if counts else 0
        self._batch, self._counted = batch, samples
        if self._own is not None:
            self._own.begin()
        # Counted over epochs and restored from checkpoints, unlike batch_idx and a count of our own.
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        self._throttle.begin(self._scenario_step(step), samples)

    on_extra_batch_start = on_train_batch_start  # a strategy's, for a further batch within the same step of the loop

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        throttle = self._throttle
        if throttle is None or self._taken_over or not trainer.training:
            return
        throttle.before_backward()
        if loss.requires_grad:
            loss.register_hook(lambda _: throttle.backward_began())
            if self._own is not None:
                when_backward_ends(loss, throttle.gradient_came)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._throttle is not None and not self._taken_over and trainer.training:
            self._throttle.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None
        if self._throttle is not None and not self._taken_over:
            self._throttle.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._hooks.close()
        self._throttle, self._own, self._scenario_step, self._batch = None, None, int, None
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "fit")
