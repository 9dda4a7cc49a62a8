"""`BalancingStrategy`: a synchronous strategy of Lightning's with batches sized to the devices (layer L).

One training batch, with the collaborator that does the work:

    fetch -> parts [data] -> weight [loss_weight] -> forward -> loss * weight -> backward -> own gradients complete
                                                            |-> stopwatch stops [step_clock]
                                                            '-> record sent, not waited for [step_times]
    next fetch: records due by now -> predict, solve, maybe change the shares [controller, policy]

Two calls are replaced for the time of a fit or a step: the precision plugin's ``backward``, by `_weighted_backward`
below, and the module's ``training_step``, by what computes it in pieces where memory is short, see `Recovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor
from typing_extensions import Unpack

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.loaders import BalanceSettings
from lightning_hetero.balanced.fit.plain_backward import PlainBackward
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, DDPArguments
from lightning_hetero.base.checks import check_choice, check_counts, check_flags
from lightning_hetero.base.metrics import is_mean, weighted_mean_
from lightning_hetero.base.refusals import Refusals
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.callbacks.balancing import BatchRebalancer, HeteroBatchSizeFinder
from lightning_hetero.callbacks.reporting import check_batch_cost
from lightning_hetero.data.batches import Part
from lightning_hetero.data.stream import StreamMode
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.step_clock import StepProbe
from lightning_hetero.predictors import Predictor, PredictorName
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import LossReduction


class BalancingStrategy(HeteroStrategy[BalancedRun]):
    """What `LoadBalancedStrategy` and `ShardedBalancedStrategy` share; see there for the arguments."""

    refusals = Refusals(
        lbfgs="LBFGS decides from the loss whether to evaluate again, and the loss differs between ranks, so the ranks"
        " would part ways (as they can under strategy='ddp'); use one device or another optimizer"
    )

    def __init__(
        self, *, predictor: PredictorName | Predictor = "kalman", dead_band: float = 0.02,
        min_samples: int | Sequence[int] | None = None,
        max_samples: int | Sequence[int] | Literal["auto"] | None = None, quantum: int | Literal["auto"] = "auto",
        policy: Literal["predictive"] | BalancePolicy | None = None, rebalance: bool = True,
        exchange_every: int | None = None, stream: StreamMode | None = None,
        batch_cost: Callable[[Any], float] | None = None, min_ranks: int | None = None,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **ddp: Unpack[DDPArguments],
    ) -> None:  # fmt: skip
        super().__init__(
            global_batch_size=global_batch_size, batch_sampler=batch_sampler, loss_reduction=loss_reduction,
            batch_weight=batch_weight, own_data=own_data, monitor=monitor, accelerator=accelerator, **ddp,
        )  # fmt: skip
        check_counts(exchange_every=exchange_every, min_ranks=min_ranks)
        check_counts(quantum=None if quantum == "auto" else quantum)
        if min_ranks is not None and self.engine != "balanced":
            raise TypeError(
                f"min_ranks with hetero_{self.engine}: each rank has a part of the model, which would be lost with it."
                " Use LoadBalancedStrategy, or drop min_ranks"
            )
        check_batch_cost(batch_cost)
        check_choice("stream", stream, (None, "infinite", "shared", "finite"))
        check_flags(rebalance=rebalance)
        self.policy = _chosen_policy(policy, predictor, dead_band)
        self._plain = PlainBackward()
        self._closure_loss: Tensor | None = None  # until its backward pass
        self._told_of_gathering: set[str] = set()
        self.settings = BalanceSettings(
            policy=self.policy, rebalance=rebalance, batch_cost=batch_cost, learns=max_samples == "auto",
            bounds=ShareBounds(lower=min_samples, upper=None if max_samples == "auto" else max_samples),
            quantum=quantum, stream=stream, exchange_every=exchange_every,
            min_ranks=min_ranks,
        )  # fmt: skip

    # ---- set-up -----------------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self.world_size > 1:
            self.settings.bounds.check_ranks(self.parts, self.shared.global_batch_size)

    @property
    def parts(self) -> int:
        """Into how many parts a global batch is cut."""
        return self.world_size

    def make_run(self, trainer: Trainer) -> BalancedRun:
        """Returns what a fit is, or an evaluation."""
        return BalancedRun(trainer, self, self.settings)

    def begin(self, trainer: Trainer) -> BalancedRun:
        run = self.make_run(trainer)
        run.undo.enter_context(patched(self.precision_plugin, "backward", self._weighted_backward))
        return run

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._run is not None:
            self._run.attach(self.model)

    def find_sizes(self, finder: HeteroBatchSizeFinder) -> bool:
        if self._run is None or not self._run.automatic or self.engine != "balanced":
            return False
        self._run.binder.finder = finder
        return True

    def pause_too(self, probe: StepProbe) -> None:
        if self._run is not None:
            self._run.probe.companion = probe

    def idle_on_one_device(self) -> dict[str, Any]:
        upper = self.settings.bounds.upper
        return {} if upper is None else {"max_samples": upper}

    # ---- one step ---------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        run, move = self._run, super().batch_to_device
        if run is None or not run.trainer.training:
            return move(batch, device, dataloader_idx)
        return run.transfer(batch, lambda host: move(host, device, dataloader_idx))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return super().training_step(*args, **kwargs)
        if run.automatic:
            with run.dummy_guard(), run.memory_guard():
                return super().training_step(*args, **kwargs)
        with run.dummy_guard(), self._plain.taken(run.module, self.model):
            output = super().training_step(*args, **kwargs)
        run.step_over()
        return output

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._closure_loss = closure_loss if self._run is not None else None  # holds the graph, also if it gets scaled
        super().pre_backward(closure_loss)

    def _weighted_backward(self, loss: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Weights the loss: a fit's ``backward`` of the precision plugin, behind all hooks that see the loss."""
        run, plugin = self._run, self.precision_plugin
        assert run is not None
        holders, self._closure_loss = [] if self._closure_loss is None else [self._closure_loss], None

        def differentiate(weighted: Tensor) -> None:
            type(plugin).backward(plugin, weighted, model, optimizer, *args, **kwargs)

        with patched(self._plain, "manual", True):
            run.backward(loss, differentiate, holders)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._run is not None:
            self._run.probe.updated()
        return output

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """In a step, of a rank without samples, no row of its dummy is gathered; warns of what parts change."""
        run, gather = self._run, partial(super().all_gather, group=group, sync_grads=sync_grads)
        if run is None or run.part is None or not compat.batch_results_open(run.trainer):
            return gather(tensor)
        if len(set(run.part.shares)) > 1:
            self._tell_of_gathering(tensor, run.part)
        differentiable = sync_grads and tensor.requires_grad and torch.is_grad_enabled()
        return run.gather(tensor, gather) if differentiable else gather(tensor)

    def counted_rows(self, group: Any, sync_grads: bool, sizes: Sequence[int]) -> Sequence[int]:
        """In a step none of a rank without samples, unless each gives as many as the others, as of numbers."""
        run = self._run
        if run is None or run.part is None or all(run.part.shares) or not compat.batch_results_open(run.trainer):
            return sizes
        part, members = run.part, self.world_size // self.parts
        shares = [part.shares[rank // members] for rank in dist.get_process_group_ranks(group or dist.group.WORLD)]
        times = {size / (share or part.dummy) for size, share in zip(sizes, shares, strict=True)}
        rows = len(set(sizes)) > 1 or times == {1.0} or (sync_grads and len(times) == 1)
        return [size if share or not rows else 0 for size, share in zip(sizes, shares, strict=True)]

    def _tell_of_gathering(self, tensor: Tensor, part: Part) -> None:
        """Says once in a fit, on rank 0, of a number or of rows what does not hold of unequal parts."""
        what, told = "", ""
        if tensor.numel() == 1 and tensor.is_floating_point():
            what, told = "a number", (
                "so the plain mean of a loss of each is not the mean over the samples."
                " self.trainer.strategy.reduce(loss.detach(), reduce_op='mean') is, as is"
                " self.log(..., sync_dist=True); or gather loss * n and n, the rank's samples. Sums stay right"
            )
        elif tensor.dim() and tensor.requires_grad:
            what, told = "rows with gradients", (
                "so the rows of all ranks come one after the other, with a dimension of size 1 in front: flatten(0, 1)"
                " and torch.cat(tuple(rows)) are right, rows[rank] is not, and this rank's do not begin at"
                " global_rank * len(rows). docs/how_to/contrastive.md has code that finds them, by gathering whole"
                " numbers first, after which this is not said"
            )
        elif tensor.dim() and not tensor.is_floating_point():
            self._told_of_gathering.add("rows with gradients")  # labels, or the rows' ranks
        if what and what not in self._told_of_gathering:
            self._told_of_gathering.add(what)
            shares = "/".join(map(str, part.shares))
            rank_zero_warn(
                f"self.all_gather of {what} in a training step: the ranks have parts of unequal size (now {shares}),"
                f" {told}"
            )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of integers are exact; means of floats logged for a training batch count samples."""
        with self.waiting_for_peers():
            return self._reduce(tensor, group, reduce_op)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        run, mean = self._run, isinstance(tensor, Tensor) and tensor.is_floating_point() and is_mean(reduce_op)
        everyone = dist.is_initialized() and group in (None, dist.group.WORLD)
        weighs = mean and everyone and run is not None and run.weighs_means and not run.loses_ranks
        if run is not None and weighs and compat.batch_results_open(run.trainer):
            return weighted_mean_(tensor, run.weight.local, group)
        return super().reduce(tensor, group, reduce_op)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._run is not None and self._run.fitting:
            self._run.signals.training_pauses()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._run is not None:
            self._run.signals.training_pauses()

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def rebalancer(self) -> BatchRebalancer | None:
        """The `BatchRebalancer` in charge, the Trainer's or else ours; ``None`` outside a fit.

        On one device there is nothing to re-size: one that is switched off.
        """
        if self._one_device is not None:
            return BatchRebalancer(self.policy, enabled=False)
        return self._run.rebalancer if self._run is not None else None


def _chosen_policy(
    policy: Literal["predictive"] | BalancePolicy | None, predictor: PredictorName | Predictor, dead_band: float
) -> BalancePolicy:
    """Returns the policy that these arguments describe.

    Raises:
        TypeError: the policy is neither one nor a name.
        ValueError: the policy has no use for an argument that was given.
    """
    if policy in (None, "predictive"):
        return BalancePolicy(predictor=predictor, dead_band=dead_band)
    if not isinstance(policy, BalancePolicy):
        raise TypeError(
            f"policy={policy!r} must be a BalancePolicy, 'predictive' or None; names of models are for predictor="
        )
    if predictor != "kalman" or dead_band != 0.02:
        raise ValueError("give either a whole policy, or predictor and dead_band, not both")
    return policy
