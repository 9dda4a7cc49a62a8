"""Traces on disk, written, read and replayed: a JSON line per `Event`, a file ``rank{r}.jsonl`` per rank.

Layer P; ``run`` makes steps of all ranks on one clock of them. Kinds and their data (readers keep kinds and keys
that they do not know):

    run       version (of this schema), world_size, names (of the devices this rank uses), unix_s (when it was
              opened), strategy (class), engine and what its figures are read against, e.g. policy and bound; the
              first line of a file, and again where a resumed run goes on writing
    step      samples, compute_s (own work), wait_s (for peers); without such a measurement step_s (batch). The balanced
              engine adds work (of these samples, in the user's items), the stale one writes one per contribution,
              several in a batch, with version and fill_in
    passed    behind; a batch made without this rank (stale engine)
    decision  shares (samples per rank), predicted_s (step time expected of them), predicted_gain (part of a batch's
              time), reason (in words); under a controller also kind, generation, queues, and who rests, or the plan
    outcome   generation, measured_s, predicted_gain, realised_gain, of an earlier decision of a controller
    queue     queues: by constraint of a budget, how many batches' budget are overspent (controller; rank 0)
    server    what the server has counted so far, when it was asked (stale engine), see its `Counts.as_dict`
    memory    what a rank has learned of its memory (balanced engine)
    plan      plan, cluster and profile that a run began with (pipeline engine)
    fault     error (what happened, in words)

A process may be killed at any time: a last line cut short is skipped and reported, as is one that a resumed
run wrote on after. Times are passed in; nothing here reads a clock. Replay after zeus (You et al., NSDI
2023), whose policies are judged on recorded measurements; format and rules are ours.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, cast

from lightning_hetero.types import Event, SpeedSample

SCHEMA_VERSION = 1

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_FIELDS = ("kind", "rank", "epoch", "step", "t_s")


class TornTraceWarning(UserWarning):
    """A trace holds a line cut short, as a killed process leaves it; everything else was read."""


def trace_path(dirpath: str | Path, rank: int) -> Path:
    """Returns where ``rank`` writes its trace inside a trace folder."""
    return Path(dirpath) / f"rank{rank}.jsonl"


class EventWriter:
    """Appends events to one file as JSON lines; lines reach the disk whole, ``flush_every`` at a time.

    Opening writes the ``run`` line. An existing trace is continued. Values JSON does not know become plain
    ones: NumPy and torch scalars their number, infinities and NaN ``null``, anything else its text.

    Args:
        path: the file; missing folders are made.
        rank: rank that writes.
        world_size: number of ranks of the run.
        names: names of this rank's devices, for people.
        about: what else the ``run`` line says.
        flush_every: lines to collect before writing; a killed process loses fewer than this many.

    Raises:
        ValueError: ``rank`` is not in [0, world_size), or ``flush_every`` < 1.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        names: Sequence[str] = (),
        about: Mapping[str, Any] = MappingProxyType({}),
        flush_every: int = 64,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank!r} must be in [0, world_size={world_size!r})")
        if flush_every < 1:
            raise ValueError(f"flush_every={flush_every!r} must be >= 1 (lines; 1 writes each at once)")
        self.path = Path(path)
        self.flush_every = flush_every
        self._lines: list[str] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(self.path)
        self._file: IO[bytes] | None = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        if torn:
            self._file.write(b"\n")
        data = {"version": SCHEMA_VERSION, "world_size": world_size, "names": list(names), **about}
        self.write(Event(kind="run", rank=rank, epoch=0, step=0, t_s=0.0, data=data))
        self.flush()

    def write(self, event: Event) -> None:
        """Adds one event.

        Raises:
            ValueError: the writer is closed.
        """
        if self._file is None:
            raise ValueError(f"the trace {self.path} is closed: write before close()")
        self._lines.append(_line(event))
        if len(self._lines) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Hands all lines collected so far to the operating system."""
        if self._file is not None and self._lines:
            # One unbuffered write: lines are not cut short where a buffer happens to end.
            self._file.write("".join(self._lines).encode())
            self._lines.clear()

    def close(self) -> None:
        """Flushes and closes; may be called again."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                self._file.close()
                self._file = None

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: str | Path) -> list[Event]:
    """Returns the events of a file, or of all ``rank{r}.jsonl`` of a folder, in order of (epoch, step, rank).

    Events with equal (epoch, step, rank) stay in the order written, so after a resumed run the later of two
    ``step`` events of one step is the one that counted. A ``run`` line stands at epoch 0, step 0.

    Raises:
        FileNotFoundError: no such file, or a folder without a trace.
        ValueError: not a trace, a trace of another schema version, or a damaged line that no crash explains.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if _RANK_FILE.fullmatch(p.name))
    if not files or not path.exists():
        raise FileNotFoundError(
            f"no trace at {path}: expected a .jsonl file or a folder with rank0.jsonl, rank1.jsonl, ..."
        )
    events = [event for file in files for event in _read_file(file)]
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
    return SpeedSample(
        rank=event.rank,
        step=event.step,
        samples=int(data["samples"]),
        compute_s=float(data["compute_s"]),
        wait_s=float(data.get("wait_s") or 0.0),
        work=float(data.get("work") or math.nan),
    )


def _line(event: Event) -> str:
    row = {name: getattr(event, name) for name in _FIELDS}
    row["data"] = dict(event.data)
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
    if (
        isinstance(value, Iterable) and getattr(cast(Any, value), "ndim", 1) > 0
    ):  # scalar arrays cannot be iterated
        return [_plain(v) for v in cast("Iterable[Any]", value)]
    item = getattr(cast(Any, value), "item", None)
    return _plain(item()) if callable(item) else str(cast(Any, value))


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _read_file(path: Path) -> list[Event]:
    text = path.read_bytes().decode(errors="replace")
    # Only "\n" ends a line: splitlines() would also split at characters that may stand inside a string.
    lines = text.split("\n")
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line]
    parsed = [_parse(line) for _, line in numbered]
    for at, ((number, line), event) in enumerate(zip(numbered, parsed, strict=True)):
        if event is not None:
            if event.kind == "run" or at == 0:
                _check_version(path, number, event)
            continue
        following = parsed[at + 1] if at + 1 < len(parsed) else None
        if at + 1 < len(parsed) and (following is None or following.kind != "run"):
            raise ValueError(
                f"{path}, line {number}: not an event: {line[:80]!r}. Is this a trace? Was it edited?"
            )
        if at == 0 and following is None and not _looks_torn(line):
            raise ValueError(f"{path} is not a trace: it starts with {line[:80]!r}")
        warnings.warn(
            f"{path}, line {number}: cut short, skipped: {line[:80]!r}", TornTraceWarning, stacklevel=4
        )
    return [event for event in parsed if event is not None]


def _looks_torn(line: str) -> bool:
    start = '{"kind":"run"'
    return line.startswith(start) or start.startswith(line)


def _parse(line: str) -> Event | None:
    try:
        row = json.loads(line)
        return Event(
            kind=str(row["kind"]),
            rank=int(row["rank"]),
            epoch=int(row["epoch"]),
            step=int(row["step"]),
            t_s=float(row["t_s"]),
            data=dict(row.get("data") or {}),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _check_version(path: Path, number: int, event: Event) -> None:
    version = event.data.get("version") if event.kind == "run" else None
    if version != SCHEMA_VERSION:
        said = (
            f"schema version {version!r}"
            if event.kind == "run"
            else f"a {event.kind!r} event and no 'run' line"
        )
        raise ValueError(
            f"{path}, line {number}: {said}, but this version reads schema version {SCHEMA_VERSION} only:"
            " read it with the version of lightning-hetero that wrote it"
        )
