"""Nodes of 3 + 1 processes, under torchrun and with SLURM's variables: every engine is right on them.

Both "nodes" are this machine: to the engines a node is what the launcher calls one, so memory is shared only inside it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import warm
from tests.e2e.programs import ROOT, environ, left_in, warm_torchrun
from tests.ports import free_port

pytestmark = pytest.mark.timeout(200)

SCRIPT = Path(__file__).with_name("nodes_script.py")
ENGINES = ("balanced", "stale", "pipeline", "federated")
STEPS = {"federated": 36}  # of 4 samples, for every rank has all; else 10
# global rank: (local rank, node)
PLACES = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (0, 1)}
Said = dict[str, list[dict[str, Any]]]


def run_together(folder: Path, programs: list[tuple[list[str], dict[str, str]]]) -> Said:
    """Runs them at the same time to their ends; returns what the ranks ended with, by engine and rank."""
    screens = [folder / f"screen{i}" for i in range(len(programs))]
    with ExitStack() as stack:
        files = [stack.enter_context(screen.open("w")) for screen in screens]
        processes = [
            warm.start(command, folder, environ(**variables), file.fileno(), file.fileno())
            for (command, variables), file in zip(programs, files, strict=True)
        ]
        stack.callback(lambda: [process.kill() for process in processes])
        try:
            codes = [process.wait(120.0) for process in processes]
        except subprocess.TimeoutExpired:
            codes = []
    assert set(codes) == {0}, "\n".join(screen.read_text()[-3000:] for screen in screens)
    assert left_in(folder, grace_s=5.0) == []
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in PLACES]
    return {engine: [rank[engine] for rank in ranks] for engine in ENGINES}


def torchrun(folder: Path) -> Said:
    """Runs the first two lines of the page, for two nodes of three and one process."""
    lines = re.findall(r"^torchrun (.*) train\.py$", (ROOT / "docs/reference/nodes.md").read_text(), flags=re.M)[:2]
    here = {"--nnodes=3": "--nnodes=2", "--nproc-per-node=6": "--nproc-per-node=3", "$HEAD": "localhost"}
    here["29500"] = str(free_port())
    assert len(lines) == 2 and all(word in lines[0] for word in here)
    for word, instead in here.items():
        lines = [line.replace(word, instead) for line in lines]
    script = [str(SCRIPT), "auto", ",".join(ENGINES)]
    return run_together(folder, [([warm_torchrun(folder), *line.split(), *script], {}) for line in lines])


def slurm(folder: Path) -> Said:
    """As srun --nodes=2 --ntasks=4 --ntasks-per-node=3 starts them, with the variables it sets."""
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost,other",
        "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "3",
        "SLURM_TASKS_PER_NODE": "3,1", "SLURM_STEP_TASKS_PER_NODE": "3,1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    programs = []
    for rank, (local, node) in PLACES.items():
        here = ",".join(str(r) for r, place in PLACES.items() if place[1] == node)
        own = {"PROCID": rank, "LOCALID": local, "NODEID": node, "GTIDS": here}
        variables = job | {f"SLURM_{name}": str(value) for name, value in own.items()}
        programs.append(([str(SCRIPT), str(3 if node == 0 else 1), ",".join(ENGINES)], variables))
    return run_together(folder, programs)


@pytest.fixture(scope="module", params=[torchrun, slurm], ids=["torchrun", "slurm"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    start: Callable[[Path], Said] = request.param
    return start(tmp_path_factory.mktemp("nodes"))


def expected(engine: str) -> list[list[float]]:
    """Plain SGD by hand, in one process, over the batches of `DistributedSampler`'s order; else the loader's own."""
    x = torch.randn(70, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(epoch)).split(16)
        for batch in torch.arange(70).split(4) if engine == "federated" else shuffled:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[batch]), y[batch]).backward()
            optimizer.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


@pytest.mark.stock_ddp("prepare_data")
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_and_what_is_per_node(said: Said, engine: str) -> None:
    for rank, (local, node) in PLACES.items():
        one = said[engine][rank]
        assert one["places"] == [rank, local, node, rank == 0]
        assert one["sizes"] == [4, 1 if node else 3, 2]
        assert one["prepared"] == (local == 0 if engine != "pipeline" else rank == 0)


@pytest.mark.stock_ddp("devices", "torchrun", "slurm")
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_those_of_one_process(said: Said, engine: str) -> None:
    for one in said[engine]:
        assert one["steps"] == STEPS.get(engine, 10)
        for got, right in zip(one["weights"], expected(engine), strict=True):
            assert got == pytest.approx(right, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_every_sample_once(said: Said, engine: str) -> None:
    ranks = said[engine]
    for epoch in range(2):
        seen = [
            number for one in ranks for at, _, numbers in one["trained"] if at == epoch for number in numbers
        ]
        assert sorted(seen) == list(range(70))
    assert sorted(number for one in ranks for number in one["validated"]) == list(range(24))


def test_shares_of_the_balanced_engine(said: Said) -> None:
    sizes = [[len(numbers) for _, batch, numbers in one["trained"] if batch < 4] for one in said["balanced"]]
    assert sizes == [[share] * 8 for share in (2, 4, 5, 5)]


def test_memory_is_shared_inside_the_servers_node_only(said: Said) -> None:
    for rank, (_, node) in PLACES.items():
        assert said["stale"][rank]["files"] == ([] if node else ["the server's memory"])
