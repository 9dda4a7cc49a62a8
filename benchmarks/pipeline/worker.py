"""One rank of one case; writes what it measured as JSON on rank 0.

Whatever is compared runs in turns within one group of processes, so that a busy machine slows all of it alike: plans
by our walker, then, where the case says so, trainings under Lightning by stock DDP, the balanced engine and ours.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.kit.training import Clock, fit, gathered, gloo
from benchmarks.pipeline.devices import LinkedDevices
from benchmarks.pipeline.exchange import ddp_exposed_s
from benchmarks.pipeline.models import costs_of, dataset, make, parameters_of
from benchmarks.pipeline.plans import (
    OURS,
    STOCK,
    Entry,
    chain_entry,
    even_entries,
    fits_whole,
    our_entry,
    replica_sync_s,
)
from benchmarks.pipeline.scenarios import Case, cases
from benchmarks.pipeline.walk import Timed, Walk, run_stock, timed
from benchmarks.ranks import as_rank
from lightning_hetero import HeteroPipelineStrategy, LoadBalancedStrategy, Scenario
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.types import Cluster, GroupPlan, ModelCost, PipelinePlan

ENGINES = ("ddp", "balanced", "ours", "replicas")
"""``ours`` plans by itself; ``replicas`` is ours with a given plan, plain data parallelism."""
STEPS, TRAINED_STEPS, QUICK_STEPS = 3, 20, 4  # measured, of a run by the walker, under Lightning, of a quick run
BALANCED_WARM_UP, WARM_UP = 10, 3  # steps until the balanced engine's shares have settled; of the others
OVERHEADS = {  # name: samples, time of one, emulated or about what it really takes [s], steps
    "emulated, 4 equal stages": (64, 0.016, 4),
    "real work only, 4 equal stages": (2048, 1.3e-4, 12),
}
MICRO_BATCHES = 16


class Held(Callback):
    """Counts what this rank holds after the last step: parameters, gradients, optimizer state [bytes]."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        parameters = [p for p in pl_module.parameters() if not p.is_meta]
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                tensors += [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
        self.held_bytes = sum(t.numel() * t.element_size() for t in tensors)


def _shares(case: Case) -> tuple[int, ...]:
    """Samples in proportion to speed, at least one: what the balanced engine settles on."""
    return apportion([device.speed for device in case.cluster.devices], case.global_batch, lower=1)


def _replicas(case: Case) -> PipelinePlan:
    """Every device a whole model."""
    shares = _shares(case)
    layers = len(make(case.model).layers)
    return PipelinePlan(
        groups=tuple(
            GroupPlan(ranks=(rank,), cuts=(0, layers), samples=n, micro_batches=(n,), depths=(1,))
            for rank, n in enumerate(shares)
        )
    )


def _strategy(name: str, case: Case) -> Any:
    if name == "ddp":
        return gloo(DDPStrategy)
    if name == "balanced":
        return gloo(LoadBalancedStrategy, min_samples=1)
    return gloo(
        HeteroPipelineStrategy,
        backbone="layers",
        cluster=case.cluster,
        profile=costs_of(case.model, case.sample_s),  # the fixed time comes with the scenario
        plan=_replicas(case) if name == "replicas" else None,
        controller=None,  # plans as they are made; that they change is `benchmarks.joint`'s
        depth=case.depth,
        emulate_links=True,
    )


def exchange_s(name: str, case: Case, model: ModelCost, entry: Entry) -> tuple[float, ...]:
    """Returns how long each rank waits for gradients on the emulated links, behind its last backward pass [s].

    See `benchmarks.pipeline.exchange` for what each engine hides.
    """
    world = len(case.cluster.devices)
    if name == "ours":
        return entry.sync_s
    if name == "replicas":
        return (replica_sync_s(case, model),) * world
    shares = (case.global_batch // world,) * world if name == "ddp" else _shares(case)
    return (ddp_exposed_s(case, model, parameters_of(case.model), shares),) * world


def train(name: str, case: Case, model: ModelCost, entry: Entry, *, steps: int) -> dict[str, Any]:
    """Trains for some steps; returns this run's step times and what every rank held. Collective.

    Args:
        name: one of `ENGINES`.
        case: what is emulated.
        model: its costs.
        entry: our plan, which the strategy finds by itself; for its synchronisation.
        steps: of the optimizer.
    """
    speeds = tuple(device.speed for device in case.cluster.devices)
    scenario = Scenario(speeds=speeds, sample_s=case.sample_s, step_s=case.fixed_s)
    knows_links = name not in ("ddp", "balanced")
    exchange = {} if knows_links else {speeds: exchange_s(name, case, model, entry)[dist.get_rank()]}
    clock, held, devices = Clock(), Held(), LinkedDevices(scenario, exchange)
    data = DataLoader(dataset(case.model, case.global_batch * (steps + 1)), batch_size=case.global_batch // len(speeds))
    fit(_strategy(name, case), make(case.model), data, steps=steps, callbacks=[clock, held, devices])
    everyone = gathered({"steps_s": clock.steps_s(), "held": held.held_bytes, "taken": devices.taken()})
    return {
        "steps_s": [max(values) for values in zip(*(one["steps_s"] for one in everyone), strict=True)],
        "held_bytes": [one["held"] for one in everyone],
        "taken": max(one["taken"] for one in everyone),
    }


class Group:
    """This rank's part in all runs.

    Args:
        repeats: of everything that is measured.
        quick: short runs.
    """

    def __init__(self, repeats: int, quick: bool) -> None:
        self.repeats = repeats
        self.steps, self.trained_steps = (2, QUICK_STEPS) if quick else (STEPS, TRAINED_STEPS)
        wire = dist.new_group(backend="gloo")
        assert isinstance(wire, dist.ProcessGroup)
        self.wire = wire
        self._runs = 0

    def walk(
        self, case: Case, model: ModelCost, entry: Entry, steps: int, *, warm_up: int = 1, **options: Any
    ) -> Timed:
        """Returns what a plan's steps took."""
        gc.collect()  # as before every run of every engine
        self._runs += 1
        walk = Walk(case, model, entry, wire=self.wire, name=f"run {self._runs}", **options)
        found = timed(walk.step, steps, warm_up, leads=walk.leads)
        walk.close()
        return found

    def compare(self, case: Case) -> dict[str, Any]:
        """Runs the best even pipelines and ours in turns."""
        model = costs_of(case.model, case.sample_s, case.fixed_s)
        even, ours = even_entries(case, model), our_entry(case, model)
        entries = [*(entry for entry in even.values() if entry is not None), ours]
        runs: dict[str, list[list[float]]] = {entry.name: [] for entry in entries}
        chain = even.get(1)
        if case.stock_pipeline and chain is not None:
            runs[STOCK] = []
        for _ in range(self.repeats):
            for entry in entries:
                runs[entry.name].append(self.walk(case, model, entry, self.steps).steps_s)
            if STOCK in runs and chain is not None:
                (group,) = chain.groups
                micro = len(group.micro_batches)
                gc.collect()
                runs[STOCK].append(run_stock(case, model, group.cuts, micro, self.steps).steps_s)
        return {
            "steps_s": runs,
            "modelled_s": {entry.name: entry.modelled_s for entry in entries},
            "note": {entry.name: entry.note for entry in entries},
            "bound_s": ours.bound_s,
            "does_not_fit": [f"even, {n} groups" for n, entry in even.items() if entry is None],
        }

    def train(self, case: Case) -> dict[str, Any]:
        """Trains under Lightning, by all engines that the memory allows, in turns."""
        model = costs_of(case.model, case.sample_s, case.fixed_s)
        entry = our_entry(case, model)
        engines = ENGINES if fits_whole(case, model) else ("ours",)
        runs: dict[str, dict[str, list[Any]]] = {name: {e: [] for e in engines} for name in ("steps_s", "taken")}
        held: dict[str, list[int]] = {}
        for _ in range(self.repeats):
            for name in engines:
                warm_up = BALANCED_WARM_UP if name == "balanced" else WARM_UP
                found = train(name, case, model, entry, steps=warm_up + self.trained_steps)
                runs["steps_s"][name].append(found["steps_s"][warm_up:])
                runs["taken"][name].append(found["taken"])
                held[name] = found["held_bytes"]
        parts = (model.before, *model.layers, model.head)
        return {
            **runs,
            "modelled_s": entry.modelled_s,
            "exchange_s": {name: max(exchange_s(name, case, model, entry)) for name in engines},
            "held_bytes": held,
            "model_bytes": sum(part.state_bytes for part in parts),
            "mem_bytes": [device.mem_bytes for device in case.cluster.devices] if len(engines) == 1 else None,
        }

    def overhead(self, name: str) -> dict[str, Any]:
        """Runs one chain of equal stages by our walker and by `torch.distributed.pipelining`, no link emulated.

        Our schedule is planned with the links as the strategy's own probe finds them.
        """
        batch, sample_s, steps = OVERHEADS[name]
        links = probe_cluster(self.wire, torch.device("cpu")).links
        case = Case(
            name=name,
            model="equal",
            global_batch=batch,
            sample_s=sample_s,
            fixed_s=0.0,
            cluster=Cluster(devices=equal_cluster(dist.get_world_size()).devices, links=links),
        )
        model = costs_of(case.model, case.sample_s)
        entry = chain_entry(case, model, MICRO_BATCHES, OURS)
        emulated = name.startswith("emulated")
        runs: dict[str, list[Timed]] = {"ours": [], "torch": []}
        for _ in range(self.repeats + 2 if self.repeats > 1 else 1):
            ours = self.walk(case, model, entry, steps, warm_up=2, sleeps_inside=True, emulated=emulated)
            runs["ours"].append(ours)
            (group,) = entry.groups
            gc.collect()
            stock = run_stock(case, model, group.cuts, MICRO_BATCHES, steps, warm_up=2, emulated=emulated)
            runs["torch"].append(stock)
        return {
            "steps_s": {engine: [run.steps_s for run in each] for engine, each in runs.items()},
            "processor_s": {engine: [run.processor_s for run in each] for engine, each in runs.items()},
            "modelled_s": entry.modelled_s if emulated else None,
        }


def measure(name: str, repeats: int, quick: bool) -> dict[str, Any]:
    """Returns what was measured of a case, or of one of `OVERHEADS`."""
    group = Group(repeats, quick)
    if name in OVERHEADS:
        return group.overhead(name)
    case = next(case for case in cases(quick) if case.title == name)
    return {"walked": group.compare(case), "trained": group.train(case) if case.trained else None}


if __name__ == "__main__":
    _path, _name, _repeats, _extent = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(_name, int(_repeats), _extent == "quick"))
