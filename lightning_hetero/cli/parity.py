"""Gradients of every engine on two processes compared with those of one, in float64 (layer A).

Ten steps of plain SGD on one and the same global batch: what the parameters have moved by is the mean gradient. The
single process runs twice, with other random numbers: a step that draws any cannot be compared. Dropout is off, and
BatchNorm uses its running statistics, since those of a batch depend on who holds it, under any data parallelism. The
stale engine runs with a barrier (``policy="bsp"``), the balanced one with shares of 5 and 3.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero import lightning_compat as compat
from lightning_hetero.cli.loading import before_first_batch, load_data, load_module, quiet_trainer
from lightning_hetero.cli.ranks import as_rank, on_ranks
from lightning_hetero.doctor.facts import Parity
from lightning_hetero.pipeline.fit.planning import tied_spans
from lightning_hetero.pipeline.runtime.step.undivided import Undivided, find_layers

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
                error = on_ranks("lightning_hetero.cli.parity", ranks, {**setting, "engine": engine})
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


if __name__ == "__main__":
    as_rank(_measure)
