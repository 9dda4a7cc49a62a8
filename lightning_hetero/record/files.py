"""Files of what only observes: one that cannot be written ends no training (layer P)."""

from __future__ import annotations

import warnings
from contextlib import suppress
from io import FileIO
from pathlib import Path


def tell(text: str) -> None:
    """Warns; nothing happens where nobody can read it, e.g. because the screen is a pipe whose reader has gone."""
    with suppress(OSError, ValueError):
        warnings.warn(text, stacklevel=3)


def write_file(path: str | Path, text: str, *, told: bool = True) -> bool:
    """Writes a file whole, or leaves what is there and warns, if ``told``; returns whether it did. Makes folders."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if told:
            tell(f"{path} could not be written: {error}. Everything else goes on without it")
        return False
    return True


class LineFile:
    """Appends lines to a file, and raises nothing.

    Lines go out in one write, behind those of any other process, so that several may write to one file. Of what a full
    disk takes of them, the part of a line at the end is cut off. Then one warning tells of the file and the reason, and
    nothing more is written.

    Args:
        path: the file; missing folders are made. A last line without its end is ended.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.closed = Path(path), False
        self._file: FileIO | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
            if (end := file.seek(0, 2)) and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
                file.write(b"\n")
        except OSError as error:
            self._stop(error)

    def append(self, lines: bytes) -> None:
        """Hands whole lines to the operating system."""
        file, written = self._file, 0
        if file is None:
            return
        try:
            written = file.write(lines) or 0
            if written < len(lines):  # the rest says why
                written += file.write(lines[written:]) or 0
            if written < len(lines):
                raise OSError(f"{written} of {len(lines)} bytes were taken")
        except OSError as error:
            with suppress(OSError):
                torn = written - (lines.rfind(b"\n", 0, written) + 1)
                end = file.tell()
                if torn and file.seek(0, 2) == end:  # else somebody has written behind it
                    file.truncate(end - torn)
            self._stop(error)

    def close(self) -> None:
        """Ends the writing; may be called again."""
        file, self._file, self.closed = self._file, None, True
        if file is not None:
            try:
                file.close()
                if not self.path.exists():
                    raise FileNotFoundError("it was removed while it was written")
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()
        tell(f"{self.path} is not written any more: {error}. Training goes on without it")
