"""``lightning-hetero-report RUN_DIR [OTHER_RUN_DIR]``: a recorded run as one HTML file (layer A)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.cli.command import command_parser
from lightning_hetero.record import read_events
from lightning_hetero.record.files import tell
from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.page.build import page_of
from lightning_hetero.report.perfetto import perfetto_of

REPORT_FILE, TRACE_FILE, RESULT_FILE = "report.html", "perfetto.json", "result.json"
T = TypeVar("T")
_TRACES = ("", "events", "hetero")  # where a trace is inside a run's folder


def read_if_there(path: str | Path, read: Callable[[Path], T]) -> T | None:
    """Returns what is read from a file or folder; None if it is not there, or, with a warning, if it cannot be read."""
    try:
        return read(Path(path)) if Path(path).exists() else None
    except (OSError, ValueError, TypeError) as error:
        tell(f"{path} is left out, it cannot be read: {error}")
        return None


def read_result(path: Path) -> dict[str, Any]:
    """Returns what a ``result.json`` says; empty where nothing can be read."""
    return read_if_there(path, lambda file: dict(json.loads(file.read_text()))) or {}


def read_run(
    folder: str | Path, trace_dir: str | Path | None = None, run: str | None = None
) -> tuple[RecordedRun, Mapping[str, Any]]:
    """Returns the run whose trace is in a folder, and what its ``result.json`` says, if there is one.

    Args:
        folder: of a run of the command line, of a logger whose run `HeteroTrace` has recorded, or of a trace itself.
        trace_dir: where its trace is, if not in one of the usual places inside.
        run: id of the run, if that folder has several; None: the last one.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: a trace of another version, or without that run.
    """
    folder = Path(folder)
    places = [Path(trace_dir)] if trace_dir is not None else [folder / name for name in _TRACES]
    found = next((place for place in places if any(place.glob("rank*.jsonl"))), None)
    if found is None:
        nested = sorted(path.parent for path in folder.glob("**/rank0.jsonl"))
        more = f"; there are traces in {', '.join(map(str, nested[:3]))}" if nested else ""
        raise FileNotFoundError(
            f"no trace in {folder}: expected rank0.jsonl there, or in its folders events or hetero. Train with the"
            f" callbacks HeteroTrace() and StragglerMonitor(), or with lightning-hetero-train{more}"
        )
    return run_of(read_events(found, run), name=folder.resolve().name), read_result(folder / RESULT_FILE)


def write_report(
    folder: str | Path,
    other: str | Path | None = None,
    output: str | Path | None = None,
    *,
    trace_dir: str | Path | None = None,
    runs: tuple[str | None, str | None] = (None, None),
) -> tuple[Path, Path]:
    """Writes the report of a run and its Perfetto trace beside it; returns both paths.

    Args:
        folder: of the run, see `read_run`.
        other: another run to compare with.
        output: the HTML file; default ``report.html`` in the run's folder.
        trace_dir: where the run's trace is, see `read_run`.
        runs: ids of the two runs, see `read_run`.

    Raises:
        FileNotFoundError, ValueError: see `read_run`.
    """
    run, result = read_run(folder, trace_dir, runs[0])
    beside, beside_result = read_run(other, run=runs[1]) if other is not None else (None, {})
    target = Path(output) if output is not None else Path(folder) / REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page_of(run, beside, (result, beside_result)), encoding="utf-8")
    trace = target.with_name(TRACE_FILE if output is None else f"{target.stem}.{TRACE_FILE}")
    trace.write_text(json.dumps(perfetto_of(run), separators=(",", ":")))
    return target, trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-hetero-report`` and ``python -m lightning_hetero.cli.report``."""
    parser = command_parser(
        "report",
        "Writes a recorded run as one HTML file that opens offline, and as a trace for ui.perfetto.dev.",
        ["outputs/2026-11-22/10-00-00", "RUN_DIR OTHER_RUN_DIR -o comparison.html", "RUN_DIR --run ID"],
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run, or of its trace")
    parser.add_argument("other_run_dir", metavar="OTHER_RUN_DIR", nargs="?", help="a second run to compare with")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: RUN_DIR/report.html")
    parser.add_argument("--run", metavar="ID", help="which run, if RUN_DIR has several; default: the last one")
    parser.add_argument("--other-run", metavar="ID", help="the same of OTHER_RUN_DIR")
    given = parser.parse_args(arguments)
    runs = given.run, given.other_run
    try:
        report, trace = write_report(given.run_dir, given.other_run_dir, given.output, runs=runs)
    except (OSError, ValueError) as error:
        print(f"lightning-hetero-report: {error}", file=sys.stderr)
        return 2
    print(f"report: {report}\ntrace for ui.perfetto.dev: {trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
