"""``python -m benchmarks.planning_real [--quick] [--repeats N]``: what the engines predict, against what steps take.

Nothing is emulated and nothing told: no ``profile=``, no ``cluster=``, no scenario. Each rank has one core, and all it
does is real work. Every repeat starts new processes, which measure devices, links and layers anew.

- *balanced*: time of the slowest rank's own work for the shares in force, said one step ahead;
- *stale*: time of a batch as the server would divide it, likewise;
- *pipeline*: modelled time of the plan it finds; *one chain*: with ``max_groups=1``, so that layers are divided.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.planning_real.figures import WARM_UP, figures, table
from benchmarks.report import write_results
from benchmarks.torchrun import launch

HERE = Path(__file__).parent
CASES = ("mlp, small", "mlp, large", "cnn, small", "cnn, large", "gpt, small", "gpt, large")
ENGINES = {  # by clock; by the processor's a server in another process, and waiting for it, is not seen
    "wall": ("ddp", "balanced", "stale", "pipeline", "pipeline, one chain"),
    "processor": ("balanced", "pipeline", "pipeline, one chain"),
}
NOTES = (
    "Each rank is bound to one core (the stale engine's server to that of rank 0), one thread each; SGD with"
    " momentum, synthetic data, gloo on one host. All ratios are predicted / measured: the median over the"
    " repeats, in brackets the least and the greatest. *step*: time of a step; the balanced engine predicts work"
    " only, exchange and framework come on top. *own work*: of the busiest rank, as the engine itself measures it."
    " *processor time*: the same in processes that read the processor time they have used wherever they ask for"
    " the time, so that other programs at work do not count. *to all processor time of a step*: which holds"
    " optimizer, Lightning and gloo besides, for which a plan has no costs. Programs at work beside the benchmark"
    " lengthen steps, but hardly the short runs of single layers that a pipeline is planned from: by the wall"
    " clock its ratios are then too low. One chain: the plan shown is the last repeat's."
)


def run(cores: Sequence[int], cases: Sequence[str], steps: int, clock: str) -> dict[str, Any]:
    """Runs a clock's engines on all cases once, a rank on each core, and returns what rank 0 wrote."""
    setting = {"cores": list(cores), "cases": list(cases), "steps": steps, "clock": clock, "engines": ENGINES[clock]}
    one_thread = {"OMP_NUM_THREADS": "1"}
    return launch("benchmarks.planning_real.rank", len(cores), json.dumps(setting), environment=one_thread)


def cores_for(ranks: int) -> list[int]:
    """Returns a core for each rank.

    Raises:
        SystemExit: there are fewer, or the system binds no process to a core.
    """
    if not hasattr(os, "sched_getaffinity"):
        sys.exit("this system binds no process to a core (os.sched_setaffinity): run it on Linux")
    cores = sorted(os.sched_getaffinity(0))
    if not 2 <= ranks <= len(cores):
        sys.exit(f"--ranks {ranks} must be 2 to {len(cores)}, the cores there are: each rank needs one to itself")
    return cores[:ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small models, one repeat, about a minute; see --out")
    parser.add_argument("--ranks", type=int, default=2, help="processes, at most as many as cores")
    parser.add_argument("--repeats", type=int, default=5, help="starts of everything")
    parser.add_argument("--steps", type=int, default=40, help=f"of each training, {WARM_UP} to warm up included")
    parser.add_argument("--out", type=Path, help="folder for results.json, results.md; else this one, .cache if quick")
    args = parser.parse_args()
    cores, cases = cores_for(args.ranks), CASES[::4] if args.quick else CASES
    raw: dict[str, list[dict[str, Any]]] = {clock: [] for clock in ENGINES}
    loads: list[float] = []
    for _ in range(1 if args.quick else args.repeats):
        loads.append(os.getloadavg()[0])
        for clock, runs in raw.items():
            runs.append(run(cores, cases, args.steps, clock))
    load = f"{len(cores)} ranks. Load average before each repeat: {', '.join(f'{load:.1f}' for load in loads)}."
    write_results(
        args.out or (HERE / ".cache" / HERE.name if args.quick else HERE),
        title="Predicted against measured steps, real work",
        figures=figures(raw),
        raw={**raw, "load_before": loads},
        notes=f"{NOTES}\n\n{load}\n\n{table(raw)}",
    )


if __name__ == "__main__":
    main()
