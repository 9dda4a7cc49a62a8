"""`HeteroDDPStrategy`: what our strategies share that stand before `DDPStrategy` (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.base.checks import check_averaging, check_choice, known_arguments
from lightning_hetero.base.refusals import is_sharded, shards_itself
from lightning_hetero.base.run import EngineRun
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.lightning_compat.strategies import read_folder, written_last

Run = TypeVar("Run", bound=EngineRun[Any])


class HeteroDDPStrategy(HeteroStrategy[Run], DDPStrategy):
    """See `HeteroStrategy`; its stock strategy is `DDPStrategy`, whose arguments are `DDPArguments`."""

    stock = DDPStrategy, DistributedDataParallel

    def __init__(self, **arguments: Any) -> None:
        start_method = arguments.get("start_method", "popen")
        check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        super().__init__(**arguments)
        self._comm_arguments = [self.given.get(f"ddp_comm_{name}") for name in ("state", "hook", "wrapper")]
        self._checked = False  # arguments against several devices

    @property
    def agreed(self) -> dict[str, Any]:
        of_strategy = known_arguments(DDPStrategy) - {"model_averaging_period"}
        return {name: value for name, value in self.given.items() if name not in of_strategy}

    def set_world_ranks(self) -> None:
        """Called as soon as the Trainer knows its devices: refuses what cannot be done on several.

        Raises:
            TypeError: with the reason.
        """
        super().set_world_ranks()
        if self.world_size > 1 and not self._checked:  # Lightning comes here again when a fit begins
            check_averaging(self.agreed, self._comm_arguments[0])
            self.refusals.check_comm_hooks(*self._comm_arguments)
            self.refusals.check_ddp_arguments(self.agreed, type(self).__name__)
            self._checked = True

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``, where there is no ``device_mesh``.

        Raises:
            TypeError: it shards the module.
        """
        with super().model_sharded_context():
            try:
                yield
            except Exception as error:
                self._refuse_sharding(shards_itself, error)
                raise

    def setup(self, trainer: Trainer) -> None:
        self._refuse_sharding(is_sharded)
        super().setup(trainer)

    def check_module(self, module: LightningModule) -> None:
        self._refuse_sharding(is_sharded)
        super().check_module(module)

    def _refuse_sharding(self, found_in: Callable[[LightningModule], bool], cause: Exception | None = None) -> None:
        if (module := self.lightning_module) is not None and found_in(module):
            raise TypeError(
                f"{type(module).__name__} shards itself (fully_shard, device_mesh), and hetero_{self.engine} needs the"
                " whole model on each rank: use strategy='hetero_sharded', which balances sharded models"
            ) from cause

    def read_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads also the distributed checkpoint of a sharded model, whole."""
        if not written_last(checkpoint_path).is_file():
            return super().read_checkpoint(checkpoint_path, *args, **kwargs)
        return read_folder(checkpoint_path, kwargs.get("weights_only", args[0] if args else None))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data are divided among the processes there are, however many each node has."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}
