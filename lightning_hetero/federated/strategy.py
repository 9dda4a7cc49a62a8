"""`FederatedStrategy`: each rank's own data, local steps, and rare weighted averages (layer L).

    rank r:  own batches of B_r samples -> tau local steps, nothing sent -> average with the others   [loaders, run]
    next round: predict the ranks' times, solve, perhaps change B_r (or tau_r, or the learning rate)   [policy]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor
from typing_extensions import Unpack

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, DDPArguments
from lightning_hetero.base.checks import check_choice, check_counts
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.metrics import is_mean
from lightning_hetero.checked import real
from lightning_hetero.federated.decide.policy import RoundPolicy, RoundPolicyName, by_name
from lightning_hetero.federated.fit.run import FederatedRun
from lightning_hetero.federated.fit.settings import REFUSALS, FederatedSettings
from lightning_hetero.federated.runtime.server import ServerOptimizer, ServerStep
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.types import LossReduction


class FederatedStrategy(ElasticDDPStrategy[FederatedRun]):
    """Local steps on each rank's own data, whose results are averaged by the samples they have used (after LB-BSP).

    The train loader of each rank is its own and stays with it: nothing is divided, nothing is sent but parameters. In a
    round every rank makes ``local_steps`` optimizer steps; then parameters, buffers and optimizer states become their
    average over ranks, weighted by samples. Batches are sized so that all ranks get there together (``"lb-bsp"``).

    Args:
        local_steps: optimizer steps of a round, tau; with ``"adaptive_steps"`` their mean over ranks.
        policy: ``"lb-bsp"`` (batches by speed), ``"fedavg"`` (the loader's batches), ``"adaptive_steps"`` (more local
            steps on fast devices), ``"scaled_lr"`` (batches by speed, learning rates in proportion), or a
            `RoundPolicy`, e.g. ``FedAvg(again=True)``.
        min_samples: least samples of a rank's batch (one number, or one per rank); default a quarter of the equal
            share.
        max_samples: most samples, e.g. what its memory holds; default four times the equal share. Never more than the
            rank has.
        server: makes an optimizer that steps towards the average, e.g. ``partial(torch.optim.SGD, lr=1.0,
            momentum=0.9)``; ``None``: the average is taken.
        proximal: strength of FedProx's pull towards the last average, mu; 0: none.
        min_clients: ranks that must be left for the run to go on without one that is lost, which may come again;
            ``None``: a lost rank ends the run, as under DDP.
        liveness_s: with ``min_clients``, silence after which a rank is left out where the others meet.
        stream: what an `IterableDataset` is: ``"finite"``: each rank's own stream, of any length; ``None``: refused.
        global_batch_size: samples of all ranks per local step, where the policy re-sizes batches; ``None``: the sum of
            the ranks' own batch sizes.
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
        ValueError: an argument is out of range, or would be ignored.
        TypeError: an unknown argument; those that cannot hold on several devices are refused with the reason when the
            Trainer is made.
    """

    engine = "federated"
    refusals = REFUSALS

    def __init__(
        self,
        *,
        local_steps: int = 10,
        policy: RoundPolicyName | RoundPolicy = "lb-bsp",
        min_samples: int | Sequence[int] | None = None,
        max_samples: int | Sequence[int] | None = None,
        server: ServerOptimizer | None = None,
        proximal: float = 0.0,
        min_clients: int | None = None,
        liveness_s: float = 30.0,
        stream: Literal["finite"] | None = None,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **ddp: Unpack[DDPArguments],
    ) -> None:  # fmt: skip
        super().__init__(
            global_batch_size=global_batch_size, batch_sampler=batch_sampler, loss_reduction=loss_reduction,
            batch_weight=batch_weight, own_data=own_data, monitor=monitor, accelerator=accelerator, **ddp,
        )  # fmt: skip
        if self.shared.own_data is False:
            raise ValueError("own_data=False: each rank trains on its own loader's data here; drop it")
        check_counts(local_steps=local_steps, min_clients=min_clients)
        check_choice("stream", stream, (None, "finite"), why=": each rank trains on its own data")
        self.bounds = ShareBounds(lower=min_samples, upper=max_samples)
        self.policy = policy = by_name(policy) if isinstance(policy, str) else policy
        if not isinstance(policy, RoundPolicy):
            raise TypeError(f"policy={policy!r} must be a name or a lightning_hetero.federated.policy.RoundPolicy")
        self.settings = FederatedSettings(
            local_steps=local_steps, policy=policy, min_samples=min_samples, max_samples=max_samples,
            server=None if server is None else ServerStep(server), proximal=real("proximal", proximal),
            min_clients=min_clients, liveness_s=real("liveness_s", liveness_s, above=True), stream=stream,
        )  # fmt: skip

    # ---- set-up -----------------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self.world_size > 1:
            self.bounds.check_ranks(self.world_size)
            if (self.settings.min_clients or 1) > self.world_size:
                raise ValueError(
                    f"min_clients={self.settings.min_clients} must be at most the number of ranks, {self.world_size}"
                )

    def begin(self, trainer: Trainer) -> FederatedRun:
        if self.settings.min_clients is not None:
            self.find_nodes()
        return FederatedRun(trainer, self, self.settings, self.invitation)

    def can_lose_ranks(self) -> bool:
        return self.settings.min_clients is not None

    def setup(self, trainer: Trainer) -> None:
        if self._run is not None:
            self.check_module(trainer.lightning_module)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """No wrapper. Ranks start from rank 0's parameters and buffers, as under DDP."""
        assert self.model is not None
        if self._run is None:
            super().configure_ddp()
            return
        self.share_start(self.model)

    def idle_on_one_device(self) -> dict[str, Any]:
        settings = self.settings
        given = {"server": settings.server, "proximal": settings.proximal or None, "max_samples": settings.max_samples}
        return {name: value for name, value in given.items() if value is not None}

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        run, move = self._run, super().batch_to_device
        if batch is None:
            return None
        if run is None or not run.trainer.training:
            return move(batch, device, dataloader_idx)
        return run.counts.moved(batch, lambda host: move(host, device, dataloader_idx))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        with nullcontext() if run is None else run.dummy_guard():
            return super().training_step(*args, **kwargs)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether a local step ends before Lightning counts it: with the rank's stream, within a window of batches."""
        return self._run is not None and self._run.cuts_step

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._run is not None:
            self._run.pull()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if run.steps.counts_nothing:
            output = closure()
            optimizer.zero_grad()
            return output
        with run.scaled(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of integers are exact. Values logged for a training batch stay this rank's: nothing is sent then."""
        run = self._run
        a_mean = isinstance(tensor, Tensor) and is_mean(reduce_op) and tensor.is_floating_point()
        if run is not None and a_mean and compat.batch_results_open(run.trainer):
            return tensor
        with self.waiting_for_peers():
            return super().reduce(tensor, group, reduce_op)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What is saved is the average of all ranks, which they make now if they have trained since the last one."""
        if self._run is not None and self._run.fitting:
            self._run.meet()
        return super().lightning_module_state_dict()
