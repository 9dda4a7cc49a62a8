"""A script in the warm Python lives, fails and dies like one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

SCRIPT = """
import atexit, json, os, sys, threading, time
print(json.dumps([__name__, __file__, sys.argv, sys.path, os.getcwd(), os.environ.get("MINE"), sys.stdin.read()]))
print("error", file=sys.stderr)
atexit.register(print, "exit hook")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
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
