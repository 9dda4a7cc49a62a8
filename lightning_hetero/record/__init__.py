"""Traces on disk, written, read and replayed: a JSON line per `Event`, a file ``rank{r}.jsonl`` per rank.

Layer P; ``run`` makes steps of all ranks on one clock of them, ``files`` writes. Every line names the run it is of, by
its id: a folder may hold several runs, and two may write to it at once. Kinds and their data (readers keep kinds and
keys that they do not know):

    run       version (of this schema), world_size, names (of the devices this rank uses), unix_s (when it was
              opened), strategy (class), engine and what its figures are read against, e.g. policy and bound; versions
              (by package), commit (of the working directory), trainer and hparams (its settings, the module's); the
              first line of a file, and again where a resumed run goes on writing
    step      samples, compute_s (own work), wait_s (for peers); without such a measurement step_s (batch). The balanced
              engine adds work (of these samples, in the user's items), the stale one writes one per contribution,
              several in a batch, with version and fill_in
    passed    behind; a batch made without this rank (stale engine)
    decision  shares (samples per rank), predicted_s (step time expected of them), predicted_gain (part of a batch's
              time), reason (in words); under a controller also kind, generation, queues, and who is idle, or the plan
    outcome   generation, measured_s, predicted_gain, realised_gain, of an earlier decision of a controller
    metrics   by name, what the run has logged: losses while it trains, all at the end of an epoch (rank 0)
    queue     queues: by constraint of a budget, how many batches' budget are overspent (controller; rank 0)
    server    what the server has counted so far, when it was asked (stale engine), see its `Counts.as_dict`
    memory    what a rank has learned of its memory (balanced engine)
    plan      plan, cluster and profile that a run began with (pipeline engine)
    fault     error (what happened, in words)

A process may be killed at any time, and a disk may be full or lose a block: lines that are no events are skipped and
counted in one warning per file. Times are passed in; nothing here reads a clock. Replay after zeus (You et al., NSDI
2023), whose policies are judged on recorded measurements; format and rules are ours.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from lightning_hetero.record.files import LineFile
from lightning_hetero.types import Event, SpeedSample

SCHEMA_VERSION = 1

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_FIRST = '{"kind":"run"'  # how a trace begins
_FIELDS = ("kind", "rank", "epoch", "step", "t_s")


class TornTraceWarning(UserWarning):
    """A trace lacks something: lines cut short or damaged, or all lines of a rank; everything else was read."""


def trace_path(dirpath: str | Path, rank: int) -> Path:
    """Returns where ``rank`` writes its trace inside a trace folder."""
    return Path(dirpath) / f"rank{rank}.jsonl"


class EventWriter(LineFile):
    """Appends events to one file as JSON lines; lines reach the disk whole, ``flush_every`` at a time.

    Opening writes the ``run`` line. An existing trace is continued. Values JSON does not know become plain
    ones: NumPy and torch scalars their number, infinities and NaN ``null``, anything else its text. A file that cannot
    be written is named in one warning, and nothing is raised, see `LineFile`.

    Args:
        path: the file; missing folders are made.
        rank: rank that writes.
        world_size: number of ranks of the run.
        names: names of this rank's devices, for people.
        about: what else the ``run`` line says.
        run: id of the run, the same on all its ranks; empty: the file is of one run only.
        flush_every: lines to collect before writing; a killed process loses fewer than this many.
    """

    def __init__(
        self, path: str | Path, *, rank: int = 0, world_size: int = 1, names: Sequence[str] = (),
        about: Mapping[str, Any] = MappingProxyType({}), run: str = "", flush_every: int = 64,
    ) -> None:  # fmt: skip
        super().__init__(path)
        self.run, self.flush_every = run, flush_every
        self._lines: list[str] = []
        data = {"version": SCHEMA_VERSION, "world_size": world_size, "names": list(names), **about}
        self.write(Event(kind="run", rank=rank, epoch=0, step=0, t_s=0.0, data=data))
        self.flush()

    def write(self, event: Event) -> None:
        """Adds one event.

        Raises:
            ValueError: the writer is closed.
        """
        if self.closed:
            raise ValueError(f"the trace {self.path} is closed: write before close()")
        self._lines.append(_line(event, self.run))
        if len(self._lines) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Hands all lines collected so far to the operating system."""
        if self._lines:
            self.append("".join(self._lines).encode())
            self._lines.clear()

    def close(self) -> None:
        """Flushes and closes; may be called again."""
        self.flush()
        super().close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_events(path: str | Path, run: str | None = None) -> list[Event]:
    """Returns a run's events, of a file or of all ``rank{r}.jsonl`` of a folder, in order of (epoch, step, rank).

    Events with equal (epoch, step, rank) stay in the order written, so after a resumed run the later of two
    ``step`` events of one step is the one that counted. A ``run`` line stands at epoch 0, step 0. Lines that are no
    events are skipped, with one `TornTraceWarning` per file, as is a rank of the run without any line.

    Args:
        path: the file or folder.
        run: id of the run; None: the one that was begun or resumed last, with a warning if there are others.

    Raises:
        FileNotFoundError: no such file, or a folder without a trace.
        ValueError: not a trace, a trace of another schema version, or no run of that id is in it.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if _RANK_FILE.fullmatch(p.name))
    if not files or not path.exists():
        raise FileNotFoundError(
            f"no trace at {path}: expected a .jsonl file or a folder with rank0.jsonl, rank1.jsonl, ..."
        )
    by_run: dict[str, list[Event]] = {}
    for file in files:
        for its, event in _read_file(file, alone=len(files) == 1):
            by_run.setdefault(its, []).append(event)
    if not by_run:
        return []
    events = by_run[_chosen(path, by_run, run)]
    world = max((int(event.data.get("world_size") or 1) for event in events if event.kind == "run"), default=0)
    if path.is_dir() and (missing := sorted({*range(world)} - {event.rank for event in events})):
        which = ", ".join(f"rank{rank}.jsonl" for rank in missing[:8]) + (", ..." if missing[8:] else "")
        said = f"{path}: {which}: missing, or without a line of this run of {world} ranks"
        warnings.warn(said, TornTraceWarning, stacklevel=2)
    return sorted(events, key=lambda e: (e.epoch, e.step, e.rank))


def replay(events: Iterable[Event]) -> Iterator[tuple[SpeedSample, ...]]:
    """Yields the speed samples of all ranks, in order of rank, step by step: policies run without hardware.

    A step counts if every rank that recorded any step measured this one (``samples`` and ``compute_s``);
    others, e.g. the last one before a crash, are passed over. If a step was recorded twice, the later record
    counts.

    Args:
        events: any events, in any order; other kinds are passed over.
    """
    steps: dict[tuple[int, int], dict[int, SpeedSample]] = {}
    for event in events:
        if (sample := speed_sample(event)) is not None:
            steps.setdefault((event.epoch, event.step), {})[event.rank] = sample
    ranks = sorted({rank for samples in steps.values() for rank in samples})
    for _, samples in sorted(steps.items()):
        if len(samples) == len(ranks):
            yield tuple(samples[rank] for rank in ranks)


def speed_sample(event: Event) -> SpeedSample | None:
    """Returns what a ``step`` event measured of its rank's own work; None: it is another event, or measured nothing."""
    data = event.data
    if event.kind != "step" or data.get("samples") is None or data.get("compute_s") is None:
        return None
    wait_s, work = float(data.get("wait_s") or 0.0), float(data.get("work") or math.nan)
    samples, compute_s = int(data["samples"]), float(data["compute_s"])
    return SpeedSample(
        rank=event.rank, step=event.step, samples=samples, compute_s=compute_s, wait_s=wait_s, work=work
    )


