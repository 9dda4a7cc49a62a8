"""Writes what a benchmark measured: results.json for machines, results.md for readers, a table on screen.

``python -m benchmarks.report [--check]`` writes every results.md again from its results.json, or says which ones are
not what it would write: the first line of results.md says so when the code has changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT, changed_files, provenance

FIELDS = ("name", "value", "unit", "goal", "holds")
PACKAGES = ("lightning-hetero", "lightning", "torch", "numpy", "scipy")
_FLAT_LIST = re.compile(r"\[\n[^][{}\"]*\]")  # of numbers, true, false, null
_STARTED_S = time.time()  # a benchmark imports this before it measures


def write_results(
    folder: Path, *, title: str, figures: list[dict[str, Any]], raw: dict[str, Any], notes: str = "",
    load: dict[str, float] | None = None,
) -> None:  # fmt: skip
    """Writes ``folder/results.json`` and ``folder/results.md`` and prints the latter.

    Machine, versions, command and code (see `provenance`) are collected here; host and user names are left out.

    Args:
        folder: the benchmark's own folder, ``benchmarks/<claim>``, or any other while it is run by ``python -m``.
        title: one line.
        figures: dicts with exactly the keys name, value, unit, goal (str or None), holds (bool or None).
        raw: all repeats, by name; plain JSON values.
        notes: what a reader must know to judge the figures, in Markdown.
        load: tasks of others at work, ``before`` and ``after``, see `benchmarks.kit.load`.

    Raises:
        ValueError: a figure lacks a key or has one too many.
        TypeError: a value JSON does not know.
    """
    for figure in figures:
        if set(figure) != set(FIELDS):
            raise ValueError(
                f"figure {figure!r} has the keys {sorted(figure)}, need exactly {sorted(FIELDS)}"
            )
    name = _running() or folder.name
    report = {
        "title": title,
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "code": provenance(name, since_s=_STARTED_S),
        "machine": {
            "platform": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cpu_count": os.cpu_count(),
        },
        "load": load,
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
        "notes": notes,
        "raw": raw,
    }
    text, table = text_of(report), page_of(report, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(text, encoding="utf-8")
    (folder / "results.md").write_text(table, encoding="utf-8")
    print(table)


def text_of(report: dict[str, Any]) -> str:
    """Returns results.json: a line per value, but one per list of plain values; raw numbers to six digits."""
    whole = {**report, "raw": _rounded(report["raw"])}
    text = json.dumps(whole, indent=1, default=_plain, allow_nan=False)
    return _FLAT_LIST.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def page_of(report: dict[str, Any], name: str, *, root: Path = ROOT) -> str:
    """Returns results.md.

    Args:
        report: what results.json holds.
        name: of the benchmark.
        root: of the checkout whose code is compared with the report's.
    """
    warning = _warning(report.get("code"), name, root)
    return (f"> **{warning}** Run the command below again.\n\n" if warning else "") + _markdown(report)


def _warning(code: dict[str, Any] | None, name: str, root: Path) -> str:
    """Says why the figures may not be those of the present code; empty: they are."""
    if code is None:
        return "It is not known which code was measured here."
    if code["edited_while_running"]:
        return "The code was edited while this was measured."
    if changed_files(name, code, root=root):
        return f"The code has changed since this was measured{_at(code)}."
    return ""


def _at(code: dict[str, Any]) -> str:
    if code["commit"] is None:
        return ""
    return f" (at {code['commit'][:12]}{' with uncommitted changes' if code['uncommitted'] else ''})"


def _running() -> str | None:
    """Returns the name of the benchmark that this process runs by ``python -m``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package, _, name = getattr(spec, "parent", "").partition(".")
    return name if package == "benchmarks" and name else None


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
    code, load = report.get("code"), report.get("load")
    parts = [
        f"# {report['title']}",
        f"`{report['command']}`",
        _table(rows),
        report["notes"],
        f"{machine['processor']}, {machine['cpu_count']} cores; {machine['platform']}; {versions}."
        + (f" Code: digest {code['digest']}{_at(code)}." if code else "")
        + (f" Other tasks at work: {load['before']:.1f} before, {load['after']:.1f} after." if load else ""),
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


def _reports() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the folder and the report of every benchmark that has one."""
    for path in sorted((ROOT / "benchmarks").glob("*/results.json")):
        yield path.parent, json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a results.md is not up to date")
    check = parser.parse_args().check
    behind: list[str] = []
    for folder, report in _reports():
        page, code = page_of(report, folder.name), report.get("code")
        path = folder / "results.md"
        print(f"{folder.name}: {_warning(code, folder.name, ROOT) or 'measured with the present code'}")
        for file in changed_files(folder.name, code) if code else ():
            print(f"    {file}")
        if path.read_text(encoding="utf-8") != page:
            behind.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(page, encoding="utf-8")
    if check and behind:
        sys.exit(f"not up to date: {', '.join(behind)}; run: python -m benchmarks.report")


if __name__ == "__main__":
    main()
