"""``python -m benchmarks.planning [--quick] [--part NAME]``: the pipeline planner and its schedules, on models.

Four parts, one report; no process, no network, no torch:

- *partition*: the split of a fixed order of devices, against brute force, and its time;
- *placement*: order, groups, shares and synchronisation, against brute force over everything, and its time;
- *schedule*: generated schedules over the planner's model, by depth, order and links;
- *planned*: makespans of plans over the times they were planned with.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.planning import partition, placement, planned, schedule
from benchmarks.report import write_results

HERE = Path(__file__).parent
PARTS: Mapping[str, ModuleType] = {
    "partition": partition,
    "placement": placement,
    "schedule": schedule,
    "planned": planned,
}


def report(raw: Mapping[str, dict[str, list[float]]]) -> tuple[list[dict[str, Any]], dict[str, list[float]], str]:
    """Returns all parts' figures, their rounded raw values, and the notes."""
    figures = [
        {**figure, "name": f"{part}: {figure['name']}"}
        for part, values in raw.items()
        for figure in PARTS[part].figures(values)
    ]
    rounded = {
        f"{part}: {case}": [float(f"{value:.5g}") for value in values]
        for part, cases in raw.items()
        for case, values in cases.items()
    }
    notes = [f"**{part}.** {PARTS[part].NOTES}" for part in raw]
    if "schedule" in raw:
        notes.append(schedule.table(raw["schedule"]))
    return figures, rounded, "\n\n".join(notes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, under a minute; see --out")
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="folder for results.json, results.md; else this one, .cache if quick")
    args = parser.parse_args()
    raw = {name: part.measure(args.quick) for name, part in PARTS.items() if name in (args.part or PARTS)}
    figures, rounded, notes = report(raw)
    whole = not args.quick and args.part is None  # nothing less replaces the results that are kept
    out = args.out or (HERE if whole else HERE / ".cache" / HERE.name)
    write_results(out, title="Planning: plans, their times, their schedules", figures=figures, raw=rounded, notes=notes)


if __name__ == "__main__":
    main()