def _line(event: Event, run: str) -> str:
    row = {name: getattr(event, name) for name in _FIELDS} | {"data": dict(event.data)} | ({"run": run} if run else {})
    try:
        return json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"
    except (TypeError, ValueError):  # the rare way: values that JSON does not know
        return json.dumps(_plain(row), allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, Iterable) and getattr(cast(Any, value), "ndim", 1) > 0:  # scalar arrays cannot be iterated
        return [_plain(v) for v in cast("Iterable[Any]", value)]
    item = getattr(cast(Any, value), "item", None)
    return _plain(item()) if callable(item) else str(cast(Any, value))


def _read_file(path: Path, *, alone: bool) -> list[tuple[str, Event]]:
    """Returns the run's id and the event of each line; ``alone``: there is no other file, so it had better be one."""
    text = path.read_bytes().decode(errors="replace")
    # Only "\n" ends a line: splitlines() would also split at characters that may stand inside a string.
    numbered = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line]
    found: list[tuple[str, Event]] = []
    damaged: list[tuple[int, str]] = []
    for at, (number, line) in enumerate(numbered):
        if (parsed := _parse(line)) is None:
            damaged.append((number, line))
            continue
        if parsed[1].kind == "run" or at == 0:
            _check_version(path, number, parsed[1])
        found.append(parsed)
    if damaged:
        number, line = damaged[0]
        if alone and not found and line[: len(_FIRST)] != _FIRST[: len(line)]:
            raise ValueError(f"{path} is not a trace: it starts with {line[:80]!r}")
        lines = f"{len(damaged)} lines are" if len(damaged) > 1 else "1 line is"
        said = f"{path}: {lines} cut short or damaged, skipped: line {number}, {line[:80]!r}"
        warnings.warn(said, TornTraceWarning, stacklevel=3)
    return found


