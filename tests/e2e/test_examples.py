"""Every example runs as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(200)


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example in the current (empty) directory."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "MASTER_"))}
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK"):
        environ.pop(name, None)
    # From a checkout that is not installed the Hydra plugin has to be on the path, too.
    paths = [ROOT, ROOT / "lightning_hetero/_hydra", *filter(None, [os.environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)


def run(*arguments: str) -> str:
    """Returns what an example printed, which must end well."""
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_script_both_ways_reach_the_same() -> None:
    accuracies = []
    for arguments, name in (((), "DDPStrategy"), (("--hetero",), "LoadBalancedStrategy")):
        found = re.search(name + r": (\d+) steps in [\d.]+ s, val_acc ([\d.]+)", run("01_balanced.py", *arguments))
        assert found and int(found[1]) == 2 * 23
        accuracies.append(float(found[2]))
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.03)  # float32 and the order of summation


def test_a_lost_rank_ends_stock_ddp_and_not_the_parameter_server() -> None:
    done = start("04_stale.py")
    assert done.returncode != 0 and "DDPStrategy:" not in done.stdout
    done = start("04_stale.py", "--hetero")
    assert done.returncode == 0, done.stderr
    found = re.search(r"BoundedStalenessStrategy: (\d+) steps in [\d.]+ s, val_acc ([\d.]+)", done.stdout)
    assert found and int(found[1]) == 2 * 23 and float(found[2]) > 0.5
    assert "local rank 1 was killed by SIGKILL; the others go on without it" in done.stderr
    assert "rank 1 died; the others go on without, on 3 devices" in done.stderr


def test_a_hydra_app_of_somebody_else() -> None:
    assert "LoadBalancedStrategy: val_acc" in run("02_hydra_app/app.py", "strategy.predictor=ewma")


def test_lightning_cli() -> None:
    run(
        "03_lightning_cli.py",
        "fit",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.max_steps=4",
        "--trainer.limit_val_batches=0",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.strategy=lightning_hetero.LoadBalancedStrategy",
        "--trainer.strategy.global_batch_size=64",
    )
