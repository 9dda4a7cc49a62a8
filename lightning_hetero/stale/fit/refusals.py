"""What cannot work with a parameter server that waits for nobody, refused with the reason and a way out (layer L)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_hetero.base.refusals import Refusals
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.stale.runtime.work.watch import Numbers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

REFUSALS = Refusals(
    no_wrapper="there is no DistributedDataParallel: gradients go to a parameter server",
    comm_hooks="communication hooks change DDP's all-reduce, which is not used here: gradients go to a parameter"
    " server. For smaller messages pass compression='bf16' or 'fp16'",
    lbfgs="LBFGS evaluates the loss several times per step, and here the step is made in the parameter server;"
    " use another optimizer, or one device",
    sync_batch_norm="SyncBatchNorm (the Trainer's sync_batchnorm=True, or a layer of the module) makes every rank wait"
    " for all others in every batch, which is what this strategy avoids. Set sync_batchnorm=False (in Hydra:"
    " trainer.sync_batchnorm=false): running statistics of BatchNorm are then averaged over the samples; or use"
    " GroupNorm, or strategy='hetero_balanced'",
    zero="ZeroRedundancyOptimizer divides the optimizer's state among the ranks, which wait for each other in every"
    " step; here the state is in the parameter server, once. Use the optimizer that it wraps",
)


def refuse_monitored_steps(configs: Iterable[LRSchedulerConfig]) -> None:
    """Refuses schedulers that decide in every step by a value: the value of a step is a rank's own.

    Raises:
        TypeError: with the reason.
    """
    for config in configs:
        if config.reduce_on_plateau and config.interval == "step":
            raise TypeError(_parting(f"{type(config.scheduler).__name__} with interval='step'"))


@contextmanager
def no_monitored_steps(configs: Iterable[LRSchedulerConfig]) -> Iterator[None]:
    """Around a step of manual optimization: raises TypeError where such a scheduler decides in it."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(_parting("ReduceLROnPlateau.step inside of training_step"))

    with ExitStack() as stack:
        for scheduler in (config.scheduler for config in configs):
            if isinstance(scheduler, ReduceLROnPlateau):
                stack.enter_context(patched(scheduler, "step", refuse))
        yield


def _parting(what: str) -> str:
    return (
        f"{what} decides by a value of one batch, which is each rank's own: the ranks' learning rates would part. Let"
        " it decide at the end of an epoch or of a validation, or use strategy='hetero_balanced'"
    )


def refuse_manual_scaling(module: LightningModule) -> None:
    """Refuses a `torch.amp.GradScaler` where user code steps the optimizers.

    Args:
        module: attached to its trainer.

    Raises:
        TypeError: with the reason.
    """
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    if scaler is not None and not module.automatic_optimization:
        raise TypeError(
            "precision='16-mixed' with manual optimization: the loss scale would have to be agreed between the"
            " optimizer steps of one batch; use precision='bf16-mixed'"
        )


# ---- changes of the model between two epochs -----------------------------------------------------------------
#
# trained parameters                  all ranks alike: the server starts again with them; else refused
# buffers                             the lowest rank's count, as under DDP
# parameters that no optimizer has    stay on their rank, so all must have changed them alike, also within the epoch

SEES_NOT_ALL = (
    "Under hetero_stale a batch may go on without a rank, or come to it in several chunks, so a moving average or a"
    " copy of parameters that each rank makes for itself becomes another one. Make it in on_train_epoch_end, or use"
    " policy='bsp', which has all ranks see every update, or strategy='hetero_balanced'"
)
_ROUNDED = 64  # times, in different ways: devices may be of several kinds


@dataclass(frozen=True, slots=True)
class Changed:
    """What has changed on a rank.

    Attributes:
        trained: some numbers of each changed parameter that an optimizer has, by name.
        others: the same of those that none has.
        buffers: names of changed buffers.
        new: names of parameters and buffers that the module did not have, or that are others now.
    """

    trained: Mapping[str, Numbers]
    others: Mapping[str, Numbers]
    buffers: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def any(self) -> bool:
        """Whether there is a change."""
        return bool(self.trained or self.others or self.buffers or self.new)


def refuse_different(ranks: Sequence[int], everyone: Sequence[Changed]) -> None:
    """Refuses parameters that ranks have changed in different ways.

    Raises:
        RuntimeError: with name, ranks, reason and ways out; on all ranks.
    """
    for rank, own in zip(ranks[1:], everyone[1:], strict=True):
        name = _different(everyone[0].trained, own.trained)
        if name := name or next(iter({*everyone[0].new} ^ {*own.new}), None):
            raise RuntimeError(
                f"{name} was changed, not by an optimizer, where the ranks met, and differently on ranks {ranks[0]}"
                f" and {rank}. Under hetero_stale there is one {name}, in the parameter server: change it equally on"
                " all ranks, e.g. not under is_global_zero, nor with random numbers of each rank's own"
            )
        if name := _different(everyone[0].others, own.others):
            raise RuntimeError(
                f"{name} has no optimizer, was changed by your code, and has other values on ranks {ranks[0]} and"
                f" {rank} now. {SEES_NOT_ALL}"
            )


def _different(some: Mapping[str, Numbers], others: Mapping[str, Numbers]) -> str | None:
    """Returns the first name whose numbers differ."""
    for name in sorted({*some, *others}):
        if name not in some or name not in others:
            return name
        eps, values = some[name]
        within = _ROUNDED * eps * max(map(abs, values), default=0.0)
        pairs = zip(values, others[name].values, strict=True)
        if not all(math.isclose(a, b, rel_tol=0.0, abs_tol=within) or (a != a and b != b) for a, b in pairs):
            return name
    return None
