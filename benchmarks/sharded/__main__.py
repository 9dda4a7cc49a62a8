"""``python -m benchmarks.sharded [--quick] [--repeats N] [--only WORDS]``: balanced batches, sharded model.

- *stock*: Lightning's `ModelParallelStrategy`, equal parts. *Static*: the same with the constant parts that are best in
  hindsight, found by brute force, and the loss weighted by hand. *Pipeline engine*: on the same model, not sharded.
- *ideal*: the step in which all ranks end their emulated work together, within their memory; in fractions of samples.
- *step*: median of the steady ones, from the tenth on after the start and after a swap. *Whole run*: of all steps.
- *gross* = ideal / measured step. *net* takes off what a step of stock costs beyond emulated work (framework, gathering
  and scattering over gloo, the slow link), because every engine pays that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.kit.figures import Figure
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.ranks import launch
from benchmarks.sharded.cases import cases
from benchmarks.sharded.figures import memory_figures, summarize

NOTES = (
    "Four processes share two cores. Compute is emulated by sleeping, real work included, in proportion to samples; not"
    " what FSDP waits for peers. The slow link makes each gathering and scattering of a block longer by 2 ms on every"
    " rank. With two memory sizes rank 0 holds at most 40 samples at once, which the engine finds out by running out of"
    " memory; the static parts know it beforehand."
)
MEMORY = "memory"
WORKER = "benchmarks.sharded.worker"


def _memory(repeats: int) -> dict[str, list[list[int]]]:
    """Returns each rank's peak by engine; a process has one."""
    engines = ("stock", "ours")
    return {name: [launch(WORKER, 2, name, 1, "full")["bytes"] for _ in range(repeats)] for name in engines}


def measured(quick: bool, repeats: int) -> Cases:
    """Returns what measures each case."""
    extent, chosen = "quick" if quick else "full", cases()[:1] if quick else cases()
    found: dict[str, Any] = {one.name: partial(launch, WORKER, 4, one.name, repeats, extent) for one in chosen}
    return found if quick else {**found, MEMORY: partial(_memory, repeats)}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    known = [case for case in cases() if case.name in found]
    figures = [one for case in known for one in summarize(case.quick() if quick else case, found[case.name])]
    return figures + (memory_figures(found[MEMORY]) if MEMORY in found else []), found, NOTES


BENCHMARK = Benchmark(
    name="sharded", title="Balanced batches over a sharded model", repeats=2, cases=measured, report=report
)

if __name__ == "__main__":
    BENCHMARK.main()
