"""``lightning-hetero-report RUN_DIR [RUN_DIR ...]``: a recorded run, or several compared, as an HTML file (layer A).

Results as rows and plain-text tables (pure functions); their figures are the ledger's, see `record.ledger`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.cli.command import command_parser
from lightning_hetero.record import read_events
from lightning_hetero.record.files import tell
from lightning_hetero.record.run import run_of
from lightning_hetero.report.figures import perfetto_of
from lightning_hetero.report.page.build import page_of
from lightning_hetero.report.page.facts import RunFacts

REPORT_FILE, COMPARISON_FILE, TRACE_FILE, RESULT_FILE = "report.html", "comparison.html", "perfetto.json", "result.json"
T = TypeVar("T")
_TRACES = ("", "events", "hetero")  # where a trace is inside a run's folder
_CONFIGS = (".hydra/config.yaml", "config.yaml", "hparams.yaml")  # of Hydra, LightningCLI, a logger


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


def trace_in(folder: Path) -> Path | None:
    """Returns the folder in a run's folder that its trace is in; None: there is no trace."""
    return next((place for name in _TRACES if any((place := folder / name).glob("rank*.jsonl"))), None)


def runs_in(folder: str | Path) -> list[Path]:
    """Returns the folder of a run itself; of a multirun its jobs' folders that hold a trace, in their order.

    Raises:
        FileNotFoundError: there is no trace.
    """
    folder = Path(folder)
    if trace_in(folder) is not None:
        return [folder]
    if jobs := [path for path in folder.glob("*/") if trace_in(path)]:
        return sorted(jobs, key=lambda path: (len(path.name), path.name))
    nested = sorted(path.parent for path in folder.glob("**/rank0.jsonl"))
    more = f"; there are traces in {', '.join(map(str, nested[:3]))}" if nested else ""
    raise FileNotFoundError(
        f"no trace in {folder}: expected rank0.jsonl there, in its folders events or hetero, or in those of a"
        " multirun's jobs. Train with the callbacks HeteroTrace() and StragglerMonitor(), or with"
        f" lightning-hetero-train{more}"
    )


def read_run(folder: str | Path, trace_dir: str | Path | None = None, run: str | None = None) -> RunFacts:
    """Returns the run whose trace is in a folder, with its ``result.json`` and its configuration, if there are any.

    Args:
        folder: of a run of the command line, of a logger whose run `HeteroTrace` has recorded, or of a trace itself.
        trace_dir: where its trace is, if not in one of the usual places inside.
        run: id of the run, if that folder has several; None: the last one.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: a trace of another version, without that run, or an empty one.
    """
    folder = Path(folder)
    found = Path(trace_dir) if trace_dir is not None else trace_in(folder)
    if found is None or not any(found.glob("rank*.jsonl")):
        found = runs_in(folder)[0]  # says what is missing
    events = read_events(found, run)
    if not any(event.kind == "run" for event in events):
        raise ValueError(f"the trace in {found} is empty: its rank*.jsonl hold no events. Did the run end as it began?")
    configs = (read_if_there(folder / name, Path.read_text) for name in _CONFIGS)
    config = next((text for text in configs if text), "")
    return RunFacts(run_of(events, name=folder.resolve().name), read_result(folder / RESULT_FILE), config)


