"""`BoundedStalenessStrategy`: DDP's recipe on a parameter server that waits for nobody (layer L).

    rank r:   claim -> pull -> training_step, backward -> push           [loop, worker, transport]
                                   '-> gradients into the slot while backward runs
    server:   who is late, who gets what, when is a batch complete       [coordinator, policy, ledger]
              pool the gradients, step the user's own optimizers         [server]
    all:      meet before anything is reduced over ranks                 [elastic]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, DDPArguments
from lightning_hetero.base.checks import check_choice
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.refusals import refuse_saving_in_step
from lightning_hetero.checked import real
from lightning_hetero.stale.decide.policy import Policy, PolicyName
from lightning_hetero.stale.decide.policy import by_name as policy_by_name
from lightning_hetero.stale.fit.held_state import released
from lightning_hetero.stale.fit.meetings import ServerMeetings
from lightning_hetero.stale.fit.optimizers import refuse_unusual_steps
from lightning_hetero.stale.fit.refusals import REFUSALS, refuse_manual_scaling, refuse_monitored_steps
from lightning_hetero.stale.fit.run import StaleRun
from lightning_hetero.stale.fit.step_loop import StepLoop
from lightning_hetero.stale.runtime.layout import CompressionName, check_compression
from lightning_hetero.stale.runtime.start import ServerSettings
from lightning_hetero.types import LossReduction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import Trainer


class BoundedStalenessStrategy(ElasticDDPStrategy[StaleRun]):
    """Data parallelism over a parameter server that bounds staleness and waits for no straggler (after SaPS).

    A drop-in for `DDPStrategy`: number, size and learning rate of updates are DDP's; the samples of one global batch
    come from whatever mix of ranks is fast enough, each computed on parameters at most ``bound`` versions old. What is
    late completes the mean of the update that it missed. Ranks may stall or die; the others go on.

    Args:
        policy: ``"flexible"`` (the default; see `lightning_hetero.stale.policy` for ``"saps"``, ``"asp"``, ``"bsp"``,
            ``"ssp"``), or a `Policy`, e.g. one of ``benchmarks/stale/policies`` or yours.
        bound: most versions a contribution may be old; ``None``: the policy's default.
        grace: longest hold, in parts of a step, of a rank that finds the batch fully claimed; 0 holds nobody; ``None``:
            the policy's default.
        compression: of the gradients pushed: ``None``, ``"bf16"`` or ``"fp16"``.
        nonfinite: what a NaN or infinite gradient does: ``"stop"`` the run with the rank's name, or ``"skip"`` it.
        liveness_s: a rank without a push for so long, and for ten times its predicted time, has its samples given to
            others. One without a sign of life for twelve times as long is left behind where the others meet.
        transport: ``"auto"``: shared memory on the server's node, pair groups to other nodes; ``"pairs"``: these only.
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` times the number of
            devices, as under DDP.
        stream: what an `IterableDataset` is: ``"finite"``: each rank's own stream, of any length; ``None``: refused.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule works too.
        own_data: whether each rank's train dataset has different samples under the same index; ``None``: three samples
            are read and compared.
        monitor: print one line about the ranks at the end of a fit.
        accelerator: as in `DDPStrategy`; the Trainer sets it.
        **ddp: the other arguments of `DDPStrategy` and `DistributedDataParallel`, see `DDPArguments`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an unknown argument; those that cannot hold on several devices are refused with the reason when the
            Trainer is made.
    """

    engine = "stale"
    refusals = REFUSALS

    def __init__(
        self,
        *,
        policy: PolicyName | Policy = "flexible",
        bound: int | None = None,
        grace: float | None = None,
        compression: CompressionName | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        liveness_s: float = 5.0,
        transport: Literal["auto", "pairs"] = "auto",
        stream: Literal["finite"] | None = None,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **ddp: Unpack[DDPArguments],
    ) -> None:  # fmt: skip
        super().__init__(
            global_batch_size=global_batch_size, batch_sampler=batch_sampler, loss_reduction=loss_reduction,
            batch_weight=batch_weight, own_data=own_data, monitor=monitor, accelerator=accelerator, **ddp,
        )  # fmt: skip
        check_choice("nonfinite", nonfinite, ("stop", "skip"))
        check_choice("transport", transport, ("auto", "pairs"))
        check_choice("stream", stream, (None, "finite"), why=": any rank may be assigned samples of a shared stream")
        self.stream: Literal["finite"] | None = stream
        given = {name: value for name, value in (("bound", bound), ("grace", grace)) if value is not None}
        if isinstance(policy, Policy) and given:
            raise ValueError(f"give either a whole policy, or {', '.join(given)}, not both")
        self.policy = policy if isinstance(policy, Policy) else policy_by_name(policy, **given)
        check_compression(compression)
        self.server = ServerSettings(
            policy=self.policy, nonfinite=nonfinite,
            liveness_s=real("liveness_s", liveness_s, above=True), compression=compression, transport=transport,
        )  # fmt: skip

    # ---- set-up and teardown ----------------------------------------------------------------------------------

    def begin(self, trainer: Trainer) -> StaleRun:
        self.find_nodes()
        return StaleRun(trainer, self, self.server, self.same_on_all(), self.invitation, self.stream)

    def same_on_all(self) -> dict[str, str]:
        """Returns what must be the same on all ranks, in words."""
        return {
            "policy": repr(self.policy.settings()),
            "global_batch_size": str(self.shared.global_batch_size),
            "compression": repr(self.server.compression),
            "loss_reduction": self.shared.loss_reduction,
            "transport": self.server.transport,
            "nonfinite": self.server.nonfinite,
            "stream": repr(self.stream),
        }

    def setup(self, trainer: Trainer) -> None:
        if self._run is not None:
            self.check_module(trainer.lightning_module)
            refuse_manual_scaling(trainer.lightning_module)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size == 1:
            return
        refuse_unusual_steps(self.optimizers)
        refuse_monitored_steps(self.lr_scheduler_configs)

    @property
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Sets them; not while the server has those that were set before."""
        if self._loop is not None and [*map(id, optimizers)] != [*map(id, self.optimizers)]:
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise RuntimeError(
                f"rank {self.global_rank} was given other optimizers ({names}) in the middle of a fit, by"
                " trainer.optimizers = ... or setup_optimizers: the parameter server has those that it was started"
                " with. Change their param_groups, begin another fit, or use strategy='hetero_balanced'"
            )
        Strategy.optimizers.__set__(self, optimizers)  # a property of its

    def configure_ddp(self) -> None:
        """No wrapper: gradients go to the server. Ranks start from rank 0's parameters and buffers, as under DDP."""
        assert self.model is not None
        if self._run is not None:
            self.share_start(self.model)

    def idle_on_one_device(self) -> dict[str, Any]:
        return {"nonfinite": "skip"} if self.server.nonfinite == "skip" else {}

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if batch is None:
            return None
        batch = super().batch_to_device(batch, device, dataloader_idx)
        loop = self._loop
        if loop is not None and loop.in_step:
            loop.opened(batch)
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loop = self._loop
        if loop is None:
            return super().training_step(*args, **kwargs)
        with self._left_on_errors(), loop.guard():
            output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            base = super().training_step

            def again(batch: Any) -> Any:
                with loop.guard():
                    return compat.manual_outputs(base(batch, *args[1:], **kwargs))

            with self._left_on_errors():
                loop.training_step_done(again)
        return output

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        loop = self._loop
        if loop is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        run = partial(super().optimizer_step, model=model, **kwargs)
        with self._left_on_errors():
            return loop.step(self._index(optimizer), optimizer, closure, run)

    @contextmanager
    def _left_on_errors(self) -> Iterator[None]:
        """An error ends the batch: whoever handles it, e.g. a finder, may let the ranks meet."""
        try:
            yield
        except BaseException:
            if (loop := self._loop) is not None:
                loop.leave_step(failed=True)
            raise

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().backward(*args, **kwargs)
        if (loop := self._loop) is not None:
            loop.backward_done()
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning wraps a batch that only accumulates in this: its gradients are pushed at the end."""
        with self._left_on_errors(), nullcontext() if self._run is not None else super().block_backward_sync():
            yield
        loop = self._loop
        assert self.lightning_module is not None
        if loop is not None and loop.in_step and self.lightning_module.automatic_optimization:
            loop.accumulated(self.optimizers[0])

    def _index(self, optimizer: Any) -> int:
        return next(i for i, own in enumerate(self.optimizers) if own is optimizer)

    @property
    def _connected(self) -> StaleRun | None:
        """The run, while this rank is connected to a server."""
        run = self._run
        return run if run is not None and run.worker is not None else None

    @property
    def _meetings(self) -> ServerMeetings | None:
        run = self._connected
        return None if run is None else run.meetings

    @property
    def _loop(self) -> StepLoop | None:
        return None if self._run is None else self._run.loop_in_use

    def _in_step(self) -> bool:
        run = self._connected
        return run is not None and run.loop is not None and run.loop.in_step

    # ---- what others may ask ----------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        bound = self.policy.bound_for(self.world_size)
        return {**super().about(), "policy": self.policy.name, "bound": bound}

    def server_metrics(self) -> dict[str, Any]:
        """What the server counted until the ranks last met, see `Counts.as_dict`; empty before."""
        counts = self._run.meetings.counts if self._run is not None else None
        return {} if counts is None else counts.as_dict()

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        run = self._connected
        if self._in_step() and not self._alone:
            refuse_saving_in_step()
        if run is not None and self.is_global_zero:
            run.session.fetch_state()  # and the parameters of that very version
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        run = self._connected
        with released(self.optimizers):
            mine: dict[str, Any] = super().optimizer_state(optimizer)
        if run is None or not self.is_global_zero or not mine:  # empty: it stands in the place of no optimizer
            return mine
        state = run.session.state["optimizers"][self._index(getattr(optimizer, "_optimizer", optimizer))]
        for group, changed in zip(mine["param_groups"], state["groups"], strict=False):  # perhaps more than then
            group.update(changed)
        return {**mine, "state": state["state"]}
