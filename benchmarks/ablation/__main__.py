"""``python -m benchmarks.ablation [--quick] [--part NAME]``: which predictor and policy are the default, and why.

- *simulated*: every predictor and policy in a closed loop with generated and recorded series, without a process;
- *real*: the best three and stock DDP under Lightning on emulated devices, 4 and 2 ranks;
- *contention*: two pinned ranks with real work beside busy loops on one of the cores; nothing is emulated.

``both`` is all of them. Only results of all parts at full length are kept; the picture in docs/pictures is drawn anew
from these. ``--quick``: two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.ablation import contention, real, simulated
from benchmarks.ablation.candidates import available, default_name
from benchmarks.ablation.picture import PICTURE, drawn
from benchmarks.report import write_results

HERE = Path(__file__).parent
PARTS = ("simulated", "real", "contention")


def measure(parts: tuple[str, ...], quick: bool, repeats: int | None) -> dict[str, Any]:
    """Returns what the parts have measured, by name."""
    raw: dict[str, Any] = {}
    if "simulated" in parts or "real" in parts:
        loops = simulated.measure(quick or "simulated" not in parts)
        if "simulated" in parts:
            raw["simulated"] = loops
        if "real" in parts:
            raw["real"] = real.measure(quick, simulated.best(loops), repeats)
    if "contention" in parts:
        known = {candidate.name for candidate in available()[0]}
        names = [name for name in dict.fromkeys((default_name(), "narx")) if name in known]
        raw["contention"] = contention.measure(quick, names, repeats)
    return raw


def report(raw: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Returns all parts' figures and the notes with the tables."""
    figures: list[dict[str, Any]] = []
    notes = [f"The default is `{default_name()}`."]
    if "simulated" in raw:
        figures += _named("simulated", simulated.figures(raw["simulated"]))
        notes += [f"**simulated.** {simulated.NOTES}", simulated.table(raw["simulated"])]
    for name, part in (("real", real), ("contention", contention)):
        if name in raw:
            figures += _named(name, part.figures(raw[name], default_name()))
            notes += [f"**{name}.** {part.NOTES}", part.table(raw[name])]
    return figures, "\n\n".join(notes)


def _named(part: str, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**figure, "name": f"{part}, {figure['name']}"} for figure in figures]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and short runs; see --out")
    parser.add_argument("--part", choices=(*PARTS, "both"), default="both", help="only this one")
    parser.add_argument("--repeats", type=int, help="turns of each engine in real runs; else as is due to each kind")
    parser.add_argument("--out", type=Path, help="folder of the results; else this one, .cache/ablation if not whole")
    args = parser.parse_args()
    whole = not args.quick and args.part == "both"  # nothing less replaces the results that are kept
    raw = measure(PARTS if args.part == "both" else (args.part,), args.quick, args.repeats)
    figures, notes = report(raw)
    out = args.out or (HERE if whole else HERE / ".cache" / HERE.name)
    write_results(out, title="Which predictor and policy the balanced engine has by default", figures=figures, raw=raw,
                  notes=notes)  # fmt: skip
    if "simulated" in raw:
        (PICTURE if whole else out / PICTURE.name).write_text(drawn(raw["simulated"]), encoding="utf-8")


if __name__ == "__main__":
    main()
