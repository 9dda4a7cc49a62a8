"""What an engine refuses on several devices, with its own reasons (layer L)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hetero.lightning_compat import trainer_callbacks

# Arguments of `DistributedDataParallel` where there is none. Others only tune it: without effect, with a warning.
_HELD_ANYWAY = {"find_unused_parameters"}  # parameters that a loss does not use need no flag
_ZERO = {("torch", "ZeroRedundancyOptimizer"), ("lightning_hetero", "UnevenZeroOptimizer")}
_CHANGE_WHAT_IS_TRAINED = {
    "delay_all_reduce_named_params", "device_mesh", "mixed_precision", "param_to_hook_all_reduce", "process_group",
}  # fmt: skip
_ON_WHOLE_PARAMETERS = {"ModelPruning", "StochasticWeightAveraging", "WeightAveraging"}


def shards_itself(module: LightningModule) -> bool:
    """Whether a module is sharded, or seems to be so by its ``configure_model``: that names what it takes."""
    return is_sharded(module) or any(
        name in ("fully_shard", "device_mesh") for name in _names_in(module.configure_model, type(module), set())
    )


def is_sharded(module: LightningModule) -> bool:
    """Whether a rank has a part of the parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _names_in(function: Any, owner: type, seen: set[Any]) -> Iterator[str]:
    """Yields the names in a user's function, and in what it calls of its class and of its file."""
    function = inspect.unwrap(getattr(function, "fget", function))
    code, file = getattr(function, "__code__", None), str(getattr(function, "__module__", ""))
    if code is None or code in seen or file.partition(".")[0] in ("torch", "lightning"):
        return
    seen.add(code)
    codes = [code]
    for one in codes:  # those of comprehensions, too
        codes += [constant for constant in one.co_consts if isinstance(constant, type(code))]
        for name in one.co_names:
            yield name
            for found in (inspect.getattr_static(owner, name, None), function.__globals__.get(name)):
                yield from _names_in(found, owner, seen)


def refuse_saving_in_step() -> None:
    """For engines whose ranks, or whose parts of the model, do not meet within a batch.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "a checkpoint inside training_step, where the ranks are at different places: what each holds then does not fit"
        " together. If a signal handler of yours saves, let it set a flag, and call trainer.save_checkpoint in"
        " on_train_batch_end"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """An engine's reasons, each a whole message; ``None``: it takes that.

    Attributes:
        no_wrapper: why there is no `DistributedDataParallel`, so that arguments for it mean nothing.
        comm_hooks: against DDP's communication hooks.
        lbfgs: against `torch.optim.LBFGS`.
        sync_batch_norm: against synchronised BatchNorm.
        averaged_batch_norm: against StochasticWeightAveraging of a module with BatchNorm.
        zero: against `torch.distributed.optim.ZeroRedundancyOptimizer`; with its name, and ours instead, if it is ours.
    """

    no_wrapper: str | None = None
    comm_hooks: str | None = None
    lbfgs: str | None = None
    sync_batch_norm: str | None = None
    averaged_batch_norm: str | None = None
    zero: str | None = None
    whole: str | None = None

    def check_ddp_arguments(self, given: Mapping[str, Any], strategy_name: str) -> None:
        """Refuses arguments for `DistributedDataParallel`, or names them in one warning, if it is not used.

        Args:
            given: of those that `DistributedDataParallel` knows; its defaults say nothing.
            strategy_name: class of the strategy, for messages.

        Raises:
            TypeError: without one of them something else would be trained; with the reason.
        """
        if self.no_wrapper is None:
            return
        default = {n: p.default for n, p in inspect.signature(DistributedDataParallel.__init__).parameters.items()}
        idle = [n for n, value in given.items() if n not in _HELD_ANYWAY and value != default.get(n)]
        if refused := [name for name in idle if name in _CHANGE_WHAT_IS_TRAINED]:
            raise TypeError(
                f"{strategy_name} cannot honour {', '.join(refused)}, which DistributedDataParallel would:"
                f" {self.no_wrapper}. Drop it, or use strategy='hetero_balanced'"
            )
        if idle:
            named = ", ".join(f"{name}={given[name]!r}" for name in idle)
            rank_zero_warn(f"{named} has no effect with {strategy_name}: {self.no_wrapper}")

    def check_comm_hooks(self, *given: object | None) -> None:
        """Refuses what was given.

        Raises:
            TypeError: with the reason.
        """
        if self.comm_hooks is not None and any(argument is not None for argument in given):
            raise TypeError(self.comm_hooks)

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuses an optimizer.

        Raises:
            TypeError: with the reason.
        """
        optimizers = list(optimizers)
        if self.lbfgs is not None and any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
            raise TypeError(self.lbfgs)
        if self.zero is not None and (found := next(filter(None, map(_zero, optimizers)), "")):
            raise TypeError(self.zero.replace("ZeroRedundancyOptimizer", found))

    def check_module(self, module: LightningModule, *, syncs_batch_norm: bool) -> None:
        """Refuses a module.

        Args:
            module: attached to its trainer.
            syncs_batch_norm: whether the Trainer has ``sync_batchnorm=True``.

        Raises:
            TypeError: with the reason.
        """
        synchronised = syncs_batch_norm or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())
        if self.sync_batch_norm is not None and synchronised:
            raise TypeError(self.sync_batch_norm)
        callbacks = trainer_callbacks(module.trainer)
        kinds = {k.__name__ for c in callbacks for k in type(c).__mro__}
        if self.whole is not None and (found := sorted(kinds & _ON_WHOLE_PARAMETERS)):
            raise TypeError(f"{', '.join(found)}: {self.whole}")
        averaging = any(isinstance(c, StochasticWeightAveraging) for c in callbacks)
        contains = StochasticWeightAveraging.pl_module_contains_batch_norm
        if self.averaged_batch_norm is not None and averaging and contains(module):
            raise TypeError(self.averaged_batch_norm)


def _zero(optimizer: Optimizer) -> str:
    """By name: torch's is there only where torch was built with torch.distributed, and takes long to import."""
    kinds = ((k.__module__.split(".")[0], k.__name__) for k in type(optimizer).__mro__)
    return next((name for package, name in kinds if (package, name) in _ZERO), "")
