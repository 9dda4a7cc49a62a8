"""``python -m benchmarks.pipeline [--quick] [--repeats N]``: the pipeline engine's claims, measured.

Three parts, in emulated devices on emulated links (scenarios: ``clusters/*.yaml``):

- *plans*: the best even pipelines of 1, 2 and 4 groups and our plan, run by the same walker; what the model says of
  each; `torch.distributed.pipelining` where an even chain over free links can stand beside it; and the bound.
- *Lightning*: our strategy, stock DDP and the balanced engine; memory held by each rank.
- *overhead*: our walker against `torch.distributed.pipelining` where that is at its best.

Ratios are between runs of the same processes, one after the other, medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipeline.figures import case_figures, overhead_figures, tables, trained_figures
from benchmarks.pipeline.scenarios import Case, cases
from benchmarks.report import write_results

NOTES = (
    "Emulated devices sleep for the time of their layers, real work included, so that eight of them run"
    " truthfully on two cores; one rule for all engines, see docs/reference/emulation.md. Messages arrive as late as"
    " over the emulated links. Real are: layers, gradients, optimizers, gloo, schedules, suspended training steps."
    " Synchronisation of gradients over the emulated links is charged by the ring formula, behind the last backward"
    " pass, less what the engine hides: stock DDP and the balanced engine reduce their first bucket of 1 MiB beside the"
    " backward pass; ours, with buckets of 25 MiB, nothing of these models (`benchmarks/pipeline/exchange.py`). A"
    " micro-batch costs `fixed_s` besides its samples, so small ones are not free. *Even*: consecutive ranks, equal"
    " shares, the better of borders by layers and by parameters, of textbook 1F1B and our schedule, and"
    " the best micro-batch, all by the model. *modelled*: makespan of the generated schedules and the"
    " synchronisation. In *ours* a stage is rank:layers. *torch*: `torch.distributed.pipelining`, which"
    " sleeps inside its stages and has no emulated links. Python's garbage is collected before every run, of every"
    " engine: a full collection, due some time after all imports, takes hundreds of milliseconds.\n\n"
)


def launch(world_size: int, repeats: int, steps: int, trained_steps: int, part: str) -> dict[str, Any]:
    """Runs one group of ranks under torchrun, for the part "quick", "full" or "overhead"; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", "benchmarks.pipeline.worker", str(world_size), str(repeats), str(steps)]
        command += [str(trained_steps), part, str(path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(path.read_text())


def report(folder: Path, every: Sequence[Case], raw: dict[str, dict[str, Any]]) -> None:
    """Writes figures and tables of all cases."""
    figures = [f for case in every for f in case_figures(case, raw["walked"][case.title])]
    figures += [f for case in every if case.trained for f in trained_figures(case, raw["trained"][case.title])]
    figures += overhead_figures(raw["overhead"])
    loads = ", ".join(f"{load:.1f} ({ranks})" for ranks, load in raw["load_before"].items())
    notes = f"{NOTES}The machine's load average before: {loads}; others at work spoil the figures.\n\n{tables(raw)}"
    title = "Pipeline engine (joint data and model parallelism)"
    write_results(folder, title=title, figures=figures, raw=raw, notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two scenarios, shortened, one repeat; under a minute")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each plan and engine")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--trained-steps", type=int, default=20, help="measured steps of a run under Lightning")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats, steps, trained = (1, 2, 4) if args.quick else (args.repeats, args.steps, args.trained_steps)
    every = cases(args.quick)
    raw: dict[str, dict[str, Any]] = {"walked": {}, "trained": {}, "overhead": {}, "load_before": {}}
    for world_size in sorted({case.world_size for case in every}):
        raw["load_before"][f"{world_size} ranks"] = os.getloadavg()[0]
        for part, found in launch(world_size, repeats, steps, trained, "quick" if args.quick else "full").items():
            raw[part] |= found
    report(args.out, every, raw)


if __name__ == "__main__":
    main()
