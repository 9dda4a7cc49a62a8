"""Which machine this is, what the doctor says of it, and what compute-sanitizer says of a few steps."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch
from torch.cuda import nccl

from tests.gpu.check.found import begin_with, detail, found, is_dry, skip

NEEDED = ("lightning", "torchmetrics", "greenlet", "hydra", "omegaconf", "psutil", "pytest", "numpy")
ASKED = (
    "name,driver_version,pci.bus_id,memory.total,memory.used,compute_cap,pstate,clocks.sm,clocks.mem,clocks.max.sm,"
    "power.limit,temperature.gpu,mig.mode.current,compute_mode,persistence_mode"
)


def _smi() -> list[list[str]]:
    """Returns what nvidia-smi says: names, then a row for each card."""
    names: list[str] = [*ASKED.split(",")]
    if is_dry() or not (smi := shutil.which("nvidia-smi")):
        return [names, ["", "simulated" if is_dry() else "no nvidia-smi"]]
    said = subprocess.run([smi, f"--query-gpu={ASKED}", "--format=csv"], capture_output=True, text=True, timeout=30)
    rows = [[cell.strip() for cell in line.split(",")] for line in said.stdout.strip().splitlines()]
    return rows if len(rows) > 1 else [names, ["", said.stderr.strip()[:100]]]


def machine() -> None:
    """Says what every line of the results begins with."""
    import lightning

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if torch.cuda.device_count() == 0:
        found(cards=0)
        raise SystemExit("torch sees no GPU here")
    version: Any = nccl.version() if torch.distributed.is_nccl_available() and not is_dry() else "simulated"
    smi = _smi()
    facts = {
        "device": torch.cuda.get_device_name(0),
        "driver": smi[1][1],
        "torch": torch.__version__,
        "nccl": ".".join(map(str, version)) if isinstance(version, tuple) else version,
    }
    begin_with(**facts)
    detail(nvidia_smi=smi)
    found(
        **facts,
        cards=torch.cuda.device_count(),
        lightning=lightning.__version__,
        python=platform.python_version(),
        capability=".".join(map(str, torch.cuda.get_device_capability(0))),
    )
    detail(architectures=torch.cuda.get_arch_list(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    detail(memory=[torch.cuda.mem_get_info(k) for k in range(torch.cuda.device_count())])
    if missing:
        raise SystemExit(f"missing here, carry their wheels: {', '.join(missing)}")


def doctor() -> None:
    """Runs the doctor as a user does."""
    command = [sys.executable, "-m", "lightning_hetero.cli.doctor", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"code {ended.returncode}: {ended.stderr.strip()[-300:]}")
    said = json.loads(ended.stdout)
    findings = said["findings"] if isinstance(said, dict) else said
    detail(findings=findings)
    levels = [finding["level"] for finding in findings]
    found(**{level: levels.count(level) for level in sorted(set(levels))})
    bad = [f"{finding.get('check', finding.get('name'))}: {finding['text']}" for finding in findings]
    detail(not_ok=[text for text, level in zip(bad, levels, strict=True) if level != "ok"])


STEPS = """
import sys
from tests.gpu.kit import fit_engine
from tests.gpu.ranks import run_card_ranks
if __name__ == "__main__":
    run_card_ranks(2, fit_engine, sys.argv[1], timeout_s=80.0)
"""


def sanitizer() -> None:
    """Looks for accesses out of bounds in a training of the pipeline and one of the stale engine."""
    if not (tool := shutil.which("compute-sanitizer")):
        skip("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    for name in ("stale", "pipeline 1x2"):
        with open("steps.py", "w") as file:
            file.write(STEPS)
        ended = subprocess.run([*command, sys.executable, "steps.py", name], capture_output=True, text=True)
        last = (ended.stdout + ended.stderr).strip().splitlines()[-1:]
        found(**{name: f"code {ended.returncode}"})
        detail(name=name, last=last)
        if ended.returncode:
            raise SystemExit(f"{name}: {last}")
