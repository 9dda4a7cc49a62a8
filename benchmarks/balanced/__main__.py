"""``python -m benchmarks.balanced [--quick] [--repeats N]``: the balanced engine's claims, measured.

Figures, all of them ratios within one run:

- *ideal*: the global batch over the sum of the devices' speeds, fixed costs included, fractional samples allowed.
- *step*: median of the steady ones, from the tenth on and before a swap; their mean where slow spells come and go.
- *gross* = ideal / measured step. *net* takes off what a step of stock DDP costs beyond its own theory (framework,
  gradient exchange), because every engine pays that.
- *ideal on the cores*: the ideal, and the processor time that all ranks need in a step for what is no emulated work
  (Lightning, DDP, gloo, the optimizer), over the number of cores. It is needed when no rank computes, after the
  exchange, and more ranks than cores wait for a core then, which no division of samples can change.
- *time saved* = 1 - our step / DDP's step; *whole run*: of all steps, those included in which shares are not right yet.
- *steps to 5 %*: steps after the start or the swap until the shares in use are within 5 % of the ideal three times
  in a row, counted from the samples each rank really got.
- *simulated*: decisions of one rank, with the rows of 4, 64 and 1,000 ranks made up, and nothing sent.
- *3, 10, 30 ms steps*: what a step of stock DDP takes, all in all, on these ranks; the emulated work is fitted to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.balanced import many_ranks
from benchmarks.balanced.cases import equal_cases, unequal_cases
from benchmarks.balanced.figures import critical_path_figures, critical_path_table, equal_figures, summarize
from benchmarks.report import write_results
from benchmarks.torchrun import launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of short runs on 4 ranks, two minutes")
    parser.add_argument("--repeats", type=int, default=5, help="repeats per engine and case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    figures: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for world_size in (4,) if args.quick else (2, 4, 8):
        result = raw[f"{world_size} ranks"] = launch(
            "benchmarks.balanced.worker", world_size, repeats, "quick" if args.quick else "full"
        )
        for case in unequal_cases():
            if case.name in result["cases"]:
                chosen = case.quick() if args.quick else case
                figures += summarize(chosen, result["cases"][case.name], True, result["cores"])
        for equal in equal_cases():
            if equal.name in result["equal"]:
                figures += equal_figures(equal, result["equal"][equal.name])
        if "critical_path" in result:
            figures += critical_path_figures(result["critical_path"])
    raw["simulated"] = many_ranks.measure(30 if args.quick else 210)
    figures += many_ranks.figures(raw["simulated"])
    path = raw["4 ranks"]["critical_path"]
    notes = (
        "Compute is emulated by sleeping, real work included, in proportion to samples, so that more devices than cores"
        " run truthfully; everything else (Lightning, DDP, gloo, data loading) is real. The 1/8 device needs"
        " min_samples=1: the default keeps every rank above a quarter of the equal share. *Hidden*: the sums of DDP's"
        " gradients were not over when the engine had sent and evaluated; else all of that counts. Python's garbage is"
        " collected before every run, of every engine.\n\n"
        + critical_path_table(path)
    )
    write_results(args.out, title="Balanced engine (LB-BSP)", figures=figures, raw=raw, notes=notes)


if __name__ == "__main__":
    main()
