"""`ShardedBalancedStrategy`: `ModelParallelStrategy` with batches sized to the devices (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_hetero.balanced.fit.balancing_strategy import BalancingStrategy
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.balanced.fit.sharded_run import ShardedRun
from lightning_hetero.balanced.runtime import shard as sharding
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, ModelParallelArguments
from lightning_hetero.base.checks import check_counts
from lightning_hetero.base.setup import CHECKPOINT_KEY
from lightning_hetero.data.stream import StreamMode
from lightning_hetero.lightning_compat.patches import called_as_forward, norms_by, patched, replace_methods
from lightning_hetero.lightning_compat.strategies import remove, set_parallel_sizes, syncs_batch_norm
from lightning_hetero.predictors import Predictor, PredictorName
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import LossReduction

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedBalancedStrategy(BalancingStrategy, ModelParallelStrategy):  # pyright: ignore
    """A model whose parameters are sharded over the ranks (FSDP2), with per-rank batches re-sized to their speed.

    A drop-in for `ModelParallelStrategy`, for models that do not fit one device: the module applies ``fully_shard``,
    and tensor parallelism if it likes, in ``configure_model``, or leaves that to ``shard``. Batches are sized as by
    `LoadBalancedStrategy`: the global batch and the trained weights stay those of one process. The ranks of one
    tensor-parallel group train on the same samples.

    Args:
        data_parallel_size: parts into which each global batch is cut; ``"auto"``: the number of devices divided by
            ``tensor_parallel_size``.
        tensor_parallel_size: devices that share one part; ``"auto"``: the number of devices divided by
            ``data_parallel_size``, or 1 if that is ``"auto"``, too.
        shard: shards a module that has no ``configure_model``: ``"auto"``, its repeated blocks and the rest as one; or
            a list of the blocks' classes.
        predictor: models a rank's time, see `LoadBalancedStrategy`.
        dead_band: relative gain of the predicted step time below which shares stay.
        min_samples: least samples per rank (one number, or one per rank); default a quarter of the equal share.
        max_samples: most samples per rank; default four times the equal share. If together they hold less than the
            global batch, each rank computes its part in pieces, within the step. ``"auto"``: shares grow by at most a
            quarter at a time, and a rank that runs out of memory in one of the first steps learns what fits.
        quantum: shares are multiples of this, see `LoadBalancedStrategy`.
        policy: a whole `BalancePolicy`, instead of ``predictor`` and ``dead_band``.
        rebalance: ``False`` keeps equal shares (exact weighting and metrics stay).
        exchange_every: exchange measurements every k steps; default: every step, fewer when steps are short.
        stream: what an `IterableDataset` is: ``"finite"`` or ``"infinite"`` per rank, or ``"shared"`` by all ranks.
            Finite streams may be of unequal length: a rank that is through counts nothing until all are.
        batch_cost: the work of this rank's batch, padding included, see `LoadBalancedStrategy`.
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` times
            ``data_parallel_size``, as under `ModelParallelStrategy`.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule works too.
        own_data: whether each rank's train dataset has different samples under the same index; ``None``: three samples
            are read and compared.
        monitor: print one line about the ranks at the end of a fit.
        accelerator: the Trainer sets it.
        **stock: the other arguments of `ModelParallelStrategy`, see `ModelParallelArguments`.

    Raises:
        ValueError: an argument is out of range; when the Trainer is made: the sizes do not fit the devices.
        TypeError: an unknown argument.
    """

    engine = "sharded"
    stock = (ModelParallelStrategy,)
    refusals = replace(
        BalancingStrategy.refusals,
        whole="this callback copies or reshapes whole parameters, and here each rank has a part of each. To average"
        " weights, keep {name: p.detach().clone() for name, p in module.named_parameters()} in a callback: parts are"
        " averaged as whole parameters are",
    )
    _unshard: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, *, data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto", shard: sharding.Sharding | None = None,
        predictor: PredictorName | Predictor = "kalman", dead_band: float = 0.02,
        min_samples: int | Sequence[int] | None = None,
        max_samples: int | Sequence[int] | Literal["auto"] | None = None, quantum: int | Literal["auto"] = "auto",
        policy: Literal["predictive"] | BalancePolicy | None = None, rebalance: bool = True,
        exchange_every: int | None = None, stream: StreamMode | None = None,
        batch_cost: Callable[[Any], float] | None = None,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **stock: Unpack[ModelParallelArguments],
    ) -> None:  # fmt: skip
        super().__init__(
            predictor=predictor, dead_band=dead_band, min_samples=min_samples, max_samples=max_samples, quantum=quantum,
            policy=policy, rebalance=rebalance, exchange_every=exchange_every, stream=stream, batch_cost=batch_cost,
            global_batch_size=global_batch_size, batch_sampler=batch_sampler,
            loss_reduction=loss_reduction, batch_weight=batch_weight, own_data=own_data, monitor=monitor,
            accelerator=accelerator, **cast(Any, stock),
        )  # fmt: skip
        check_counts(data_parallel_size=None if data_parallel_size == "auto" else data_parallel_size)
        check_counts(tensor_parallel_size=None if tensor_parallel_size == "auto" else tensor_parallel_size)
        sharding.check_sharding(shard)
        self._distributed: bool = self.given.get("save_distributed_checkpoint", True)
        self._data_parallel: int | Literal["auto"] = data_parallel_size
        self._tensor_parallel: int | Literal["auto"] = tensor_parallel_size
        self._shard: sharding.Sharding | None = shard

    @property
    def agreed(self) -> dict[str, Any]:
        return {"parts": self.parts, "ranks_per_part": self.ranks_per_part, "shard": self._shard}

    @property
    def ranks_per_part(self) -> int:
        """Ranks that train on the same samples: those of a tensor-parallel group."""
        if self._tensor_parallel != "auto":
            return self._tensor_parallel
        return 1 if self._data_parallel == "auto" else max(1, self.world_size // self._data_parallel)

    @property
    def parts(self) -> int:
        return self._data_parallel if self._data_parallel != "auto" else max(1, self.world_size // self.ranks_per_part)

    def set_world_ranks(self) -> None:
        """Called as soon as the Trainer knows its devices.

        Raises:
            ValueError: the two sizes do not fit them.
        """
        super().set_world_ranks()
        data, tensor = self.parts, self.ranks_per_part
        if data * tensor != self.world_size:
            raise ValueError(
                f"data_parallel_size={data} times tensor_parallel_size={tensor} must be the number of devices,"
                f" {self.world_size}: change one of the two, or leave it out"
            )
        set_parallel_sizes(self, data, tensor)

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if module is not None:
            self.check_module(module)
        if self.world_size > 1 and syncs_batch_norm(self):
            raise TypeError(
                "sync_batchnorm=True: ModelParallelStrategy converts no layer. Give the Trainer"
                " nn.SyncBatchNorm.convert_sync_batchnorm(module) and leave out the argument"
            )
        if self._shard is not None and module is not None and not is_overridden("configure_model", module):
            mesh, apart = self.device_mesh["data_parallel"], not module.automatic_optimization
            shard = partial(sharding.shard_module, module, mesh, self._shard, apart=apart)
            steps = {name: called_as_forward(module, name) for name in _STEPS if is_overridden(name, module)}
            self._unshard = replace_methods(module, configure_model=shard, **steps)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._run is not None and self.parts > 1:
            sharding.check_synchronised(self._run.module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._run, ShardedRun):
            self._run.step_begins()
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        super().teardown()
        self._unshard()

    def begin(self, trainer: Trainer) -> BalancedRun:
        run, plugin = super().begin(trainer), self.precision_plugin

        def clip(optimizer: Optimizer, clip_val: float) -> None:
            if not sharding.clip_by_norm(plugin.main_params(optimizer), clip_val):
                type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)

        run.undo.enter_context(patched(plugin, "clip_grad_by_norm", clip))
        run.undo.enter_context(norms_by(sharding.total_norm, sharding.each_norm))
        return run

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def _saves(self) -> bool:
        return not isinstance(self._run, ShardedRun) or self._run.saves()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return super().lightning_module_state_dict() if self._saves() else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As stock, of an optimizer that has made no step, too, and with parameters in the order of its groups."""
        if not self._saves():
            return {}
        own = getattr(optimizer, "_optimizer", optimizer)
        fresh = sharding.is_fresh(own)
        state = super().optimizer_state(own)
        if fresh:
            own.state.clear()
            state = {**state, "state": {}} if state else state
        if state and not self._distributed and self.model is not None:
            sharding.order_groups(state, own, self.model)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As stock; a folder takes the name of an earlier one when all is written."""
        if not self._saves():
            return
        if not self._distributed:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        path = Path(filepath)
        new, old = (path.with_name(f".{path.name}.{which}") for which in ("new", "old"))
        if self.is_global_zero:  # all others wait for it to say where
            remove(new, old)
        super().save_checkpoint(checkpoint, new, storage_options)
        if self.is_global_zero:
            if path.exists() or path.is_symlink():
                path.rename(old)
            new.rename(path)
            remove(old)

    def read_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As stock, which mixes up parameters that an optimizer has not in the model's order, or fails."""
        path = Path(self.broadcast(checkpoint_path))
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().read_checkpoint(path, *args, **kwargs)
        finally:
            self.optimizers = optimizers
        model, saved = self.model, checkpoint.get("optimizer_states", ())
        if (self._run is None and self._one_device is None) or model is None:  # an evaluation
            return checkpoint
        for index, optimizer in enumerate(optimizers):
            if path.is_dir():
                sharding.load_sharded(path, f"optimizer_{index}", optimizer, model)
            elif index < len(saved):
                sharding.load_whole(saved[index], optimizer, model, ours=CHECKPOINT_KEY in checkpoint)
        return checkpoint

    def make_run(self, trainer: Trainer) -> BalancedRun:
        return ShardedRun(trainer, self, self.settings, members=self.ranks_per_part)
