"""What ``lightning-hetero-doctor`` finds out about this machine, its ranks and a module (layer A)."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from lightning_hetero._version import __version__
from lightning_hetero.cli.loading import load_data, load_module, profile_module
from lightning_hetero.cli.parity import compare_gradients
from lightning_hetero.cli.plan import to_paste
from lightning_hetero.cli.ranks import probe_machine
from lightning_hetero.doctor.facts import DeviceFacts, Facts, GpuFacts, HostFacts, ModuleFacts, Package
from lightning_hetero.measure.device import accelerators, device_of, wheel_architectures
from lightning_hetero.plan.planner import LEFT_OUT, plan
from lightning_hetero.plan.setup import Setup

_MEMORY = Path("/dev/shm")


def find_out(asked: argparse.Namespace) -> Facts:
    """Returns the facts, the probe's and the module's included as far as they were asked for."""
    environ = dict(os.environ)
    facts = Facts(
        host=_host(environ), gpus=_gpus() if asked.accelerator != "cpu" else GpuFacts(cuda=torch.version.cuda),
        environ=environ, devices_wanted=asked.devices, nodes_wanted=asked.num_nodes,
    )  # fmt: skip
    if asked.probe:
        try:
            cluster, backend = probe_machine(devices=asked.devices, accelerator=asked.accelerator)
            facts = replace(facts, cluster=cluster, links_by=backend)
        except (RuntimeError, ValueError) as error:
            facts = replace(facts, probe_problem=f"the probe failed: {error}")
    return facts if asked.module is None else replace(facts, module=_module(facts, asked))


def _module(facts: Facts, asked: argparse.Namespace) -> ModuleFacts:
    """Returns the module's gradients, and what the planner says of it on the probed devices."""
    found = ModuleFacts(parity=compare_gradients(asked.module, asked.data, backbone=asked.backbone))
    try:
        profile = profile_module(
            load_module(asked.module), load_data(asked.data), backbone=asked.backbone, accelerator=asked.accelerator
        )
    except Exception as error:  # the user's code may raise anything
        return replace(found, verdict=f"no engine can be recommended, for the module cannot be measured: {error}")
    if (cluster := facts.cluster) is None:
        return found
    batch = asked.global_batch or (profile.batch_size or 1) * len(cluster.devices)
    answer = plan(Setup(cluster=cluster, model=profile.model, global_batch=batch, spans=profile.spans))
    chosen = answer.chosen
    found = replace(found, verdict=f"{answer.verdict} (for {batch} samples per update). {LEFT_OUT}")
    if chosen is None or chosen.engine == "ddp" or answer.too_short:
        return found
    return replace(found, engine=chosen.engine, python=to_paste(chosen, vars(asked)) or "")


def _host(environ: Mapping[str, str]) -> HostFacts:
    address = environ.get("MASTER_ADDR")
    total, free = (float(n) for n in shutil.disk_usage(_MEMORY)[::2]) if _MEMORY.is_dir() else (None, None)
    return HostFacts(
        packages=tuple(_packages()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        shm_bytes=total, shm_free_bytes=free,
        backends=tuple(name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)),
        interfaces=tuple(name for _, name in socket.if_nameindex()) if hasattr(socket, "if_nameindex") else (),
        unresolved=None if address is None or _works(lambda: socket.getaddrinfo(address, None)) else address,
        taken_port=_taken_port(environ),
    )  # fmt: skip


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _packages() -> list[Package]:
    fits = sys.version_info >= (3, 10)
    found = {"python": Package(name="python", installed=platform.python_version(), wanted=">=3.10", fits=fits)}
    try:
        requirements = [Requirement(text) for text in metadata.requires("lightning-hetero") or ()]
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        requirements = []
    for one in requirements:
        if one.marker is None:  # else it is of an extra
            installed = next((d.version for d in metadata.distributions(name=one.name)), None)
            fits = installed is not None and one.specifier.contains(installed, prereleases=True)
            package = Package(name=one.name, installed=installed, wanted=str(one.specifier), fits=fits)
            found.setdefault(one.name, package)
    return [*found.values(), Package(name="lightning-hetero", installed=__version__, wanted="", fits=True)]


def _gpus() -> GpuFacts:
    """Returns the GPUs, or why no GPU was found.

    Torch is asked nothing that takes a card's memory, of which there may be none left: what is free nvidia-smi knows.
    """
    wheel = GpuFacts(cuda=torch.version.cuda, arch_list=wheel_architectures())
    try:
        seen = [device_of(device) for device in accelerators()]
        free = _free_bytes() if seen else {}
        found = [
            DeviceFacts(
                name=on.name(), capability=on.capability(), mem_bytes=on.total_bytes(),
                free_bytes=free.get(on.identity().removeprefix("GPU-")), computes_bfloat16=on.computes_bfloat16(),
            )
            for on in seen
        ]
    except RuntimeError as error:
        return replace(wheel, problem=str(error).strip().splitlines()[0])
    return replace(wheel, devices=tuple(found))


def _free_bytes() -> dict[str, float]:
    """Returns the free memory of NVIDIA's cards, by what tells them from others."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = (line.rpartition(",") for line in done.stdout.splitlines())
    return {
        uuid.strip().removeprefix("GPU-"): float(free) * 2.0**20 for uuid, _, free in rows if free.strip().isdigit()
    }


def _taken_port(environ: Mapping[str, str]) -> str | None:
    """Returns MASTER_PORT if it is not free, where ranks are still to be started and the first of them here."""
    port = environ.get("MASTER_PORT")
    if port is None or "RANK" in environ or environ.get("MASTER_ADDR", "localhost") not in ("localhost", "127.0.0.1"):
        return None
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return None if _works(lambda: trial.bind(("", int(port)))) else port
