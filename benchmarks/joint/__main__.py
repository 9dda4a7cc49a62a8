"""``python -m benchmarks.joint [--quick] [--part NAME]``: the online controller, in simulation and at work.

Four parts, one report; the first three without a process, a network or torch:

- *compared*: scenarios, each with plans that stay, shares alone, the controller and an oracle;
- *budget*: V over four decades, with and without a bank, and what theory allows; pictures in ``docs/pictures``;
- *speed*: how long decisions take, 4 to 256 devices;
- *real*: four processes under Lightning on emulated devices that change, at batches and at times; a good quarter of an
  hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.joint import budget, compared, speed
from benchmarks.joint.drawn import budget_pictures
from benchmarks.joint.real import part as real
from benchmarks.report import write_results

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
PARTS: Mapping[str, ModuleType] = {"compared": compared, "budget": budget, "speed": speed, "real": real}


def report(raw: Mapping[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Returns all parts' figures, their rounded raw values, and the notes."""
    figures = [
        {**figure, "name": f"{part}: {figure['name']}"}
        for part, found in raw.items()
        for figure in PARTS[part].figures(found)
    ]
    rounded = {
        f"{part}: {case}": {name: _rounded(values) for name, values in columns.items()}
        for part, cases in raw.items()
        if part != "speed"
        for case, columns in cases.items()
    }
    notes = [f"**{part}.** {PARTS[part].NOTES}" for part in raw]
    notes += [tabled.table(raw[part]) for part, tabled in (("compared", compared), ("real", real)) if part in raw]
    return figures, rounded, "\n\n".join(notes)


def _rounded(value: Any) -> Any:
    """Returns JSON values whose numbers have five digits."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases; see --out")
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--out", type=Path, help="folder for results.json, results.md; else this one, .cache if quick"
    )
    args = parser.parse_args()
    raw = {name: part.measure(args.quick) for name, part in PARTS.items() if name in (args.part or PARTS)}
    figures, rounded, notes = report(raw)
    whole = not args.quick and args.part is None  # nothing less replaces the results that are kept
    out = args.out or (HERE if whole else HERE / ".cache" / HERE.name)
    if "budget" in raw:
        folder = PICTURES if whole else out
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in budget_pictures(raw["budget"]).items():
            (folder / name).write_text(text, encoding="utf-8")
    write_results(out, title="The online controller, simulated and at work", figures=figures, raw=rounded, notes=notes)


if __name__ == "__main__":
    main()
