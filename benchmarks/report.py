"""Writes what a benchmark measured: results.json for machines, results.md for readers, a table on screen."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["write_results"]

FIELDS = ("name", "value", "unit", "goal", "holds")
PACKAGES = ("lightning-hetero", "lightning", "torch", "numpy", "scipy")


def write_results(
    folder: Path, *, title: str, figures: list[dict[str, Any]], raw: dict[str, Any], notes: str = ""
) -> None:
    """Writes ``folder/results.json`` and ``folder/results.md`` and prints the latter.

    Machine, versions and command are collected here; host and user names and file paths are left out.

    Args:
        folder: the benchmark's own folder, ``benchmarks/<claim>``; it names the command.
        title: one line.
        figures: dicts with exactly the keys name, value, unit, goal (str or None), holds (bool or None).
        raw: all repeats, by name; plain JSON values.
        notes: what a reader must know to judge the figures, in Markdown.

    Raises:
        ValueError: a figure lacks a key or has one too many.
        TypeError: a value JSON does not know.
    """
    for figure in figures:
        if set(figure) != set(FIELDS):
            raise ValueError(
                f"figure {figure!r} has the keys {sorted(figure)}, need exactly {sorted(FIELDS)}"
            )
    report = {
        "title": title,
        "command": " ".join(["python", "-m", f"benchmarks.{folder.name}", *sys.argv[1:]]),
        "machine": {
            "platform": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cpu_count": os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
        "notes": notes,
        "raw": raw,
    }
    text = json.dumps(report, indent=1, default=_plain, allow_nan=False)
    table = _markdown(report)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    (folder / "results.md").write_text(table, encoding="utf-8")
    print(table)


def _processor() -> str:
    """Returns the model name of the processor, or the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _plain(value: Any) -> Any:
    """Turns NumPy numbers and arrays into JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"raw or figures hold {value!r} ({type(value).__name__}), which JSON does not know")


def _markdown(report: dict[str, Any]) -> str:
    rows = [[_cell(figure[field]) for field in FIELDS] for figure in report["figures"]]
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [
        f"# {report['title']}",
        f"`{report['command']}`",
        _table(rows),
        report["notes"],
        f"{machine['processor']}, {machine['cpu_count']} cores; {machine['platform']}; {versions}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [list(FIELDS), ["---"] * len(FIELDS), *rows]]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
