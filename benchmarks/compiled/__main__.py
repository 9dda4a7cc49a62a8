"""``python -m benchmarks.compiled [--quick] [--repeats N] [--backend NAME]``: compiled modules.

Their parts of a batch change size: how often are they compiled again, and what does it cost?

Two ranks, one three times slower, speeds swapped in the middle, 10 % jitter, 120 steps; a global batch of 128 samples.
Compute is emulated by sleeping, real work included; compilations are real: traced, guarded, forward and backward. What
is compiled how often does not depend on the backend; the default one generates no code, and ``inductor`` (run without
its caches) takes several seconds per compilation instead of one.

- *graphs*: compiled on a rank, the greater number of the two; after eight (`recompile_limit`) torch runs a function
  as it is, so more is not seen.
- *sizes*: different numbers of samples that a rank has trained on, likewise.
- *steps with a compilation*: of the 120, on either rank; *time in them*: of the whole run.
- *step*: median of the others, from the twentieth behind the start and behind the swap on.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.compiled.worker import CASES, STEPS, SWAP_AT
from benchmarks.report import write_results
from benchmarks.torchrun import launch

SETTLED = 20  # steps


def figures_of(name: str, runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Turns one case's runs into figures: medians over the repeats."""
    found: dict[str, list[float]] = {}
    for ranks in runs:
        lost = [any(rank["compiled"][i] for rank in ranks) for i in range(STEPS)]
        steps_s = [max(rank["steps_s"][i] for rank in ranks) for i in range(STEPS)]
        settled = [i for i in range(STEPS) if i % SWAP_AT >= SETTLED and not lost[i]]
        values = {
            "graphs": max(rank["graphs"] for rank in ranks),
            "sizes": max(len(set(rank["samples"])) for rank in ranks),
            "steps with a compilation": sum(lost),
            "time in steps with a compilation": sum(s for s, one in zip(steps_s, lost, strict=True) if one),
            "step": 1e3 * statistics.median(steps_s[i] for i in settled),
            "whole run": sum(steps_s),
        }
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    units = {"time in steps with a compilation": "s", "step": "ms", "whole run": "s"}
    return [
        {"name": f"{name}: {key}", "value": statistics.median(values), "unit": units.get(key, ""), "goal": None,
         "holds": None}
        for key, values in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, under a minute")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--repeats", type=int, default=1, help="runs per case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    cases = CASES[:2] if args.quick else CASES
    uncached = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    raw = launch("benchmarks.compiled.worker", 2, args.backend, args.repeats, len(cases), environment=uncached)
    figures = [figure for case in cases for figure in figures_of(case.name, raw[case.name])]
    notes = (
        "`quantum='auto'` is 1 with `dynamic=None` and 8 with `dynamic=False` here. A function with eight graphs is no"
        " longer compiled for further sizes, in a real job to its loss."
    )
    write_results(args.out, title="Compiled modules under the balanced engine", figures=figures, raw=raw, notes=notes)


if __name__ == "__main__":
    main()
