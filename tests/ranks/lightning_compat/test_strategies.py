"""Pins what is private of `DDPStrategy` and of a batch's way to the device."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.launchers import ScriptLauncher
from lightning_hetero.lightning_compat.process_launchers import ProcessLauncher
from lightning_hetero.lightning_compat.strategies import LaunchedStrategy, follow, hand_over, syncs_batch_norm
from tests.ranks.kit import Toy, quiet_trainer, regression

VERSIONS = f"lightning {lightning.__version__} behaves differently: adapt lightning_hetero/lightning_compat"


class Moved(Toy):
    """Notes which hooks a batch goes through, and moves one more batch within each step."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noted.append(("before", len(batch[0])))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.noted.append(("move", len(batch[0])))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noted.append(("after", len(batch[0])))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            compat.batch_to_device(self.trainer, regression(3).tensors)
        return self.loss(batch)


def test_batch_to_device() -> None:
    """Another batch goes the loop's way: the same hooks in the same order, and the precision plugin's conversion."""
    module = Moved()
    quiet_trainer(devices=1, max_steps=1, precision="64-true").fit(module, DataLoader(regression(10), batch_size=10))
    way = ["before", "move", "after"]
    assert module.noted == [(hook, samples) for samples in (10, 3) for hook in way], VERSIONS
    moved = compat.batch_to_device(module.trainer, (torch.zeros(3, 6), torch.zeros(3, 1)))
    assert [t.dtype for t in moved] == [torch.float64] * 2, VERSIONS
    assert compat.batch_to_device(module.trainer, (torch.zeros(3, 6),), move=len) == 1, VERSIONS


class Own(LaunchedStrategy, DDPStrategy):
    """Refuses every number of devices but two; may lose ranks if it is told so."""

    loses = False

    def can_lose_ranks(self) -> bool:
        return self.loses

    def check_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices != 2:
            raise ValueError(f"devices={num_devices} on {num_nodes} nodes")


@pytest.mark.parametrize(
    ("start", "kind"), [("popen", ScriptLauncher), ("spawn", ProcessLauncher)]
)
def test_the_launcher_is_ours(start: Any, kind: type) -> None:
    strategy = Own(
        parallel_devices=[torch.device("cpu")] * 2, cluster_environment=LightningEnvironment(), start_method=start
    )
    strategy._configure_launcher()
    assert type(strategy.launcher) is kind and strategy.launcher.tolerates() is False, VERSIONS
    assert "_start_method" in inspect.getsource(DDPStrategy._configure_launcher), VERSIONS


def test_the_strategy_checks_what_a_launcher_asks_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # started by somebody else
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = LightningEnvironment()
    for devices in (2, 3):
        strategy = Own(parallel_devices=[torch.device("cpu")] * devices, cluster_environment=environment)
        strategy._configure_launcher()
        launcher: Any = strategy.launcher
        assert launcher.cluster_environment.main_address == environment.main_address, VERSIONS
        assert strategy.cluster_environment is environment, VERSIONS
        if devices == 2:
            assert launcher.launch(lambda: "ran") == "ran", VERSIONS
        else:
            with pytest.raises(ValueError, match="devices=3 on 1 nodes"):
                launcher.launch(lambda: "ran")
        copied = pickle.loads(pickle.dumps(strategy)).launcher.cluster_environment
        assert copied.main_address == environment.main_address, VERSIONS


def test_ranks_are_set_when_devices_and_nodes_are_known_and_no_launcher_yet() -> None:
    """`UnevenNodesStrategy` changes devices and nodes in `set_world_ranks`."""
    source = inspect.getsource(_AcceleratorConnector._lazy_init_strategy)
    order = ["strategy.parallel_devices = ", "strategy.num_nodes = ", "set_world_ranks()", "_configure_launcher()"]
    found = [source.index(step) for step in order]
    assert found == sorted(found), VERSIONS


def test_a_backend_can_be_chosen_before_there_is_a_group() -> None:
    strategy = Own(
        parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment()
    )
    assert strategy.process_group_backend is None
    assert strategy.choose_backend() == "gloo" == strategy.process_group_backend, VERSIONS
    assert "self._process_group_backend = self._get_process_group_backend()" in inspect.getsource(
        DDPStrategy.setup_distributed
    ), VERSIONS


@pytest.mark.parametrize("loses", [True, False])
def test_on_gpus_groups_that_may_lose_ranks_are_gloos(loses: bool) -> None:
    """NCCL's collectives would wait on the device for the dead, until a timeout that ends the process."""
    options: Any = {"parallel_devices": [torch.device("cuda", 0)], "cluster_environment": LightningEnvironment()}
    strategy = Own(**options)
    strategy.loses = loses
    assert strategy.choose_backend() == ("gloo" if loses else "nccl"), VERSIONS
    assert Own(**options, process_group_backend="nccl").choose_backend() == "nccl", VERSIONS


def test_syncs_batch_norm() -> None:
    for asked in (False, True):
        trainer = Trainer(strategy=DDPStrategy(), devices=2, accelerator="cpu", sync_batchnorm=asked, logger=False)
        strategy: Any = trainer.strategy
        assert syncs_batch_norm(strategy) is asked, VERSIONS


def test_follow() -> None:
    """Another strategy of the same Trainer knows all that the Trainer tells one."""
    trainer = Trainer(strategy=DDPStrategy(), devices=2, accelerator="cpu", sync_batchnorm=True, logger=False)
    old: Any = trainer.strategy
    new = DDPStrategy()
    follow(old, new)
    told = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "num_nodes")
    assert all(getattr(new, name) is getattr(old, name) for name in told), VERSIONS
    assert (new.launcher, new.world_size, new.global_rank) == (old.launcher, 2, 0) and syncs_batch_norm(new), VERSIONS


def test_hand_over() -> None:
    """`trainer.strategy` is the other one, which has the module; what an earlier fit has logged is forgotten."""
    trainer = Trainer(strategy=DDPStrategy(), devices=2, accelerator="cpu", logger=False)
    module, new = Toy(), DDPStrategy()
    trainer.strategy.connect(module)
    epoch, logged = trainer.fit_loop.epoch_loop, {"training_step.loss": None}
    loops = (epoch, epoch.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in loops:
        loop._results.update(logged)  # type: ignore[arg-type]
    hand_over(trainer, trainer.strategy, new)  # type: ignore[arg-type]
    assert trainer.strategy is new and new.lightning_module is module, VERSIONS
    assert not any(loop._results for loop in loops), VERSIONS