def write_report(
    *folders: str | Path, output: str | Path | None = None, trace_dir: str | Path | None = None,
    runs: Sequence[str | None] = (),
) -> list[Path]:  # fmt: skip
    """Writes the report of a run and its Perfetto trace next to it, or a comparison of several; returns the paths.

    Args:
        folders: of the runs, see `read_run`, or of a multirun, which stands for its jobs.
        output: the HTML file; default ``report.html`` in the run's or the multirun's folder, or ``comparison.html`` in
            the first of several.
        trace_dir: where the only run's trace is, see `read_run`.
        runs: ids of the runs, in the order of the folders, see `read_run`.

    Raises:
        FileNotFoundError, ValueError: see `read_run`.
        OSError: the file cannot be written.
    """
    found = [Path(folders[0])] if trace_dir is not None else [run for folder in folders for run in runs_in(folder)]
    ids = [*runs, *[None] * len(found)]
    facts = [read_run(folder, trace_dir, run) for folder, run in zip(found, ids, strict=False)]
    target = Path(folders[0]) / (REPORT_FILE if len(folders) == 1 else COMPARISON_FILE)
    target = target if output is None else Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page_of(*facts), encoding="utf-8")
    if len(facts) > 1:
        return [target]
    trace = target.with_name(TRACE_FILE if output is None else f"{target.stem}.{TRACE_FILE}")
    trace.write_text(json.dumps(perfetto_of(facts[0].run), separators=(",", ":")))
    return [target, trace]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-hetero-report`` and ``python -m lightning_hetero.cli.report``."""
    parser = command_parser(
        "report",
        "Writes a recorded run, or a comparison of several, as one HTML file that opens offline; of one run also a"
        " trace for ui.perfetto.dev.",
        ["outputs/2026-11-22/10-00-00", "multirun/2026-11-22/10-00-00", "RUN_DIR OTHER_RUN_DIR -o comparison.html"],
    )
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="of a run, its trace, or a multirun; several are compared"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="default: RUN_DIR/report.html, of several the first's comparison.html"
    )
    parser.add_argument(
        "--run", "--other-run", dest="runs", metavar="ID", action="append", default=[],
        help="which run, if a RUN_DIR has several; once per RUN_DIR, in their order; default: the last one",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        report, *trace = write_report(*given.run_dirs, output=given.output, runs=given.runs)
    except (OSError, ValueError) as error:
        reads = isinstance(error, FileNotFoundError | ValueError) or str(error.filename).endswith(".jsonl")
        hint = "" if reads else ". Name a file in another place: -o FILE"
        print(f"lightning-hetero-report: {error}{hint}", file=sys.stderr)
        return 2
    print("\n".join([f"report: {report}", *(f"trace for ui.perfetto.dev: {path}" for path in trace)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of one job, a line per rank: speed, share, and where the time of a step went.

    Args:
        ranks: `RankFigures`, as plain values.
    """
    header = ["rank", "samples/s", "samples", "share %", "work ms", "exchange ms", "waiting ms"]
    times = [[1e3 * r[name] for name in ("compute_s", "exchange_s", "wait_s")] for r in ranks]
    figures = [
        (r["samples_per_s"], r["samples_per_step"], 100 * r["share"], *own) for r, own in zip(ranks, times, strict=True)
    ]
    rows = [[str(r["rank"]), *(_number(v, 1) for v in row)] for r, row in zip(ranks, figures, strict=True)]
    return format_table(header, rows)


def comparison_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of several jobs, a line per result, in the order given.

    The speed-up is over the first result with a time. ``overrides`` appears if jobs differ in more than
    strategy and scenario, and holds what is not common to all. ``shares %`` is each rank's part of the
    global batch, rank 0 first; ``waiting %`` the part of all ranks' time in steps that is waiting.

    Args:
        results: what the jobs wrote into their ``result.json``.
    """
    names = list(dict.fromkeys(str(r["metric"]["name"]) for r in results if r.get("metric")))
    varied = _varied_overrides(results)
    told = ["overrides"] if any(varied) else []
    header = ["job", "strategy", "scenario", *told, "fit s", "speed-up", "samples/s", *names, "shares %", "waiting %"]
    first_s = next((r["fit_s"] for r in results if r.get("fit_s")), None)
    rows: list[list[str]] = []
    for index, result in enumerate(results):
        ranks: list[Mapping[str, Any]] = result.get("ranks") or []
        fit_s, metric = result.get("fit_s"), result.get("metric") or {}
        waiting = result.get("waiting")
        row = [str(result.get("job", index)), *(str(result.get(name) or "-") for name in ("strategy", "scenario"))]
        row += [varied[index] or "-"] if told else []
        speed_up = f"{first_s / fit_s:.2f}x" if first_s and fit_s else "-"
        row += [_number(fit_s, 2), speed_up, _number(result.get("samples_per_s"), 1)]
        row += [_number(metric.get("value") if metric.get("name") == name else None, 4) for name in names]
        row.append("/".join(f"{100 * rank['share']:.0f}" for rank in ranks) or "-")
        rows.append([*row, _number(None if waiting is None else 100 * waiting, 1)])
    return format_table(header, rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned table: columns that hold text are left-aligned, numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(_is_numeric(cell) for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def _varied_overrides(results: Sequence[Mapping[str, Any]]) -> list[str]:
    given = [[str(o) for o in result.get("overrides") or []] for result in results]
    common = set(given[0]).intersection(*given) if given else set()
    shown = ("strategy=", "emulation=")
    return [" ".join(o for o in job if o not in common and not o.startswith(shown)) for job in given]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _is_numeric(cell: str) -> bool:
    try:
        return cell == "-" or math.isfinite(float(cell.rstrip("x")))
    except ValueError:
        return False
