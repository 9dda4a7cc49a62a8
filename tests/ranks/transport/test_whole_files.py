"""A file is there when it is complete; a process that is killed while it writes leaves the old one and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero.transport import whole_files
from lightning_hetero.transport.whole_files import name_of_process, remove_left, whole_file

pytestmark = pytest.mark.ranks

_WRITES = """
import sys
from lightning_hetero.transport import whole_files
whole_files._NAMELESS = whole_files._NAMELESS if sys.argv[2] == "nameless" else 0
with whole_files.whole_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writes", flush=True)
    sys.stdin.read()
"""


def killed(path: Path, how: str) -> None:
    """Starts to write in another process, which is killed meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writes\n"
        writer.kill()


@pytest.mark.skipif(not whole_files._NAMELESS, reason="no files without a name on this system")
def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")
    killed(path, "nameless")
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"old"


def test_what_a_killed_writer_leaves_goes_with_the_next_one(tmp_path: Path) -> None:
    path, others = tmp_path / "a.ckpt", tmp_path / f".a.ckpt.{name_of_process()}.part"
    path.write_bytes(b"old")
    killed(path, "named")
    assert len([*tmp_path.iterdir()]) == 2 and path.read_bytes() == b"old"
    others.write_bytes(b"of a process that lives")
    remove_left(tmp_path, ".a.ckpt.", ".part")
    assert sorted(tmp_path.iterdir()) == [others, path]
    with whole_file(path) as file:
        file.write(b"new")
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"new"


@pytest.mark.parametrize("nameless", [whole_files._NAMELESS, 0])
def test_an_error_leaves_the_old_file(tmp_path: Path, nameless: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_files, "_NAMELESS", nameless)
    path = tmp_path / "of" / "a.ckpt"
    for text in (b"one", b"two"):
        with whole_file(path) as file:
            file.write(text)
    with pytest.raises(OSError, match="no space"), whole_file(path) as file:
        raise OSError("no space")
    assert [*path.parent.iterdir()] == [path] and path.read_bytes() == b"two"


def test_what_other_hosts_and_live_processes_write_stays(tmp_path: Path) -> None:
    live, other = tmp_path / f".joining-{name_of_process()}-2.ckpt", tmp_path / ".joining-elsewhere-1-2.ckpt"
    gone = tmp_path / f".joining-{name_of_process().rpartition('-')[0]}-{2**22 + 1}-2.ckpt"  # above any pid
    for path in (live, other, gone):
        path.touch()
    remove_left(tmp_path, ".joining-")
    assert sorted(tmp_path.iterdir()) == sorted([live, other])
