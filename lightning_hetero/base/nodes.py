"""Nodes with different numbers of processes: the launcher says how many, not ``devices x num_nodes`` (layer L).

    torchrun   LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE, WORLD_SIZE
    SLURM      SLURM_STEP_TASKS_PER_NODE="6,1(x2)", SLURM_NODEID, SLURM_NTASKS
    Ray        ray.train.get_context(), ray.train.torch.get_device()

Stock Lightning refuses nodes of 6 + 1 + 1 devices under all. Ranks are right without it: the environments read
them from the launcher. What is left is the Trainer's arguments, which are made to follow, and its check of them.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_hetero.cluster.units import tasks_per_node
from lightning_hetero.lightning_compat.strategies import LaunchedStrategy
from lightning_hetero.transport.failures import FailureBoard


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a launcher says it has started.

    Attributes:
        launcher: its name, for people.
        local: processes on this node.
        nodes: number of nodes; None: not known.
        even: whether every node has as many, as far as this one can tell.
        binds: whether the launcher may show each process only its own device.
        problem: why training cannot begin in what it has started; else empty.
        device: that it has chosen for this process; None: it does not choose one.
    """

    launcher: str
    local: int
    nodes: int | None
    even: bool
    binds: bool = False
    problem: str = ""
    device: torch.device | None = None


def launch_of(environment: ClusterEnvironment | None, environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns what the launcher says; None if Lightning's own ``devices x num_nodes`` holds.

    Args:
        environment: as Lightning has found it.
        environ: the variables of this process.
    """
    if isinstance(environment, TorchElasticEnvironment):
        return _torchrun(environ)
    if isinstance(environment, SLURMEnvironment):
        return _slurm(environ)
    if type(environment).__name__ == "RayLightningEnvironment":
        import ray.train.torch  # pyright: ignore[reportMissingImports]

        local = ray.train.get_context().get_local_world_size()
        return Launch(launcher="Ray", local=local, nodes=None, even=False, device=ray.train.torch.get_device())
    return None


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if "LOCAL_WORLD_SIZE" not in environ or "GROUP_WORLD_SIZE" not in environ:
        return None
    local, nodes = int(environ["LOCAL_WORLD_SIZE"]), int(environ["GROUP_WORLD_SIZE"])
    return Launch(launcher="torchrun", local=local, nodes=nodes, even=local * nodes == int(environ["WORLD_SIZE"]))


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    if not counts or environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):  # shells, which start no tasks
        return None
    tasks, task, node = (int(environ.get(f"SLURM_{name}", 0)) for name in ("NTASKS", "PROCID", "NODEID"))
    ids = environ.get("SLURM_GTIDS")
    here = len(ids.split(",")) if ids else None  # tasks of this step on this node
    if task >= tasks:
        problem = (
            f"SLURM_PROCID={task} must be below SLURM_NTASKS={tasks}: each component of this heterogeneous step counts"
            " its own tasks only; start one torchrun on each node instead"
        )
        return Launch(launcher="SLURM", local=here or 1, nodes=None, even=False, problem=problem)
    if sum(counts) < tasks and here is not None:
        # A component of a heterogeneous step: the counts are its own, ranks and nodes are numbered through all of them.
        return Launch(launcher="SLURM", local=here, nodes=None, even=False, binds=True)
    if sum(counts) != tasks or node >= len(counts) or len(set(counts)) == 1:
        return None
    local, problem = counts[node], ""
    if here not in (None, local):
        problem = f"SLURM has {local} tasks for this node, but {here} started here: start the script with srun"
    return Launch(launcher="SLURM", local=local, nodes=len(counts), even=False, binds=True, problem=problem)


class UnevenNodesStrategy(LaunchedStrategy):
    """A strategy on nodes with different numbers of devices, started by torchrun or SLURM.

    On even nodes Lightning's own check decides. On others ``devices`` must be the node's, or all it has (``"auto"``,
    ``-1``), and ``num_nodes`` may be left out.

    Attributes:
        failures: of the run, or of the last one.
    """

    failures: FailureBoard | None = None

    @abstractmethod  # to be extended
    def set_world_ranks(self) -> None:
        """Called when the Trainer is made, with its devices and nodes, and again before a process group is."""
        launch = launch_of(self.cluster_environment)
        if launch is not None:
            self._follow(launch)
        super().set_world_ranks()

    def _follow(self, launch: Launch) -> None:
        if self.num_nodes == 1 and launch.nodes is not None:
            self.num_nodes = launch.nodes
        devices, accelerator = self.parallel_devices, self.accelerator
        if not devices or accelerator is None or len(devices) != accelerator.auto_device_count():
            return
        if launch.device is not None and launch.device.type == devices[0].type:
            self.parallel_devices = [launch.device] * launch.local
        elif len(devices) >= launch.local:  # all of the node were meant: those that processes were started for
            self.parallel_devices = devices[: launch.local]
        elif len(devices) == 1 and (launch.binds or isinstance(accelerator, CPUAccelerator)):
            self.parallel_devices = devices * launch.local  # each process sees one, its own

    def check_settings(self, num_devices: int, num_nodes: int) -> None:
        """Checks the Trainer's arguments against what was started.

        Raises:
            ValueError: they differ.
        """
        launch = launch_of(self.cluster_environment)
        if launch is None or launch.even:
            super().check_settings(num_devices, num_nodes)
            return
        if launch.problem:
            raise ValueError(launch.problem)
        if num_devices != launch.local:
            raise ValueError(
                f"devices={num_devices} in the Trainer, but {launch.launcher} has started {launch.local} processes on"
                f' this node: leave devices="auto", or give {launch.local} here'
            )
        if launch.nodes is not None and num_nodes != launch.nodes:
            raise ValueError(
                f"num_nodes={num_nodes} in the Trainer, but {launch.launcher} has started processes on {launch.nodes}"
                " nodes: leave num_nodes out, or give that number"
            )


def gather_nodes(node_rank: int) -> list[int]:
    """Returns the node of each member of the default group, by its rank there; a collective.

    Args:
        node_rank: of this process.
    """
    nodes: list[int] = [node_rank] * dist.get_world_size()
    dist.all_gather_object(nodes, node_rank)
    return nodes
