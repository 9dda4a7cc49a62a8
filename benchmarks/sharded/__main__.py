"""``python -m benchmarks.sharded [--quick] [--repeats N]``: balanced batches over a sharded model, measured.

- *stock*: Lightning's `ModelParallelStrategy`, equal parts. *Static*: the same with the constant parts that are best in
  hindsight, found by brute force, and the loss weighted by hand. *Pipeline engine*: on the same model, not sharded.
- *ideal*: the step in which all ranks end their emulated work together, within their memory; in fractions of samples.
- *step*: median of the steady ones, from the tenth on after the start and after a swap. *Whole run*: of all steps.
- *gross* = ideal / measured step. *net* takes off what a step of stock costs beyond emulated work (framework, gathering
  and scattering over gloo, the slow link), because every engine pays that.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report import write_results
from benchmarks.sharded.cases import cases
from benchmarks.sharded.figures import memory_figures, summarize
from benchmarks.torchrun import launch

NOTES = (
    "Four processes share two cores. Compute is emulated by sleeping, real work included, in proportion to samples; not"
    " what FSDP waits for peers. The slow link makes each gathering and scattering of a block longer by 2 ms on every"
    " rank. With two memory sizes rank 0 holds at most 40 samples at once, which the engine finds out by running out of"
    " memory; the static parts know it beforehand."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of short runs, about a minute")
    parser.add_argument("--repeats", type=int, default=3, help="repeats per engine and case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    raw: dict[str, Any] = launch("benchmarks.sharded.worker", 4, repeats, "quick" if args.quick else "full")
    figures = [one for case in cases() for one in summarize(case.quick() if args.quick else case, raw[case.name])]
    held: dict[str, list[list[int]]] = {"stock": [], "ours": []}
    for _ in range(repeats):
        for engine, peaks in held.items():
            peaks.append(launch("benchmarks.sharded.memory", 2, engine)["bytes"])
    raw["memory"] = held
    write_results(
        args.out, title="Balanced batches over a sharded model", figures=figures + memory_figures(held), raw=raw,
        notes=NOTES,
    )  # fmt: skip


if __name__ == "__main__":
    main()
