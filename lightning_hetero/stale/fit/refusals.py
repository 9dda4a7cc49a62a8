"""What cannot work with a parameter server that waits for nobody, refused with the reason and a way out (layer L)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_hetero.base.refusals import Refusals
from lightning_hetero.lightning_compat.patches import patched

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = [
    "REFUSALS",
    "no_monitored_steps",
    "refuse_controller",
    "refuse_entangled",
    "refuse_manual_scaling",
    "refuse_monitored_steps",
]

REFUSALS = Refusals(
    no_wrapper="there is no DistributedDataParallel: gradients go to a parameter server",
    comm_hooks="communication hooks change DDP's all-reduce, and there is none here: gradients go to a parameter"
    " server. For smaller messages pass compression='bf16' or 'fp16'",
    lbfgs="LBFGS evaluates the loss several times per step, and here the step is made in the parameter server;"
    " use another optimizer, or one device",
    sync_batch_norm="SyncBatchNorm makes every rank wait for all others in every batch, which is what this strategy"
    " avoids; use BatchNorm (its running statistics are averaged over the samples), GroupNorm, or"
    " strategy='hetero_balanced'",
    zero="ZeroRedundancyOptimizer divides the optimizer's state among the ranks, which wait for each other in every"
    " step; here the state is in the parameter server, once. Use the optimizer that it wraps",
)


def refuse_controller(given: object | None) -> None:
    """Refuses the argument ``controller``.

    Raises:
        TypeError: there is one; with the reason.
    """
    if given is not None:
        raise TypeError(
            f"BoundedStalenessStrategy takes no controller (got {given!r}): ranks ask for samples when they are ready,"
            " so there are no shares to decide, nor a time of a batch that all end together. To rest a device that"
            " costs more than it brings, use"
            " HeteroPipelineStrategy(controller=...), or do not start its rank"
        )


_ENTANGLED = ("Adafactor", "Muon")  # an entry's step depends on other entries of its matrix


def refuse_entangled(optimizers: Iterable[Optimizer], policy: str) -> None:
    """Refuses, under delay compensation, an optimizer that does not treat every entry of a parameter by itself.

    Those of torch are known; another one is taken to be element-wise.

    Raises:
        TypeError: with the reason.
    """
    for optimizer in optimizers:
        if any(cls.__name__ in _ENTANGLED for cls in type(optimizer).__mro__):
            raise TypeError(
                f"policy={policy!r} compensates delays entry by entry, and {type(optimizer).__name__} makes a step of"
                " whole matrices: use an element-wise optimizer such as SGD or AdamW, or another policy"
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
        for config in configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                stack.enter_context(patched(config.scheduler, "step", refuse))
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
