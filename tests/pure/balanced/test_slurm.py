"""Under SLURM the Trainer takes ranks from srun; nothing is opened or launched before the job starts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero import BalancePolicy, LoadBalancedStrategy

# SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID on two nodes of two tasks
PLACES = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
OTHERS = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*OTHERS, "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def trainer(strategy: Any, **kwargs: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, **quiet, **kwargs)


@pytest.mark.parametrize(("rank", "local_rank", "node"), PLACES)
@pytest.mark.parametrize("strategy", ["hetero_balanced", LoadBalancedStrategy])
def test_ranks_come_from_srun(
    no_launcher: pytest.MonkeyPatch, strategy: Any, rank: int, local_rank: int, node: int
) -> None:
    for name, value in {
        "SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 2, "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": 4711, "SLURM_NODELIST": "node[7-8]",
        "SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node,
    }.items():  # fmt: skip
        no_launcher.setenv(name, str(value))
    made = trainer(strategy if isinstance(strategy, str) else strategy(), num_nodes=2)
    chosen = made.strategy
    assert isinstance(chosen, LoadBalancedStrategy)
    assert isinstance(chosen.cluster_environment, SLURMEnvironment)
    assert chosen.cluster_environment.creates_processes_externally
    no_launcher.setenv("OMP_NUM_THREADS", "1")  # or Lightning would choose a number of threads here
    launcher: Any = chosen.launcher
    assert launcher.launch(lambda: "ran here") == "ran here" and launcher.procs == []
    assert (chosen.world_size, chosen.global_rank, chosen.local_rank, chosen.node_rank) == (
        4, rank, local_rank, node
    )
    assert made.is_global_zero is (rank == 0)
    environment = chosen.cluster_environment
    assert (environment.main_address, environment.main_port) == ("node7", 19711)
    assert not dist.is_initialized()
    no_launcher.delenv("MASTER_ADDR")  # set by Lightning when it was asked for
    no_launcher.delenv("MASTER_PORT")


@pytest.mark.parametrize(
    ("suffix", "start_method"),
    [
        ("", "popen"),
        ("_spawn", "spawn"),
        ("_fork", "fork"),
        ("_forkserver", "forkserver"),
        ("_notebook", "fork"),
    ],
)
@pytest.mark.parametrize("unused", [False, True])
def test_every_launcher_has_its_name_as_with_stock_ddp(suffix: str, start_method: str, unused: bool) -> None:
    name = f"{suffix}{'_find_unused_parameters_true' if unused else ''}"
    assert suffix == "_forkserver" or f"ddp{name}" in StrategyRegistry.available_strategies()
    made = StrategyRegistry.get(f"hetero_balanced{name}")
    assert isinstance(made, LoadBalancedStrategy)
    assert made._start_method == start_method
    assert made._ddp_kwargs == ({"find_unused_parameters": True} if unused else {})


def test_a_strategy_is_picklable_before_fit_with_its_settings(no_launcher: pytest.MonkeyPatch) -> None:
    strategy = LoadBalancedStrategy(
        global_batch_size=96,
        policy=BalancePolicy(predictor="ewma", dead_band=0.1),
        min_samples=[2, 4],
        quantum=2,
    )
    again = pickle.loads(pickle.dumps(strategy))
    assert (again.global_batch_size, again.settings.bounds) == (96, strategy.settings.bounds)
    assert (again.policy.dead_band, type(again.policy.prototype).__name__) == (0.1, "Ewma")
    assert again.shares == () and again.step_report() is None and again.current_samples() is None
    inside = pickle.loads(pickle.dumps(trainer(strategy))).strategy  # as spawn sends it
    assert isinstance(inside, LoadBalancedStrategy) and inside.settings.bounds == strategy.settings.bounds
