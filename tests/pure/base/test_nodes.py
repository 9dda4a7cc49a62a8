"""Nodes of 6 + 1 + 1 processes: what torchrun and SLURM say of them, and what becomes of the Trainer's numbers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_hetero import LoadBalancedStrategy
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.nodes import launch_of
from lightning_hetero.cluster.units import tasks_per_node

COUNTS = (6, 1, 1)
# (global rank, local rank, node)
PLACES = [
    (rank, local, node)
    for rank, (node, local) in enumerate((node, i) for node, count in enumerate(COUNTS) for i in range(count))
]
STRATEGIES = ["hetero_balanced", "hetero_stale", "hetero_pipeline", "hetero_federated"]


def torchrun_variables(rank: int, local: int, node: int, counts: tuple[int, ...] = COUNTS) -> dict[str, str]:
    said = {
        "RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "WORLD_SIZE": sum(counts),
        "LOCAL_WORLD_SIZE": counts[node], "GROUP_WORLD_SIZE": len(counts), "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    return {name: str(value) for name, value in said.items()}


def slurm_variables(
    rank: int, local: int, node: int, counts: tuple[int, ...] = COUNTS, **more: Any
) -> dict[str, str]:
    """As srun --ntasks=8 --nodes=3 --ntasks-per-node=6 sets them: with --ntasks the last is the most of a node."""
    first = sum(counts[:node])
    said = {
        "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": 4711, "SLURM_NODELIST": "node[7-9]",
        "SLURM_NNODES": len(counts), "SLURM_NTASKS": sum(counts), "SLURM_NTASKS_PER_NODE": max(counts),
        "SLURM_TASKS_PER_NODE": "6,1(x2)" if counts == COUNTS else ",".join(map(str, counts)),
        "SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node,
        "SLURM_GTIDS": ",".join(str(first + i) for i in range(counts[node])), **more,
    }  # fmt: skip
    return {name: str(value) for name, value in said.items()}


LAUNCHERS = {"torchrun": torchrun_variables, "SLURM": slurm_variables}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process one that a launcher has started, as far as variables tell."""
    of_launchers = {**torchrun_variables(0, 0, 0), **slurm_variables(0, 0, 0)}
    for name in (*of_launchers, "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or Lightning would choose a number of threads here

    def become(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return become


def make_trainer(strategy: Any = "hetero_balanced", **numbers: Any) -> Trainer:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", strategy=strategy, **quiet, **numbers)


def launch(trainer: Trainer) -> Any:
    launcher: Any = trainer.strategy.launcher
    return launcher.launch(lambda: "ran here")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("6,1(x2)", [6, 1, 1]),
        ("8", [8]),
        ("2(x3)", [2, 2, 2]),
        ("3, 1", [3, 1]),
        ("", []),
        ("two", []),
        ("6,", []),
    ],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_has_its_place_whatever_the_trainer_was_told(
    launched: Any, launcher: str, strategy: str
) -> None:
    for rank, local, node in (PLACES[r] for r in (0, 5, 6, 7)):
        launched(LAUNCHERS[launcher](rank, local, node))
        for numbers in ({}, {"devices": COUNTS[node]}, {"devices": COUNTS[node], "num_nodes": 3}):
            trainer = make_trainer(strategy, **numbers)
            chosen: Any = trainer.strategy
            assert launch(trainer) == "ran here"
            assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (rank, local, node)
            assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (8, COUNTS[node], 3)
            assert trainer.is_global_zero is (rank == 0)
            assert chosen.root_device == torch.device("cpu")
            assert chosen.distributed_sampler_kwargs == {"num_replicas": 8, "rank": rank}


def test_stock_ddp_is_left_alone(launched: Any) -> None:
    launched(torchrun_variables(6, 0, 1))
    with pytest.raises(ValueError, match="does not match the world size"):
        launch(make_trainer("ddp", devices=1, num_nodes=3))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"devices": 2}, "devices=2 in the Trainer, but {} has started 6 processes on this node"),
        ({"num_nodes": 2}, "num_nodes=2 in the Trainer, but {} has started processes on 3 nodes"),
    ],
)
def test_numbers_that_contradict_the_launcher(
    launched: Any, launcher: str, numbers: Any, message: str
) -> None:
    launched(LAUNCHERS[launcher](0, 0, 0))
    with pytest.raises(ValueError, match=message.format(launcher)):
        launch(make_trainer(**numbers))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_even_nodes_lightnings_own_check_decides(launched: Any, launcher: str) -> None:
    launched(LAUNCHERS[launcher](3, 1, 1, (2, 2)))
    assert launch(make_trainer(devices=2, num_nodes=2)) == "ran here"
    message = (
        "does not match the world size" if launcher == "torchrun" else "number of tasks per node configured"
    )
    with pytest.raises(ValueError, match=message):
        launch(make_trainer(devices=3, num_nodes=2))
    assert launch_of(SLURMEnvironment()) is None or launcher == "torchrun"


def on_gpus(
    environment: ClusterEnvironment, visible: list[int], monkeypatch: pytest.MonkeyPatch
) -> LoadBalancedStrategy:
    """Returns a strategy as a Trainer makes it ready on a machine that shows these GPUs, with devices="auto"."""
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: len(visible)))
    strategy = LoadBalancedStrategy(
        accelerator=CUDAAccelerator(),
        parallel_devices=[torch.device("cuda", i) for i in visible],
        cluster_environment=environment,
    )
    strategy.set_world_ranks()
    return strategy


