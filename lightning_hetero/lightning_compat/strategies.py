"""What is private of Lightning's strategies for several devices (layer L).

Abstract, so that command lines do not offer them as strategies.

Lightning's distributed checkpoints: folders in which each rank has written its shards.

Private: ``_METADATA_FILENAME``, the file that Lightning writes last, and what torch reads a whole folder with. Both are
pinned by `tests/ranks/sharded/test_folders.py`.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_hetero.lightning_compat.launchers import ScriptLauncher
from lightning_hetero.lightning_compat.process_launchers import ProcessLauncher


def written_last(folder: Any) -> Path:
    """Returns the file that makes a folder a checkpoint."""
    return Path(folder) / _METADATA_FILENAME


def remove(*paths: Path) -> None:
    """Removes folders, files and links, where there are any."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_folder(folder: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns the checkpoint that a file would hold, in the memory of this process. Not a collective."""
    checkpoint: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(checkpoint, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    states = []
    while (name := f"optimizer_{len(states)}") in checkpoint:
        states.append({"state": {}, **checkpoint.pop(name)})
    rest = torch.load(written_last(folder), map_location="cpu", weights_only=weights_only)
    return {**rest, **checkpoint, **({"optimizer_states": states} if states else {})}


if TYPE_CHECKING:  # what it needs of `DDPStrategy` is in `ModelParallelStrategy`, too
    from lightning.pytorch.strategies import DDPStrategy as _Stock
else:
    _Stock = ParallelStrategy


def syncs_batch_norm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer has ``sync_batchnorm=True``.

    Private: ``_layer_sync``; the Trainer keeps the argument nowhere else, and converts the module after set-up began.
    """
    return strategy._layer_sync is not None


def set_parallel_sizes(strategy: ModelParallelStrategy, data_parallel: int, tensor_parallel: int) -> None:
    """Decides what Lightning would make of ``"auto"``.

    Private: ``_data_parallel_size`` and ``_tensor_parallel_size``, which `setup_environment` makes the mesh of.
    """
    strategy._data_parallel_size, strategy._tensor_parallel_size = data_parallel, tensor_parallel


def follow(old: LaunchedStrategy, new: LaunchedStrategy) -> None:
    """Gives a strategy that was made separately what the Trainer has given another one.

    Private: ``_layer_sync`` and ``_launcher``, which the Trainer gives a strategy when it is made.

    Raises:
        TypeError, ValueError: ``new`` refuses several devices.
    """
    plugins = "cluster_environment", "checkpoint_io", "precision_plugin"
    for name in ("accelerator", "parallel_devices", "num_nodes", *plugins):
        setattr(new, name, getattr(old, name))
    new._layer_sync, new._launcher = old._layer_sync, old._launcher
    new.set_world_ranks()


def hand_over(trainer: Trainer, old: LaunchedStrategy, new: LaunchedStrategy) -> None:
    """Puts another strategy in the Trainer instead of the one that has been launched, before it is set up.

    Private: ``_accelerator_connector.strategy``, which is what ``trainer.strategy`` returns; ``_results`` of the loops,
    where what an earlier fit has logged keeps how the strategy of then reduces it.
    """
    follow(old, new)
    assert old.lightning_module is not None
    new.connect(old.lightning_module)
    loop = trainer.fit_loop.epoch_loop
    for one in (loop, loop.val_loop, trainer.validate_loop, trainer.test_loop):
        one._results.clear()
    trainer._accelerator_connector.strategy = new


class LaunchedStrategy(_Stock):
    """Stands before one of Lightning's, with launchers that ask it about the Trainer's settings and a rank's death.

    Private: ``_configure_launcher``, ``_launcher``, ``_start_method``, which are where a strategy chooses its launcher;
    ``_process_group_backend`` and ``_get_process_group_backend``, which `setup_distributed` uses.
    """

    @abstractmethod
    def check_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises what is wrong with the Trainer's settings; as Lightning does, by default."""
        assert self.cluster_environment is not None
        self.cluster_environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)

    def goes_on_without_a_rank(self) -> bool:
        """Whether the death of a rank (not rank 0) would be survived now; another thread asks."""
        return False

    def can_lose_ranks(self) -> bool:
        """Whether this is a fit that survives the death of a rank."""
        return False

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        tolerates, start_method = self.goes_on_without_a_rank, getattr(self, "_start_method", "popen")
        if start_method == "popen":
            world = self.cluster_environment, self.num_processes, self.num_nodes
            self._launcher = ScriptLauncher(*world, check=self.check_settings, tolerates=tolerates)
        else:
            self._launcher = ProcessLauncher(self, start_method=start_method, tolerates=tolerates)

    def _get_process_group_backend(self) -> str:
        # An operation of NCCL waits on the device for a rank that has died, until its timeout ends the process.
        if self._process_group_backend is None and self.can_lose_ranks():
            return "gloo"
        return super()._get_process_group_backend()

    def choose_backend(self) -> str:
        """Settles and returns `process_group_backend`, for a rank that makes its own process group."""
        self._process_group_backend = self._get_process_group_backend()
        return self._process_group_backend
