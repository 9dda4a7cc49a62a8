"""What ``lightning-hetero-doctor`` finds out about this machine, its ranks and a module (layer A).

Gradients of every engine on two processes compared with those of one, in float64.

Ten steps of plain SGD on one and the same global batch: what the parameters have moved by is the mean gradient. The
single process runs twice, with other random numbers: a step that draws any cannot be compared. Dropout is off, and
BatchNorm uses its running statistics, since those of a batch depend on who holds it, under any data parallelism. The
stale engine runs with a barrier (``policy="bsp"``), the balanced one with shares of 5 and 3.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from packaging.requirements import Requirement
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.cli.loading import before_first_batch, load_data, load_module, profile_module, quiet_trainer
from lightning_hetero.cli.plan import to_paste
from lightning_hetero.cli.ranks import as_rank, on_ranks, probe_machine
from lightning_hetero.doctor.facts import DeviceFacts, Facts, GpuFacts, HostFacts, ModuleFacts, Package, Parity
from lightning_hetero.measure.device import accelerators, device_of, wheel_architectures
from lightning_hetero.pipeline.fit.planning import tied_spans
from lightning_hetero.pipeline.runtime.step.undivided import Undivided, find_layers
from lightning_hetero.plan.planner import LEFT_OUT, plan
from lightning_hetero.plan.setup import Setup

ENGINES = ("ddp", "balanced", "stale", "pipeline")
ALONE = "one process"
BATCH, SHARES, STEPS, LR = 8, [5, 3], 10, 1e-2
_AT_A_TIME = 2  # engines


def compare_gradients(
    module: str, data: str | None, *, backbone: str | None = None, engines: Sequence[str] = ENGINES
) -> tuple[Parity, ...]:
    """Trains ten steps with each engine on two processes of this machine's CPU, and compares with one process.

    Args:
        module, data: import paths, see `lightning_hetero.cli.loading`.
        backbone: see `HeteroPipelineStrategy`.
        engines: of `ENGINES`.
    """
    with tempfile.TemporaryDirectory() as folder:
        setting: dict[str, Any] = {"module": module, "data": data, "backbone": backbone, "folder": folder}

        def compared(engine: str) -> Parity:
            try:
                ranks = 1 if engine == ALONE else 2
                error = on_ranks("lightning_hetero.cli.machine", ranks, {**setting, "engine": engine})
            except RuntimeError as failure:
                return Parity(engine=engine, error=math.nan, problem=_last_line(str(failure)))
            return Parity(engine=engine, error=math.nan if error is None else error)

        alone = compared(ALONE)
        if alone.problem:
            return (alone,)
        with ThreadPoolExecutor(max_workers=_AT_A_TIME) as threads:
            return (alone, *threads.map(compared, engines))


def _last_line(text: str) -> str:
    """Returns what a traceback ends with: the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [one for one in lines if ": " in one and one.split(": ")[0].endswith(("Error", "Exception"))]
    return (errors or lines)[-1] if lines else "it failed and said nothing"


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _measure(setting: dict[str, Any]) -> float | None:
    """Returns the largest difference from the single process, relative to its largest value; None: it is no number."""
    reference, engine = Path(setting["folder"]) / "reference.pt", setting["engine"]
    if engine == ALONE:
        module, data = load_module(setting["module"]), load_data(setting["data"])
        samples, collate = before_first_batch(module, data, _first_samples, **_options())
        alone, moved = (_moved(setting, engine, samples, collate, seed=seed) for seed in (0, 1))
        torch.save({"samples": samples, "collate": collate, "moved": alone}, reference)
    else:
        kept: dict[str, Any] = torch.load(reference, weights_only=False)  # written by this program
        alone, moved = kept["moved"], _moved(setting, engine, kept["samples"], kept["collate"])
    scale = alone.abs().max().item()
    error = (moved - alone).abs().max().item() / scale if scale > 0.0 else math.nan
    return None if math.isnan(error) else error


def _first_samples(trainer: Trainer, pl_module: LightningModule) -> tuple[list[Any], Any]:
    """Returns the first samples of the train dataset, and what collates them, as the user's hooks have set it up."""
    loader: Any = compat.train_source(trainer)
    if not isinstance(loader, DataLoader):
        raise TypeError(f"the train loader is a {type(loader).__name__}: give a torch DataLoader to compare with")
    data: Any = loader.dataset
    listed = iter(data) if isinstance(data, IterableDataset) else (data[i] for i in range(min(BATCH, len(data))))
    return (list(islice(listed, BATCH)) * BATCH)[:BATCH], loader.collate_fn


def _options() -> dict[str, Any]:
    return {"accelerator": "cpu", "devices": dist.get_world_size(), "max_epochs": STEPS, "limit_val_batches": 0}


def _moved(setting: dict[str, Any], engine: str, samples: list[Any], collate: Any, *, seed: int = 0) -> Tensor:
    """Trains on these samples, once per epoch; returns by how much the parameters have moved, as one vector."""
    seed_everything(0)
    module = _still(load_module(setting["module"]).double())
    before = _flat(module)
    if module.automatic_optimization:
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=LR)
    world = dist.get_world_size()
    dataset: Any = samples  # a list is one
    loader = DataLoader(dataset, batch_size=BATCH // world, collate_fn=collate)
    strategy: Any = "auto" if engine == ALONE else _strategy(engine, module, setting["backbone"])
    trainer = quiet_trainer(precision="64-true", strategy=strategy, **_options())
    torch.manual_seed(seed)
    trainer.fit(module, train_dataloaders=loader)
    return (before - _flat(module)) / (STEPS * LR)


def _still(module: LightningModule) -> LightningModule:
    """Returns the module without what makes gradients depend on who computes them."""
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        if isinstance(part, _BatchNorm):
            part.eval()
            stays: Any = part
            stays.train = lambda mode=True: None  # whatever it is told
    return module


def _flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(p.detach().double().cpu() for p in module.parameters())


def _strategy(engine: str, module: LightningModule, backbone: Any) -> Any:
    gloo: dict[str, Any] = {"process_group_backend": "gloo"}
    if engine == "ddp":
        return DDPStrategy(**gloo, find_unused_parameters=True)
    gloo["monitor"] = False
    if engine == "balanced":
        return LoadBalancedStrategy(**gloo, min_samples=SHARES, max_samples=SHARES)
    if engine == "stale":
        return BoundedStalenessStrategy(**gloo, policy="bsp")
    plan = _chain(module, backbone)
    devices = {"devices": [{"count": 2}]}
    return HeteroPipelineStrategy(**gloo, backbone=backbone, plan=plan, cluster=devices, controller=None)


def _chain(module: LightningModule, backbone: Any) -> dict[str, Any] | None:
    """Returns a plan of two stages, cut near the middle, where no layers are tied; None: the engine is to plan itself.

    Micro-batches have 3, 3 and 2 samples.
    """
    layers = find_layers(module, backbone)
    count = len(layers.layers)
    if isinstance(layers, Undivided):
        return None
    tied = tied_spans(module, layers)
    free = [cut for cut in range(1, count) if not any(first < cut <= last for first, last in tied)]
    if not free:
        return None
    cut = min(free, key=lambda at: abs(2 * at - count))
    return {"groups": [{"ranks": [0, 1], "cuts": [0, cut, count], "samples": BATCH, "micro_samples": 3}]}


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


if __name__ == "__main__":
    as_rank(_measure)