def test_a_process_takes_the_gpu_of_its_local_rank(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(torchrun_variables(5, 5, 0))
    for visible in (range(6), range(8)):  # on a node of eight, six processes were started
        strategy = on_gpus(TorchElasticEnvironment(), list(visible), monkeypatch)
        assert (strategy.root_device, strategy.num_processes) == (torch.device("cuda", 5), 6)
        strategy.check_settings(strategy.num_processes, strategy.num_nodes)
    strategy = on_gpus(TorchElasticEnvironment(), [0, 1], monkeypatch)
    with pytest.raises(ValueError, match="devices=2 in the Trainer, but torchrun has started 6"):
        strategy.check_settings(strategy.num_processes, strategy.num_nodes)


class RayLightningEnvironment(LightningEnvironment):
    """Worker 1 of the 3 on its node, as Ray's own class of this name says it."""

    creates_processes_externally = True  # type: ignore[assignment]

    def local_rank(self) -> int:
        return 1


def test_under_ray_a_process_takes_the_device_that_ray_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, train, chosen = ModuleType("ray"), ModuleType("ray.train"), ModuleType("ray.train.torch")
    ray.train, train.torch = train, chosen  # type: ignore[attr-defined]
    train.get_context = lambda: SimpleNamespace(get_local_world_size=lambda: 3)  # type: ignore[attr-defined]
    chosen.get_device = lambda: torch.device("cuda", 0)  # type: ignore[attr-defined]
    for module in (ray, train, chosen):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for visible in ([0], [0, 1]):  # of which two workers share one
        strategy = on_gpus(RayLightningEnvironment(), visible, monkeypatch)
        assert (strategy.root_device, strategy.num_processes) == (torch.device("cuda", 0), 3)
        strategy.check_settings(strategy.num_processes, strategy.num_nodes)


def test_slurm_may_show_each_task_its_own_gpu_only(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --gpus-per-task=1; torchrun shows all of a node's to each process."""
    launched(slurm_variables(5, 5, 0))
    strategy = on_gpus(SLURMEnvironment(), [0], monkeypatch)
    assert (strategy.root_device, strategy.num_processes) == (torch.device("cuda", 0), 6)
    strategy.check_settings(strategy.num_processes, strategy.num_nodes)
    launched(torchrun_variables(5, 5, 0))
    strategy = on_gpus(TorchElasticEnvironment(), [0], monkeypatch)
    with pytest.raises(ValueError, match="devices=1 in the Trainer, but torchrun has started 6"):
        strategy.check_settings(strategy.num_processes, strategy.num_nodes)


def test_a_step_smaller_than_the_job_counts_for_itself(launched: Any) -> None:
    launched(
        slurm_variables(2, 2, 0, (3, 1), SLURM_STEP_TASKS_PER_NODE="3,1", SLURM_TASKS_PER_NODE="6,1(x2)")
    )
    found = launch_of(SLURMEnvironment())
    assert found is not None and (found.local, found.nodes, found.problem) == (3, 2, "")


def test_components_of_a_heterogeneous_step(launched: Any) -> None:
    """srun --ntasks=6 ... : --nodes=2 --ntasks=2 ...: the counts are a component's, ranks and nodes the step's."""
    for rank, local, node in PLACES:
        counts = "6" if node == 0 else "1(x2)"
        launched(slurm_variables(rank, local, node, SLURM_TASKS_PER_NODE=counts))
        trainer = make_trainer(devices=COUNTS[node], num_nodes=3)
        assert launch(trainer) == "ran here"
        assert (trainer.world_size, trainer.global_rank, trainer.num_devices) == (8, rank, COUNTS[node])
    launched(
        slurm_variables(6, 0, 1, SLURM_TASKS_PER_NODE="1(x2)", SLURM_NTASKS=2)
    )  # nobody knows of the eight
    with pytest.raises(ValueError, match="SLURM_PROCID=6 must be below SLURM_NTASKS=2"):
        launch(make_trainer(devices=1, num_nodes=3))


def test_a_script_that_was_not_started_by_srun(launched: Any) -> None:
    launched(slurm_variables(0, 0, 0, SLURM_GTIDS="0"))
    with pytest.raises(
        ValueError, match="6 tasks for this node, but 1 started here: start the script with srun"
    ):
        launch(make_trainer())


@pytest.mark.parametrize("missing", ["LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_TASKS_PER_NODE"])
def test_without_the_variables_all_is_as_in_lightning(launched: Any, missing: str) -> None:
    variables = {**torchrun_variables(0, 0, 0), **slurm_variables(0, 0, 0)}
    del variables[missing]
    environment = SLURMEnvironment if missing.startswith("SLURM") else TorchElasticEnvironment
    launched(slurm_variables(0, 0, 0))  # SLURM's environment looks at once
    assert launch_of(environment(), variables) is None
    assert launch_of(LightningEnvironment(), variables) is None and launch_of(None, variables) is None


def test_who_is_near() -> None:
    nodes = {rank: node for rank, _, node in PLACES if rank != 4}  # rank 4 was dead when the fit began
    near = {}
    for rank, _, _ in PLACES:
        members = Members(rank, 8)
        members.nodes = nodes
        near[rank] = members.near
    assert near[0] == near[5] == (0, 1, 2, 3, 5)
    assert (near[4], near[6], near[7]) == ((4,), (6,), (7,))
