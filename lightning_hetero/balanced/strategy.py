"""`LoadBalancedStrategy`: stock DDP with batches sized to the devices (layer L)."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.balanced.fit.balancing_strategy import BalancingStrategy
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.base.ddp import HeteroDDPStrategy


class LoadBalancedStrategy(BalancingStrategy, HeteroDDPStrategy[BalancedRun]):
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

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if (run := self._run) is not None and run.wants_wrapping():
            wrapped = self.model
            assert isinstance(wrapped, DistributedDataParallel)
            wrapped._remove_autograd_hooks()
            self.model = wrapped.module
            self.configure_ddp()
            run.attach(self.model)
        return super().training_step(*args, **kwargs)
