"""A script in the warm Python lives, fails and dies like one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import warm

SCRIPT = """
import atexit, json, os, sys, threading
print(json.dumps([__name__, __file__, sys.argv, sys.path, os.getcwd(), os.environ.get("MINE"), sys.stdin.read()]))
print("error", file=sys.stderr)
atexit.register(print, "exit hook")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
class Mine: pass
assert sys.modules["__main__"].Mine is Mine
if sys.argv[1] == "raise": raise ValueError("broken")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("argument", ["0", "3", "raise"])
@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]], ids=["script", "module"])
def test_a_script_runs_as_python_would_run_it(tmp_path: Path, how: list[str], argument: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command, environ = [*how, argument], os.environ | {"MINE": "this", "PYTHONPATH": str(tmp_path / "more")}
    cold = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    done = warm.run(command, tmp_path, environ, 60.0)
    assert (done.returncode, done.stdout) == (cold.returncode, cold.stdout)
    assert cold.stderr.startswith("error\n") and done.stderr.splitlines()[-1] == cold.stderr.splitlines()[-1]
    assert "MINE" not in os.environ


def test_a_script_is_killed_and_waited_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    with (tmp_path / "said").open("w") as said:
        process = warm.start(["script.py"], tmp_path, os.environ, said.fileno(), said.fileno())
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(20.0) == process.poll() == -signal.SIGKILL
    process.kill()  # nobody is there


def test_a_script_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(["script.py"], tmp_path, os.environ, 2.0)


CHILDREN = """
import json, os, subprocess, sys, time
if len(sys.argv) > 1:
    if sys.argv[1] == "wait": time.sleep(60)
    print(json.dumps([__name__, __file__, sys.argv, os.getcwd(), os.environ.get("MINE")]), flush=True)
    if sys.argv[1] == "raise": raise ValueError("broken")
    sys.exit(int(sys.argv[1]))
os.mkdir("sub")
start = lambda how, word, **options: subprocess.Popen([sys.executable, *how, word], **options)
file = [os.path.abspath(__file__)]
for how, word in ((file, "3"), (["-m", "script"], "raise")):
    child = start(how, word, env={**os.environ, "MINE": word, "PYTHONPATH": os.getcwd()}, cwd="sub")
    print(child.wait(60.0), child.poll(), child.returncode, child.args == [sys.executable, *how, word], flush=True)
child = start(file, "wait")
assert isinstance(child, subprocess.Popen) and child.poll() is None and os.getpgid(child.pid) == os.getpgid(0)
try:
    child.wait(0.01)
except subprocess.TimeoutExpired:
    child.kill()
print(child.wait(), child.poll(), os.getppid() != child.pid, flush=True)
child.terminate()
print(start(file, "0").wait(), flush=True)
print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout, end="")
"""


def test_what_a_script_starts_runs_as_python_would_run_it(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "MINE"}
    folders = [tmp_path / "cold", tmp_path / "warm"]
    for folder in folders:
        folder.mkdir()
        (folder / "script.py").write_text(CHILDREN)
    cold = subprocess.run(
        [sys.executable, "script.py"], cwd=folders[0], env=environ, capture_output=True, text=True, check=True
    )
    done = warm.run(["script.py"], folders[1], environ, 60.0)
    assert done.stdout == cold.stdout.replace(str(folders[0]), str(folders[1])) and done.returncode == 0
    assert len(done.stdout.splitlines()) == 2 * 2 + 1 + 2 + 1
    assert done.stderr.count("ValueError: broken") == cold.stderr.count("ValueError: broken") == 1


MULTIPROCESSING = """
import json, multiprocessing as mp, os, sys

def report(line, word):
    line.send([__name__, word, os.environ["MINE"], os.getcwd(), "lightning" in sys.modules, os.getpid()])
    print(word, flush=True)
    if word == "raise": raise ValueError("broken")

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context, pids = mp.get_context(method), set()
        for word in ("end", "raise"):
            os.environ["MINE"] = "this"
            ours, theirs = context.Pipe()
            process = context.Process(target=report, args=(theirs, word))
            process.start()
            theirs.close()
            *said, pid = ours.recv()
            process.join(60.0)
            print(method, said, pid == process.pid, process.exitcode, flush=True)
"""


def test_what_multiprocessing_spawns_is_warm(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MULTIPROCESSING)
    done = warm.run(["script.py"], tmp_path, os.environ, 60.0)
    expected = []
    for method in ("spawn", "forkserver"):
        for word, code in (("end", 0), ("raise", 1)):
            said = ["__mp_main__", word, "this", str(tmp_path), True]
            expected += [word, f"{method} {said} True {code}"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.returncode == 0 and done.stderr.count("ValueError: broken") == 2


def test_unused_spare_processes_end_with_their_script(tmp_path: Path) -> None:
    def same() -> set[psutil.Process]:
        return {p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == server.cmdline()}

    assert warm.run(["-c", "1"], tmp_path, os.environ, 60.0).returncode == 0
    (server,) = map(psutil.Process, warm.pids())
    before = same()  # the server of the ranks, and these, among them
    (tmp_path / "script.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert warm.run(["script.py"], tmp_path, os.environ, 60.0).returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(same() - before, timeout=10.0)
    assert not alive
