"""Ray Train: `devices="auto"`, checkpoints through Ray's callback, a lost worker, and another number of workers."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import run

import pytest
import torch
from torch import nn

from tests.e2e.programs import environ

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def expected() -> list[list[float]]:
    """By hand, in one process, over the batches of `DistributedSampler`'s order."""
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for batch in torch.randperm(100, generator=torch.Generator().manual_seed(epoch)).split(8):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[batch]), x[batch].sum(1, keepdim=True)).backward()
            optimizer.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray_trains_and_resumes_exactly(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ray_script.py")
    env = environ(RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300")
    done = run([sys.executable, str(script), "4"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("killed", "others")}
    assert (tmp_path / "died").exists() and found["killed"]["resumed"]
    for one in found.values():
        assert one["steps"] == 26
        for got, wanted in zip(one["weights"], expected(), strict=True):
            assert got == pytest.approx(wanted, rel=1e-12, abs=1e-12)
