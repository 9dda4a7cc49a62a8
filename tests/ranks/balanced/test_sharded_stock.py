"""What Lightning's tests demand of `ModelParallelStrategy`, demanded of ours.

They are tests_pytorch/strategies/test_model_parallel.py and test_model_parallel_integration.py of Lightning 2.6; those
that need GPUs run here on CPUs with gloo. Where ours differs a test says so:

    sizes that do not fit     a ValueError when the Trainer is made, not a RuntimeError when the fit begins
    both sizes "auto"         all devices are data-parallel; stock: all of a node are tensor-parallel
    `trainer.train_dataloader` has our batch sampler: its ``sampler`` is no `DistributedSampler`

Left out: that a metric moves to the GPU, as there is only one kind of device here.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero import ShardedBalancedStrategy
from tests.ranks.balanced.sharded_kit import whole
from tests.ranks.harness import RankEnvironment, run_ranks

MODEL_PARALLEL = "lightning.pytorch.strategies.model_parallel"

# ---- without processes -----------------------------------------------------------------------------------------


def connected(module: Any, **arguments: Any) -> ShardedBalancedStrategy:
    """A strategy with a module, as if it had been launched on one device."""
    strategy = ShardedBalancedStrategy(**arguments)
    strategy.accelerator = mock.Mock()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment = mock.Mock(world_size=lambda: 1, local_rank=lambda: 0, global_rank=lambda: 0)
    strategy.model = strategy._lightning_module = module
    return strategy


class Configures(LightningModule):
    def configure_model(self) -> None:
        pass


def test_an_old_torch_is_refused() -> None:
    with mock.patch(f"{MODEL_PARALLEL}._TORCH_GREATER_EQUAL_2_4", False), pytest.raises(ImportError, match=r"2\.4"):
        ShardedBalancedStrategy()


def test_there_is_no_mesh_before_the_processes_have_met() -> None:
    with pytest.raises(RuntimeError, match=r"Accessing the device mesh .* not allowed"):
        _ = ShardedBalancedStrategy().device_mesh


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 3), (4, 2), (1, 2)])
def test_sizes_must_fit_the_devices(data: int, tensor: int) -> None:
    strategy = ShardedBalancedStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    with pytest.raises(ValueError, match="must be the number of devices, 4"):
        Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)


def test_modules_of_the_first_fsdp_are_refused() -> None:
    module = Configures()
    strategy = connected(module)
    old = mock.Mock(spec=FullyShardedDataParallel)
    with mock.patch.object(module, "modules", lambda: [old]), pytest.raises(TypeError, match="only supports the new"):
        strategy.setup(mock.Mock())


def test_configure_model_is_needed() -> None:
    with pytest.raises(TypeError, match="you are required to override the `configure_model"):
        connected(LightningModule()).setup(mock.Mock())
    connected(Configures()).setup(mock.Mock())


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save_checkpoint\(\.\.\., storage_options=\.\.\.\)` is not supported"):
        ShardedBalancedStrategy(save_distributed_checkpoint=False).save_checkpoint({}, tmp_path, mock.Mock())


def test_a_whole_checkpoint_takes_no_folder_that_is_something_else(tmp_path: Path) -> None:
    strategy = connected(Configures(), save_distributed_checkpoint=False)
    for name, inside, refused in (("full", "file", True), ("sharded", "meta.pt", False)):
        path = tmp_path / name
        path.mkdir()
        (path / inside).touch()
        if refused:
            with pytest.raises(IsADirectoryError, match="exists and is a directory"):
                strategy.save_checkpoint({"state_dict": {}}, path)
        else:
            strategy.save_checkpoint({"state_dict": {}}, path)
            assert path.is_file()
    strategy.save_checkpoint({"state_dict": {}}, path)


def test_the_timeout_is_that_of_the_process_group() -> None:
    strategy = ShardedBalancedStrategy(timeout=timedelta(seconds=30))
    strategy.parallel_devices, strategy.accelerator = [torch.device("cpu")], mock.Mock()
    strategy.cluster_environment, strategy._lightning_module = LightningEnvironment(), mock.Mock(trainer=None)
    mesh, meeting = f"{MODEL_PARALLEL}._setup_device_mesh", f"{MODEL_PARALLEL}._init_dist_connection"
    with mock.patch(mesh), mock.patch(meeting) as made:
        strategy.setup_environment()
    assert made.call_args.kwargs["timeout"] == timedelta(seconds=30)


class OnMeta(Configures):
    """A layer that cannot initialise itself, one that can, and a buffer."""

    class Unset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.Unset(), self.Unset())
        self.second = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.rand(2))

    def reset_parameters(self) -> None:
        self.buffer.fill_(1.0)


def test_tensors_on_meta_are_made_real() -> None:
    with torch.device("meta"):
        module = OnMeta()
    with pytest.warns(UserWarning, match=r"`reset_parameters\(\)` method for re-initialization: Unset"):
        connected(module).setup(mock.Mock())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert module.buffer.tolist() == [1.0, 1.0]


# ---- with processes --------------------------------------------------------------------------------------------

Case = Callable[[int, int], Any]
CASES: dict[int, dict[str, Case]] = {2: {}, 4: {}}


def on(world: int) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        CASES[world][case.__name__] = case
        return case

    return add


class Gated(LightningModule):
    """One layer times another, and a third."""

    divides: str = ""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"up": nn.Linear(8, 16), "gate": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def configure_model(self) -> None:
        if self._device_mesh is None or isinstance(self.net["up"], FSDPModule):
            return
        plan: Any = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
        if "tensor" in self.divides:
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        for layer in self.net.values() if "data" in self.divides else ():
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].to(self.net["up"].weight.dtype)
        return self.net["down"](nn.functional.silu(self.net["up"](x)) * self.net["gate"](x)).square().mean()

    def train_dataloader(self) -> DataLoader:
        g = torch.Generator().manual_seed(7)
        return DataLoader(TensorDataset(torch.randn(16, 8, generator=g)), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class DataDivided(Gated):
    divides = "data"


class TensorDivided(Gated):
    divides = "tensor"


class BothDivided(Gated):
    divides = "data and tensor"


def trainer(rank: int, world: int, strategy: Any = None, **kwargs: Any) -> Trainer:
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = strategy or ShardedBalancedStrategy(monitor=False)
    return Trainer(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[RankEnvironment(rank, world)], logger=False,
        **{"max_epochs": 1, **options, **kwargs},
    )  # fmt: skip


@on(4)
def the_mesh_has_both_sizes(rank: int, world: int) -> None:
    seen = []

    class Looks(Gated):
        def configure_model(self) -> None:
            mesh = self.device_mesh
            assert mesh is not None and mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
            seen.append((mesh.size(0), mesh.size(1), mesh.ndim, mesh.device_type))

    for sizes in ({"data_parallel_size": 1, "tensor_parallel_size": 4}, {"tensor_parallel_size": 2}, {}):
        module = Looks()
        module.requires_grad_(False)  # as no layer is divided
        module.net["down"].weight.data.zero_()
        fit = trainer(rank, world, ShardedBalancedStrategy(monitor=False, **sizes))
        with pytest.raises(RuntimeError, match="does not require grad"):
            fit.fit(module)
    assert seen == [(1, 4, 2, "cpu"), (2, 2, 2, "cpu"), (4, 1, 2, "cpu")]  # stock: the last would be 1, 4


@on(2)
def tensor_parallel_ranks_get_the_same_batches(rank: int, world: int) -> None:
    class Looks(TensorDivided):
        def on_train_start(self) -> None:
            mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
            assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in self.net["up"].parameters())
            assert len(self.trainer.train_dataloader) == 8  # type: ignore[arg-type]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            batches = self.all_gather(batch[0])
            assert batches.shape == (2, 2, 8) and torch.equal(batches[0], batches[1])  # type: ignore[union-attr]
            return super().training_step(batch, batch_idx)

    strategy = ShardedBalancedStrategy(monitor=False, data_parallel_size=1, tensor_parallel_size=2)
    fit = trainer(rank, world, strategy, max_steps=2)
    with fit.init_module(empty_init=True):
        module = Looks()
    assert all(p.is_meta for p in module.parameters())
    fit.fit(module)
    assert not any(p.is_meta for p in module.parameters()) and fit.global_step == 2


@on(4)
def both_divide_weights_but_only_one_batches(rank: int, world: int) -> None:
    class Looks(BothDivided):
        def on_train_start(self) -> None:
            parameters = [*self.net.parameters(), *self.optimizers().param_groups[0]["params"]]  # type: ignore[union-attr]
            assert all(isinstance(p, DTensor) and not p.is_meta for p in parameters)
            assert all(p.device_mesh.shape == (2, 2) for p in self.net["up"].parameters())
            assert len(self.trainer.train_dataloader) == 4  # type: ignore[arg-type]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            batches: Any = self.all_gather(batch[0])
            assert torch.equal(batches[0], batches[1]) and torch.equal(batches[2], batches[3])
            assert not torch.equal(batches[0], batches[2]) and not torch.equal(batches[1], batches[3])
            return super().training_step(batch, batch_idx)

    strategy = ShardedBalancedStrategy(monitor=False, data_parallel_size=2, tensor_parallel_size=2, rebalance=False)
    fit = trainer(rank, world, strategy, max_steps=2)
    with fit.init_module(empty_init=True):
        module = Looks()
    fit.fit(module)
    assert fit.global_step == 2


@on(2)
def a_metric_without_parameters_counts(rank: int, world: int) -> None:
    class Counts(DataDivided):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MulticlassAccuracy(10)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.metric(torch.rand(2, 10), torch.randint(0, 10, (2,)))
            return super().training_step(batch, batch_idx)

    trainer(rank, world, max_steps=1).fit(Counts())


@on(2)
def a_module_is_made_where_and_as_what_it_should(rank: int, world: int) -> None:
    for precision, dtype in (("32-true", torch.float32), ("16-true", torch.float16), ("bf16-true", torch.bfloat16)):
        for empty in (False, True):

            class Looks(DataDivided):
                expected = dtype

                def on_train_start(self) -> None:
                    weight = self.net["up"].weight
                    assert weight.device.type == "cpu" and weight.dtype == self.expected

            fit = trainer(rank, world, precision=precision, max_steps=1, barebones=True)
            with fit.init_module(empty_init=empty):
                module = Looks()
            weight = module.net["up"].weight
            assert weight.dtype == dtype and weight.is_meta == empty
            fit.fit(module)


@on(2)
def the_state_dict_has_the_names_of_the_module(rank: int, world: int) -> None:
    for distributed in (True, False):
        module = DataDivided()
        names = list(module.state_dict())
        fit = trainer(rank, world, ShardedBalancedStrategy(monitor=False, save_distributed_checkpoint=distributed))
        fit.fit(module)
        state = fit.strategy.lightning_module_state_dict()
        assert list(state) == (names if distributed or rank == 0 else [])


def states(fit: Trainer, module: LightningModule) -> tuple[dict[str, Any], dict[str, Any]]:
    return fit.strategy.lightning_module_state_dict(), fit.strategy.optimizer_state(module.optimizers())  # type: ignore[arg-type]


def ours_whole() -> ShardedBalancedStrategy:
    return ShardedBalancedStrategy(monitor=False, save_distributed_checkpoint=False)


@on(2)
def a_whole_checkpoint_goes_into_a_plain_module_and_back(rank: int, world: int) -> None:
    for first, second, kinds in (
        (ours_whole(), "ddp", (DataDivided, Gated)),
        ("ddp", ours_whole(), (Gated, DataDivided)),
    ):
        module = kinds[0]()
        fit = trainer(rank, world, first)
        fit.fit(module)
        path = fit.strategy.broadcast(f"{type(module).__name__}.ckpt")
        fit.save_checkpoint(path)
        saved = states(fit, module)
        module = kinds[1]()
        fit = trainer(rank, world, second)
        fit.fit(module, ckpt_path=path)
        restored = states(fit, module)
        if rank == 0:
            assert saved[0].keys() == restored[0].keys() and len(saved[1]["state"]) == 6
            for one, other in zip(saved, restored, strict=True):
                torch.testing.assert_close(one, other, atol=0, rtol=0)
        dist.barrier()


@on(2)
def a_distributed_checkpoint_is_a_folder_and_continues(rank: int, world: int) -> None:
    module = DataDivided()
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": "folder"}
    fit = trainer(rank, world, **options)
    fit.fit(module)
    before = [whole(p) for p in module.parameters()]
    path = Path(fit.strategy.broadcast(fit.checkpoint_callback.best_model_path))  # type: ignore[union-attr]
    assert set(os.listdir(path)) == {"meta.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    meta = torch.load(path / "meta.pt", weights_only=False)
    assert "pytorch-lightning_version" in meta and len(meta["callbacks"]) == 1
    assert not {"state_dict", "optimizer_states"} & meta.keys()

    class Continues(DataDivided):
        def on_train_start(self) -> None:
            assert all(torch.equal(a, whole(b)) for a, b in zip(before, self.parameters(), strict=True))

    fit = trainer(rank, world, max_epochs=2, **options)
    fit.fit(Continues(), ckpt_path=path)
    assert fit.current_epoch == 2


@on(2)
def a_folder_that_is_no_checkpoint_is_refused(rank: int, world: int) -> None:
    Path("empty").mkdir(exist_ok=True)
    with pytest.raises((ValueError, RuntimeError), match="empty"):
        trainer(rank, world).fit(DataDivided(), ckpt_path="empty")
    dist.barrier()


def run_all(rank: int, world: int) -> dict[str, str]:
    failed = {}
    for name, case in CASES[world].items():
        try:
            torch.manual_seed(0)
            case(rank, world)
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


@cache
def failures(world: int) -> list[dict[str, str]]:
    return run_ranks(world, run_all, timeout_s=300)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_as_stock(world: int, name: str) -> None:
    for failed in failures(world):
        assert name not in failed, failed[name]
