"""Files of what only observes: whole lines, one warning, no exception."""

from __future__ import annotations

import errno
import json
import threading
import warnings
from pathlib import Path

import pytest

from lightning_hetero.record import EventWriter, read_events
from lightning_hetero.record.files import LineFile, tell, write_file
from lightning_hetero.types import Event
from tests.full_disk import full_at

LINES = b"".join(b"%d %s\n" % (i, b"x" * i) for i in range(40))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 101, 102, 103, 104, 105, len(LINES) - 1, len(LINES)])
def test_what_a_full_disk_takes_ends_with_a_whole_line(tmp_path: Path, size: int) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    with warnings.catch_warnings(record=True) as told, full_at(size):
        warnings.simplefilter("always")
        file.append(LINES)
        file.append(b"more\n")
    file.append(b"there is room again\n")
    file.close()
    kept = path.read_bytes()
    assert kept == LINES[: LINES.rfind(b"\n", 0, size) + 1]
    (warning,) = told
    assert str(path) in str(warning.message) and "Training goes on without it" in str(warning.message)


def test_a_trace_on_a_full_disk_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    writer = EventWriter(path, flush_every=5)
    with pytest.warns(UserWarning, match="File too large. Training goes on") as told, full_at(1500):
        for i in range(100):
            writer.write(Event(kind="step", rank=0, epoch=0, step=i, t_s=0.0, data={"samples": 4}))
    writer.close()
    assert len(told) == 1
    steps = [e.step for e in read_events(path) if e.kind == "step"]
    assert steps == list(range(len(steps))) and 5 < len(steps) < 30


def test_nothing_of_another_process_is_cut_off(tmp_path: Path) -> None:
    """Its line came behind the part that was written: that part stays, and the reader skips it."""
    path = tmp_path / "lines"
    file = LineFile(path)

    class Short:
        def __init__(self) -> None:
            self.raw, self.calls = file._file, 0

        def write(self, lines: bytes) -> int:
            self.calls += 1
            if self.calls == 2:
                path.write_bytes(path.read_bytes() + b"other\n")
                raise OSError(errno.EIO, "Input/output error")
            return self.raw.write(lines[:5]) or 0  # type: ignore[union-attr]

        def __getattr__(self, name: str) -> object:
            return getattr(self.raw, name)

    file._file = Short()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="Input/output error"):
        file.append(b"abc\ndef\n")
    assert path.read_bytes() == b"abc\ndother\n"


def test_places_that_cannot_be_written_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="File exists"):
        LineFile(tmp_path / "file" / "lines").append(b"x\n")
    with pytest.warns(UserWarning, match="Is a directory"):
        assert not write_file(tmp_path, "x")
    file = LineFile(tmp_path / "gone" / "lines")
    file.append(b"x\n")
    (tmp_path / "gone" / "lines").unlink()
    with pytest.warns(UserWarning, match="removed while it was written"):
        file.close()


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    assert write_file(path, json.dumps({"a": 1}))
    with pytest.warns(UserWarning, match=r"result\.json could not be written"), full_at(10):
        assert not write_file(path, json.dumps({"a": "x" * 100}))
    assert json.loads(path.read_text()) == {"a": 1} and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_screen_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    asked: list[str] = []

    def showwarning(message: Warning, *args: object) -> None:
        asked.append(str(message))
        raise error

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", showwarning)
        tell("nobody reads this")
    assert asked == ["nobody reads this"]


def test_lines_of_two_writers_stay_whole(tmp_path: Path) -> None:
    path, start = tmp_path / "lines", threading.Barrier(2)

    def write(letter: bytes) -> None:
        file = LineFile(path)
        start.wait()
        for i in range(200):
            file.append((letter * (i % 90 + 1) + b"\n") * 3)
        file.close()

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 1201 and all(len(set(line)) <= 1 for line in lines)
