"""`LoadBalancedStrategy`: stock DDP with batches sized to the devices (layer L).

One training batch, with the collaborator that does the work:

    fetch -> parts [data] -> open: weight [weighting] -> forward -> * weight -> backward -> own gradients complete
                                                                        |-> stopwatch stops [cluster.clock]
                                                                        '-> record sent, not waited for [transport]
    next fetch: records due by now -> predict, solve, maybe change the shares [controller, policy]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.decide.controlled import ControlledPolicy
from lightning_hetero.balanced.fit.in_step import InStep
from lightning_hetero.balanced.fit.loaders import BatchSettings
from lightning_hetero.balanced.fit.plain_backward import PlainBackward
from lightning_hetero.balanced.fit.rebalancer import BatchRebalancer
from lightning_hetero.balanced.fit.refusals import PolicyName, chosen_policy, controlled_policy
from lightning_hetero.balanced.fit.run import BalancedRun, BalanceSettings
from lightning_hetero.base.checks import check_choice, check_controller, check_counts, check_flags
from lightning_hetero.base.metrics import integer_mean_, is_mean, weighted_mean_
from lightning_hetero.base.refusals import Refusals
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.callbacks.work import check_batch_cost
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.controller.replans import Replan
from lightning_hetero.data.costs import check_sample_costs
from lightning_hetero.data.stream import StreamMode
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.predictors import Predictor, PredictorName
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["LoadBalancedStrategy"]


class LoadBalancedStrategy(HeteroStrategy[BalancedRun]):
    """Synchronous data parallelism with per-rank batches re-sized so that all ranks finish together (LB-BSP).

    A drop-in for `DDPStrategy`: the global batch stays what stock DDP would train on and the gradient is the mean over
    its samples, so the trained weights are those of a single process; only the time per step changes. A rank that runs
    out of memory computes that step in pieces and gets fewer samples from then on.

    Args:
        predictor: models a rank's time: ``"kalman"``, ``"narx"`` (it is told the host's load, too), ``"ewma"``,
            ``"last"``, ``"curve"``, or a `Predictor`.
        dead_band: relative gain of the predicted step time below which shares stay.
        cooldown: measurements to let pass after a change of shares.
        min_samples: least samples per rank (one number, or one per rank); default a quarter of the equal share.
        max_samples: most samples per rank; default four times the equal share. If together they hold less than the
            global batch, each rank computes its part in pieces, within the step.
        quantum: shares are multiples of this. ``"auto"``: 1, but where the module is compiled anew for each number of
            samples, and on devices with tensor cores, a power of two that divides the global batch.
        policy: how shares are decided: ``"predictive"`` (the default): by a predictor's times; ``"tuning"``: by trial,
            as LB-BSP on GPU clusters; or a whole `BalancePolicy`. The last two exclude ``predictor``, ``dead_band`` and
            ``cooldown``.
        rebalance: ``False`` keeps equal shares (exact weighting and metrics stay).
        controller: decides the shares, and which ranks rest, in the place of the policy: a `LyapunovController`, e.g.
            with a ``budget``, or ``"lyapunov"`` for one without. ``None``: the policy decides, and all ranks work.
        exchange_every: exchange measurements every k steps; default: every step, fewer when steps are short.
        stream: what an `IterableDataset` is: ``"infinite"`` per rank, or ``"shared"`` by all ranks.
        batch_cost: the work of this rank's batch, padding included, e.g. ``lambda batch: batch["ids"].numel()``, where
            samples differ in it: a long batch is then not taken for a slow device. A method of that name on the
            LightningModule serves too. Default: ``batch_weight`` if given, else the number of samples.
        sample_costs: the work of each sample of the train dataset, by index, where it is known before loading: each
            rank's part of a global batch is then cut by work, not by number. A method ``sample_cost(i)`` of the dataset
            serves too. Gradients stay means over samples.
        waiting_modules: module types, besides `SyncBatchNorm`, that wait for peers inside forward or backward.
        sample_weighted_metrics: per-step means over ranks (``self.log(..., sync_dist=True)``) count samples, or what
            ``batch_weight`` counts; means of an epoch count ``batch_size``, as Lightning's always do.
        check_parameters_every: optimizer steps in which the ranks compare all their parameters once, by a checksum that
            travels with the measurements; ``None``: they do not.
        **ddp: arguments shared by all engines, and `DDPStrategy`'s own; see `HeteroStrategy`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an unknown argument; those that cannot hold on several devices are refused with the reason when the
            Trainer is made.
    """

    engine = "balanced"
    description = "Load-balanced DDP"
    refusals = Refusals(
        lbfgs="LBFGS decides from the loss whether to evaluate again, and the loss differs between ranks, so the ranks"
        " would part ways (as they can under strategy='ddp'); use one device or another optimizer"
    )

    def __init__(
        self,
        accelerator: Any = None,
        *,
        predictor: PredictorName | Predictor = "kalman",
        dead_band: float = 0.02,
        cooldown: int = 0,
        min_samples: int | Sequence[int] | None = None,
        max_samples: int | Sequence[int] | None = None,
        quantum: int | Literal["auto"] = "auto",
        policy: PolicyName | BalancePolicy | None = None,
        rebalance: bool = True,
        controller: LyapunovController | Literal["lyapunov"] | None = None,
        exchange_every: int | None = None,
        stream: StreamMode | None = None,
        batch_cost: Callable[[Any], float] | None = None,
        sample_costs: Sequence[float] | None = None,
        waiting_modules: Sequence[type[nn.Module]] = (),
        sample_weighted_metrics: bool = True,
        check_parameters_every: int | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, **ddp)
        check_counts(exchange_every=exchange_every, check_parameters_every=check_parameters_every)
        if quantum != "auto":
            if isinstance(quantum, str):
                raise ValueError(f"quantum={quantum!r} must be a whole number >= 1, or 'auto'")
            check_counts(quantum=quantum)
        check_batch_cost(batch_cost)
        check_sample_costs(sample_costs)
        check_choice("stream", stream, (None, "infinite", "shared"))
        check_flags(rebalance=rebalance, sample_weighted_metrics=sample_weighted_metrics)
        for kind in waiting_modules if isinstance(waiting_modules, Sequence) else [waiting_modules]:
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise TypeError(f"waiting_modules={waiting_modules!r} must be a list of classes of modules")
        self.controller = check_controller(controller)
        if controller is None:
            self.policy = chosen_policy(policy, predictor, dead_band, cooldown)
        else:
            idle = {
                "predictor": predictor != "kalman",
                "dead_band": dead_band != 0.02,
                "cooldown": cooldown != 0,
                "policy": policy is not None,
                "min_samples": min_samples is not None,
                "rebalance": not rebalance,
            }
            self.policy = controlled_policy(self.controller, [name for name, given in idle.items() if given])
        self._closure_loss: Tensor | None = None
        self._plain = PlainBackward()
        self._gatherer = InStep()
        self.sample_weighted_metrics = sample_weighted_metrics
        self.settings = BalanceSettings(
            policy=self.policy,
            rebalance=rebalance,
            batches=BatchSettings(
                bounds=ShareBounds(lower=min_samples, upper=max_samples),
                quantum=quantum,
                stream=stream,
                exchange_every=exchange_every,
                sample_costs=sample_costs,
            ),
            waiting_modules=tuple(waiting_modules),
            batch_cost=batch_cost,
            check_parameters_every=check_parameters_every,
            ddp_arguments=self.ddp_arguments,
        )

    def __repr__(self) -> str:
        known = super().__repr__()
        if self.controller is None:
            return known
        name = self.controller if isinstance(self.controller, str) else type(self.controller).__name__
        return f"{known.removesuffix('>')}, controller {name}>"

    # ---- set-up -----------------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self.world_size > 1:
            self.settings.batches.bounds.check_ranks(self.world_size)
            if isinstance(self.controller, LyapunovController):
                self.controller.check_ranks(self.world_size)

    def begin(self, trainer: Trainer) -> BalancedRun:
        assert self.cluster_environment is not None
        run = BalancedRun(
            trainer,
            self.shared,
            self.settings,
            timeout=self.timeout,
            device=self.root_device,
            main_address=self.cluster_environment.main_address,
        )
        run.undo.enter_context(patched(self.precision_plugin, "backward", self._backward_weighted))
        return run

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._run is not None:
            self._run.attach(self.model)

    def idle_on_one_device(self) -> dict[str, Any]:
        given = {"max_samples": self.settings.batches.bounds.upper, "controller": self.controller}
        return {name: value for name, value in given.items() if value is not None}

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        run = self._run
        if run is None or not run.trainer.training:
            return super().batch_to_device(batch, device, dataloader_idx)
        move = super().batch_to_device
        return run.transfer(batch, lambda host: move(host, device, dataloader_idx))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return super().training_step(*args, **kwargs)
        if run.wants_wrapping():
            self._wrap_again(run)
        if run.automatic:
            with run.dummy_guard(), run.memory_guard():
                return super().training_step(*args, **kwargs)
        with run.dummy_guard(), self._plain.taken(run.module, self.model):
            output = super().training_step(*args, **kwargs)
        run.manual_step_done()
        return output

    def _wrap_again(self, run: BalancedRun) -> None:
        wrapped = self.model
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped._remove_autograd_hooks()
        self.model = wrapped.module
        self.configure_ddp()
        run.attach(self.model)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._closure_loss = closure_loss if self._run is not None else None  # holds the graph, also if it gets scaled
        super().pre_backward(closure_loss)

    def _backward_weighted(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of the precision plugin's ``backward`` during a run: users' hooks see their own loss."""
        run, plugin = self._run, self.precision_plugin
        assert run is not None
        closure_loss, self._closure_loss = self._closure_loss, None
        with patched(self._plain, "manual", True):
            run.backward(
                tensor,
                lambda loss: type(plugin).backward(plugin, loss, model, optimizer, *args, **kwargs),
                [] if closure_loss is None else [closure_loss],
            )

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._run is not None:
            self._run.optimizer_stepped()
        return output

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """In a step, of a rank without samples, no row of its dummy is gathered; a mean of numbers is warned of."""
        run = self._run
        if run is not None and run.part is not None and compat.batch_results_open(run.trainer):
            tensor = self._gatherer.given(run.part, tensor)
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of integers are exact; means of floats logged for a training batch count samples."""
        with self.waiting_for_peers():
            return self._reduce(tensor, group, reduce_op)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if not (isinstance(tensor, Tensor) and is_mean(reduce_op) and dist.is_initialized()):
            return super().reduce(tensor, group, reduce_op)
        world = dist.group.WORLD if group is None else group
        assert world is not None
        if not tensor.is_floating_point():
            return integer_mean_(tensor, world)
        run = self._run
        weighs = self.sample_weighted_metrics and group in (None, dist.group.WORLD)
        if weighs and run is not None and run.weighs_means and compat.batch_results_open(run.trainer):
            return weighted_mean_(tensor, run.weight.local, world)
        return super().reduce(tensor, group, reduce_op)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._run is not None and self._run.fitting:
            self._run.sigterm.training_pauses()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._run is not None:
            self._run.sigterm.training_pauses()

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def rebalancer(self) -> BatchRebalancer | None:
        """The `BatchRebalancer` in charge, the Trainer's or else one of our own; ``None`` outside a fit.

        On one device there is nothing to re-size: one that is switched off.
        """
        if self._one_device is not None:
            return BatchRebalancer(self.policy, enabled=False)
        return self._run.rebalancer if self._run is not None else None

    @property
    def replans(self) -> list[Replan]:
        """What the controller has changed in this fit, or the last one; empty without a controller."""
        return list(self.policy.replans) if isinstance(self.policy, ControlledPolicy) else []

    @property
    def policy_in_use(self) -> BalancePolicy:
        """The policy that decides: a `BatchRebalancer`'s own, else the strategy's."""
        return self._run.policy if self._run is not None else self.policy