def _parse(line: str) -> tuple[str, Event] | None:
    """Returns the run's id and the event of a line; None: it is none."""
    try:
        row = json.loads(line)
        at = {name: int(row[name]) for name in ("rank", "epoch", "step")}
        event = Event(kind=str(row["kind"]), t_s=float(row["t_s"]), data=dict(row.get("data") or {}), **at)
        return str(row.get("run") or ""), event
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _chosen(path: Path, by_run: Mapping[str, Sequence[Event]], run: str | None) -> str:
    """Returns the id of the run to read, and says so where there are several."""
    times = {its: [e.data.get("unix_s") for e in events if e.kind == "run"] for its, events in by_run.items()}
    began = {its: max((t for t in said if isinstance(t, float)), default=0.0) for its, said in times.items()}
    runs = sorted(began, key=lambda its: began[its])  # stable: without a time in the order written
    dates = {its: datetime.fromtimestamp(unix_s, timezone.utc) for its, unix_s in began.items() if unix_s}
    told = [f"{its!r} of {dates[its]:%Y-%m-%d %H:%M:%S} UTC" if its in dates else repr(its) for its in runs]
    if run is not None and run not in by_run:
        raise ValueError(f"run={run!r} is not in {path}: it holds {', '.join(told[-8:])}")
    if run is None and len(runs) > 1:
        said = f"{path} holds {len(runs)} runs; this is the last, {told[-1]}. run=ID (--run ID) selects another"
        warnings.warn(f"{said}: {', '.join(told[-9:-1])}", stacklevel=3)
    return runs[-1] if run is None else run


def _check_version(path: Path, number: int, event: Event) -> None:
    version = event.data.get("version") if event.kind == "run" else None
    if version != SCHEMA_VERSION:
        said = f"schema version {version!r}" if event.kind == "run" else f"a {event.kind!r} event and no 'run' line"
        raise ValueError(
            f"{path}, line {number}: {said}, but this version reads schema version {SCHEMA_VERSION} only:"
            " read it with the version of lightning-hetero that wrote it"
        )
