"""`LoadBalancedStrategy`: stock DDP with batches sized to the devices (layer L)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.balanced.fit.balancing_strategy import BalancingStrategy
from lightning_hetero.balanced.fit.elastic_run import ElasticBalancedRun
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.lightning_compat.patches import patched


class LoadBalancedStrategy(BalancingStrategy, ElasticDDPStrategy[BalancedRun]):
    """Synchronous data parallelism with per-rank batches re-sized so that all ranks finish together (LB-BSP).

    A drop-in for `DDPStrategy`: the global batch stays what stock DDP would train on and the gradient is the mean over
    its samples, so the trained weights are those of a single process; only the time per step changes. A rank that runs
    out of memory computes that step in pieces and gets fewer samples from then on.

    Args:
        predictor: models a rank's time: ``"kalman"``, ``"narx"`` (it is told the host's load, too), ``"ewma"``,
            ``"last"``, or a `Predictor`.
        dead_band: relative gain of the predicted step time below which shares stay.
        min_samples: least samples per rank (one number, or one per rank); default a quarter of the equal share.
        max_samples: most samples per rank; default four times the equal share. If together they hold less than the
            global batch, each rank computes its part in pieces, within the step. ``"auto"``: shares grow by at most a
            quarter at a time, and a rank that runs out of memory in one of the first steps learns what fits.
        quantum: shares are multiples of this. ``"auto"``: 1, but where the module is compiled again for each number of
            samples, and on devices with tensor cores, a power of two that divides the global batch.
        policy: a whole `BalancePolicy`, instead of ``predictor`` and ``dead_band``; ``None`` and ``"predictive"``:
            the one that these two describe.
        rebalance: ``False`` keeps equal shares (exact weighting and metrics stay).
        exchange_every: exchange measurements every k steps; default: every step, fewer when steps are short.
        stream: what an `IterableDataset` is: ``"finite"`` or ``"infinite"`` per rank, or ``"shared"`` by all ranks.
            Finite streams may be of unequal length: a rank that is through counts nothing until all are.
        batch_cost: the work of this rank's batch, padding included, e.g. ``lambda batch: batch["ids"].numel()``, where
            samples differ in it: a long batch is then not taken for a slow device. A method of that name on the
            LightningModule serves too. Default: ``batch_weight`` if given, else the number of samples.
        min_ranks: ranks that must be left for the run to go on without one (not rank 0) that is lost. They train on its
            samples, so that weights stay those of a single process. Gradients are then exchanged behind the backward
            pass, over gloo. ``None``: a lost rank ends the run, as under DDP.
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` times the number of
            devices, as under DDP.
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

    engine = "balanced"
    _stepping = False  # inside training_step

    def can_lose_ranks(self) -> bool:
        return self.settings.min_ranks is not None

    def _in_step(self) -> bool:
        return self._stepping

    def set_world_ranks(self) -> None:
        if self.can_lose_ranks():
            self.refusals = _REFUSALS  # pyright: ignore[reportAttributeAccessIssue]
        super().set_world_ranks()
        least = self.settings.min_ranks or 1
        if 1 < self.world_size < least:
            raise ValueError(f"min_ranks={least} must be at most the number of ranks, {self.world_size}")

    def make_run(self, trainer: Trainer) -> BalancedRun:
        if not self.can_lose_ranks():
            return super().make_run(trainer)
        self.find_nodes()
        return ElasticBalancedRun(trainer, self, self.settings)

    def process_dataloader(self, dataloader: object) -> object:
        found, run = super().process_dataloader(dataloader), self._run
        if isinstance(run, ElasticBalancedRun) and run.members.joining and run.trainer.training:
            run.clients.admission.come_in()
        return found

    def setup(self, trainer: Trainer) -> None:
        if self._run is not None and self.can_lose_ranks():
            self.check_module(trainer.lightning_module)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """No wrapper where ranks may be lost; they start from rank 0's parameters and buffers, as under DDP."""
        if self._run is None or not self.can_lose_ranks():
            super().configure_ddp()
            return
        assert self.model is not None
        self.share_start(self.model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if (run := self._run) is not None and run.wants_wrapping():
            wrapped = self.model
            assert isinstance(wrapped, DistributedDataParallel)
            wrapped._remove_autograd_hooks()
            self.model = wrapped.module
            self.configure_ddp()
            run.attach(self.model)
        with patched(self, "_stepping", self.can_lose_ranks()):
            return super().training_step(*args, **kwargs)


_REFUSALS = replace(
    BalancingStrategy.refusals,
    no_wrapper="with min_ranks there is no DistributedDataParallel, which cannot go on without a rank",
    comm_hooks="with min_ranks gradients are not exchanged by DDP, so its communication hooks have no place: drop one",
    sync_batch_norm="min_ranks with SyncBatchNorm, whose exchanges in a step cannot be made again without a rank: set"
    " sync_batchnorm=False, use GroupNorm, or drop min_ranks",
    zero="min_ranks with ZeroRedundancyOptimizer: a rank that is lost would take its part of the state with it. Use the"
    " optimizer that it wraps",
)
