"""torchrun starts a job again whose rank was killed: it resumes, and ends with the weights of a run without a death."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from tests.e2e.programs import environ, left_in, warm_torchrun

pytestmark = [pytest.mark.timeout(200), pytest.mark.long]

# In the store that torchrun shares by default, gloo finds the addresses of the attempt before; stock DDP's, too.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ENGINES = ("balanced", "stale", "pipeline", "federated")
SCRIPT = Path(__file__).with_name("restart_script.py")


def expected(engine: str) -> list[list[float]]:
    """By hand, in one process, over the batches of `DistributedSampler`'s order; of every rank's own loader else."""
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(epoch)).split(8)
        for batch in torch.arange(100).split(4) if engine == "federated" else shuffled:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[batch]), y[batch]).backward()
            optimizer.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one job leaves, in which each engine loses a rank once."""
    folder = tmp_path_factory.mktemp("restarts")
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={len(ENGINES)}", "--monitor-interval=0.1"]
    command = [warm_torchrun(folder), *options, str(SCRIPT), *ENGINES]
    done = warm.run(command, folder, environ(**OWN_STORE), 150.0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert left_in(folder, grace_s=5.0) == []
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_that_torchrun_starts_again_resumes_exactly(engine: str, folder: Path) -> None:
    assert (folder / f"{engine}-died").exists()
    right = expected(engine)
    for rank in range(2):
        one = json.loads((folder / f"{engine}-rank{rank}.json").read_text())
        assert one["steps"] == (50 if engine == "federated" else 26)
        for got, wanted in zip(one["weights"], right, strict=True):
            assert got == pytest.approx(wanted, rel=1e-12, abs=1e-12)
