"""Callbacks for hetero_balanced (layer L).

`HeteroBatchSizeFinder`: Lightning's ``BatchSizeFinder`` for several devices.

`BatchRebalancer`: the handle on the balanced engine's policy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr

from lightning_hetero.callbacks.reporting import Reporting
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.shares.size_search import SizeMode, SizeSearch


class HeteroBatchSizeFinder(Callback):
    """Finds, on several devices, how many samples each rank's memory holds, before training begins.

    Each rank tries steps of growing size alone, forward and backward, on the first samples of the train data;
    afterwards weights, optimizers, random states, metrics and logged values are as before. What fits becomes the rank's
    ``max_samples``. The global batch becomes the sum over the ranks, unless the strategy has a ``global_batch_size``:
    then shares follow speeds within what fits. Needs `LoadBalancedStrategy` and automatic optimization. A checkpoint
    keeps what was found, and a run that resumes it on as many ranks tries nothing.

    Args:
        mode: ``"power"`` doubles the size as long as it fits; ``"binsearch"`` then looks between the last two sizes.
        steps_per_trial: steps with each size.
        init_val: samples to begin with.
        max_trials: sizes tried at most, once one has fitted.
        batch_arg_name: attribute of the module, its ``hparams`` or the datamodule that is set to the mean per rank, if
            there is one.
        margin: the part of what ``"binsearch"`` found that is left free.
        max_val: samples per rank at most.

    Attributes:
        sizes: samples per rank that fit; empty before they are known.
        optimal_batch_size: samples of a global batch; ``None`` before.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, mode: SizeMode = "power", steps_per_trial: int = 3, init_val: int = 2, max_trials: int = 25,
        batch_arg_name: str = "batch_size", margin: float = 0.05, max_val: int = 8192,
    ) -> None:  # fmt: skip
        self.batch_arg_name = batch_arg_name
        self.sizes: tuple[int, ...] = ()
        self.optimal_batch_size: int | None = None
        given = {"steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials, "margin": margin}
        self._make, self.max_val = partial(SizeSearch, mode, **given), max_val
        self.search(None)

    def search(self, samples: int | None) -> SizeSearch:
        """Returns a new search, among sizes up to so many samples; None: their number is not known."""
        return self._make(max_val=self.max_val if samples is None else max(1, min(self.max_val, samples)))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks the strategy to find the sizes when it knows the train loader."""
        if stage != "fit":
            return
        strategy, self.sizes = trainer.strategy, ()  # those of a checkpoint come later
        if trainer.world_size == 1:
            rank_zero_warn(
                "HeteroBatchSizeFinder has no effect on one device: there Lightning's BatchSizeFinder works, without"
                " strategy="
            )
        elif not isinstance(strategy, Reporting) or not strategy.find_sizes(self):
            raise MisconfigurationException(
                "HeteroBatchSizeFinder needs strategy='hetero_balanced', and automatic optimization. Under"
                " 'hetero_sharded', where ranks compute each layer together,"
                " ShardedBalancedStrategy(max_samples='auto') learns in the first steps what fits"
            )

    def found(self, trainer: Trainer, sizes: tuple[int, ...], total: int) -> None:
        """Called by the strategy, on all ranks, with what fits each of them, and the global batch."""
        self.sizes, self.optimal_batch_size = sizes, total
        if lightning_hasattr(trainer.lightning_module, self.batch_arg_name):
            lightning_setattr(trainer.lightning_module, self.batch_arg_name, max(1, total // len(sizes)))
        rank_zero_info(f"{'/'.join(map(str, sizes))} samples fit the ranks; the global batch has {total}")

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sizes = tuple(state_dict["sizes"])


class BatchRebalancer(Callback):
    """Holds the policy that re-sizes batches; without one among the Trainer's callbacks the strategy makes its own.

    Give your own to replace the policy, or switch off the one in charge (``trainer.strategy.rebalancer``) at any time,
    on all ranks, with ``enabled = False``: shares then stay unchanged.

    Args:
        policy: what decides the shares; ``None``: the strategy's.
        enabled: whether to re-size at all.
    """

    def __init__(self, policy: BalancePolicy | None = None, *, enabled: bool = True) -> None:
        self.policy, self.enabled = policy, enabled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if stage == "fit" and getattr(strategy, "engine", None) not in ("balanced", "sharded"):
            raise TypeError(
                f"BatchRebalancer needs strategy='hetero_balanced' or 'hetero_sharded', but the Trainer has"
                f" {type(strategy).__name__}; change the strategy or remove the callback"
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of a full batch, as now decided; empty before training."""
        return self.policy.shares if self.policy is not None else ()
