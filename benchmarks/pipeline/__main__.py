"""``python -m benchmarks.pipeline [--quick] [--repeats N] [--only WORDS]``: the pipeline engine's claims, measured.

Three parts, in emulated devices on emulated links (scenarios: ``clusters/*.yaml``):

- *plans*: the best even pipelines of 1, 2 and 4 groups and our plan, run by the same walker; what the model says of
  each; `torch.distributed.pipelining` where an even chain over free links can stand beside it; and the bound.
- *Lightning*: our strategy, stock DDP and the balanced engine; memory held by each rank.
- *overhead*: our walker against `torch.distributed.pipelining` where that is at its best.

Ratios are between runs of the same processes, one after the other, medians over the repeats.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.kit.figures import Figure
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.pipeline.figures import case_figures, overhead_figures, tables, trained_figures
from benchmarks.pipeline.scenarios import cases
from benchmarks.ranks import launch

WORKER = "benchmarks.pipeline.worker"
OVERHEADS = ("emulated, 4 equal stages", "real work only, 4 equal stages")
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
    " engine."
)


def measured(quick: bool, repeats: int) -> Cases:
    """Returns what measures each case."""
    extent = "quick" if quick else "full"
    found: dict[str, Any] = {
        case.title: partial(launch, WORKER, case.world_size, case.title, repeats, extent) for case in cases(quick)
    }
    return found | {name: partial(launch, WORKER, 4, name, repeats, extent) for name in OVERHEADS[: 0 if quick else 2]}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    every = [case for case in cases(quick) if case.title in found]
    raw: Raw = {
        "walked": {case.title: found[case.title]["walked"] for case in every},
        "trained": {case.title: found[case.title]["trained"] for case in every if case.trained},
        "overhead": {name: found[name] for name in OVERHEADS if name in found},
    }
    figures = [f for case in every for f in case_figures(case, raw["walked"][case.title])]
    figures += [f for case in every if case.trained for f in trained_figures(case, raw["trained"][case.title])]
    return figures + overhead_figures(raw["overhead"]), raw, f"{NOTES}\n\n{tables(raw)}"


BENCHMARK = Benchmark(
    name="pipeline", title="Pipeline engine (joint data and model parallelism)", repeats=2, cases=measured,
    report=report,
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
