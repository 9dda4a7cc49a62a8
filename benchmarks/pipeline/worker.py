"""One rank of one benchmark group; started by torchrun, writes what it measured as JSON on rank 0.

Whatever is compared runs in turns within one group of processes, so that a busy machine slows all of it alike.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline import training
from benchmarks.pipeline.models import costs_of
from benchmarks.pipeline.plans import OURS, STOCK, Entry, chain_entry, even_entries, fits_whole, our_entry
from benchmarks.pipeline.scenarios import Case, cases
from benchmarks.pipeline.stalls import Collections, Sleeper
from benchmarks.pipeline.walk import Timed, Walk, run_stock, timed
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.types import Cluster, ModelCost

BALANCED_WARM_UP, WARM_UP = 10, 3  # steps until the balanced engine's shares have settled; of the others
OVERHEADS = {  # name: samples, time of one, emulated or about what it really takes [s], steps
    "emulated, 4 equal stages": (64, 0.016, 4),
    "real work only, 4 equal stages": (2048, 1.3e-4, 12),
}
MICRO_BATCHES = 16
PER_STEP, PER_RUN = ("steps_s", "gc_s", "late_s"), ("steps_s", "gc_s", "late_s", "taken")


class Group:
    """This rank's part in all runs.

    Args:
        repeats, steps: of everything that is measured.
        trained_steps: of a run under Lightning: more, since rare stalls are looked for.
        collections, sleeper: see `benchmarks.pipeline.stalls`.
    """

    def __init__(
        self, repeats: int, steps: int, trained_steps: int, collections: Collections, sleeper: Sleeper
    ) -> None:
        self.repeats, self.steps, self.trained_steps = repeats, steps, trained_steps
        self.collections, self.sleeper = collections, sleeper
        wire = dist.new_group(backend="gloo")
        assert isinstance(wire, dist.ProcessGroup)
        self.wire = wire
        self.rank = dist.get_rank()
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
        engines = training.ENGINES if fits_whole(case, model) else ("ours",)
        runs: dict[str, dict[str, list[Any]]] = {name: {engine: [] for engine in engines} for name in PER_RUN}
        held: dict[str, list[int]] = {}
        plans: dict[str, str | None] = {}
        for _ in range(self.repeats):
            for engine in engines:
                warm_up = BALANCED_WARM_UP if engine == "balanced" else WARM_UP
                gc.collect()
                found = training.train(
                    engine,
                    case,
                    model,
                    entry,
                    steps=warm_up + self.trained_steps,
                    collections=self.collections,
                    sleeper=self.sleeper,
                )
                for name in PER_STEP:
                    runs[name][engine].append(found[name][warm_up:])
                runs["taken"][engine].append(found["taken"])
                held[engine], plans[engine] = found["held_bytes"], found["plan"]
        parts = (model.before, *model.layers, model.head)
        return {
            **runs,
            "modelled_s": entry.modelled_s,
            "exchange_s": {engine: max(training.exchange_s(engine, case, model, entry)) for engine in engines},
            "held_bytes": held,
            "plan": plans,
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


def main() -> None:
    world_size, repeats, steps, trained_steps = (int(word) for word in sys.argv[1:5])
    part, path = sys.argv[5], Path(sys.argv[6])
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # Lightning keeps an existing group
    sleeper = Sleeper(path.with_suffix(".late"))
    with Collections() as collections, sleeper if dist.get_rank() == 0 else nullcontext():
        group = Group(repeats, steps, trained_steps, collections, sleeper)
        every = () if part == "overhead" else cases(part == "quick")
        mine = [case for case in every if case.world_size == world_size]
        result: dict[str, Any] = {
            "walked": {case.title: group.compare(case) for case in mine},
            "trained": {case.title: group.train(case) for case in mine if case.trained},
            "overhead": {},
        }
        if world_size == 4:
            result["overhead"] = {name: group.overhead(name) for name in OVERHEADS}
    if group.rank == 0:
        path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
