"""Launchers that tolerate a death: who goes on, who ends, and what is said; and the private names they rest on."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_hetero.cli.jobs import end_children
from lightning_hetero.lightning_compat import launchers as launcher
from lightning_hetero.lightning_compat import process_launchers
from lightning_hetero.lightning_compat.launchers import ScriptLauncher
from lightning_hetero.lightning_compat.process_launchers import ProcessLauncher
from lightning_hetero.transport.base import LeftBehindError
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = (
    f"lightning {lightning.__version__}, torch {torch.__version__} behave differently: adapt"
    " lightning_hetero/lightning_compat/launchers.py"
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launcher, process_launchers):
        monkeypatch.setattr(module, "GRACE_S", 0.3)


# ---- script launcher: children that Lightning would have started ----------------------------------------------


class Killed(Exception):
    """Instead of the SIGKILL for this process."""


@pytest.fixture
def own_death(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = os.kill

    def kill_others(pid: int, number: int) -> None:
        if pid == os.getpid():
            raise Killed(signal.Signals(number).name)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", kill_others)


CHILD = """
import os, sys, time
wait = lambda: time.sleep(60)
def until(name):
    while not os.path.exists(name): time.sleep(.01)
"""


def watched(*codes: str, tolerates: Any) -> ScriptLauncher:
    """A launcher whose children run these lines of Python; `wait` there waits for long, `until` for a file."""
    environment: Any = SimpleNamespace()
    own = ScriptLauncher(environment, len(codes) + 1, 1, check=lambda *_: None, tolerates=tolerates)
    own.procs = [subprocess.Popen([sys.executable, "-S", "-c", CHILD + code]) for code in codes]
    return own


DIE, WAIT, FAIL, END = "os.kill(os.getpid(), 9)", "wait()", "sys.exit(3)", "until('asked')"


def test_a_tolerated_death_is_noted_and_the_others_go_on(own_death: None, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    own = watched(END, DIE, END, tolerates=lambda: Path("asked").touch() is None)
    own._watch_children()  # until all have ended
    assert [p.returncode for p in own.procs] == [0, -9, 0] and own.tolerated == {2}
    records = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert records == [(logging.INFO, "local rank 2 was killed by SIGKILL; the others go on without it")]
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=own))
    end_children(trainer, failed=False)
    assert own.procs == []


def test_a_death_in_the_middle_is_seen_at_once(own_death: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    wait = launcher._wait_for_an_end

    def tolerates() -> bool:
        asked.append(True)
        for proc in own.procs:
            proc.kill()
        return True

    def waits(procs: Any, told: Any) -> None:
        Path("waits").touch()
        wait(procs, told)

    monkeypatch.setattr(launcher, "_wait_for_an_end", waits)
    own = watched("until('waits'); " + DIE, WAIT, tolerates=tolerates)
    own._watch_children()
    assert len(asked) == 2 and own.tolerated == {1, 2}


def test_a_child_that_is_stopped_does_not_stay_for_ever(capsys: Any) -> None:
    """One that runs ends by itself, when it has saved what it has."""
    own = watched(WAIT, WAIT, tolerates=lambda: False)
    stopped, runs = own.procs
    os.kill(stopped.pid, signal.SIGSTOP)
    while launcher.process_state(stopped.pid) != b"T":
        time.sleep(0.01)
    launcher._end_stopped(os.getpid(), own.procs)
    assert stopped.wait(20.0) == -signal.SIGKILL and runs.poll() is None
    assert capsys.readouterr().err == "local rank 1 is stopped, and local rank 0 ends: it is killed\n"
    runs.kill()
    runs.wait()


def test_a_rank_that_the_others_have_left_behind_ends_alone(own_death: None, capsys: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    own = watched(f"sys.exit({launcher.LEFT_BEHIND})", "sys.exit(0)", tolerates=lambda: False)
    own._watch_children()
    assert [p.returncode for p in own.procs] == [launcher.LEFT_BEHIND, 0] and own.tolerated == {1}
    assert [r.getMessage() for r in caplog.records] == ["local rank 1 was left behind, and has ended"]
    with pytest.raises(SystemExit, match=str(launcher.LEFT_BEHIND)), launcher.ending_alone(True):
        raise LeftBehindError("silent for 9 s")
    assert "LeftBehindError: silent for 9 s" in capsys.readouterr().err
    with pytest.raises(LeftBehindError), launcher.ending_alone(False):
        raise LeftBehindError("silent for 9 s")


@pytest.mark.parametrize(
    ("codes", "tolerates", "message"),
    [
        ([DIE, WAIT], lambda: False, "local rank 1 ended with code -9"),
        ([DIE, WAIT], lambda: 1 / 0, "local rank 1 ended with code -9"),
        ([WAIT, FAIL], lambda: True, "local rank 2 ended with code 3"),
    ],
    ids=["death", "nobody to ask", "exit code"],
)
def test_what_is_not_tolerated_ends_everybody(
    codes: list[str], tolerates: Any, message: str, own_death: None, caplog: Any
) -> None:
    own = watched(*codes, tolerates=tolerates)
    with pytest.raises(Killed, match="SIGKILL"):
        own._watch_children()
    assert all(p.wait(20) for p in own.procs) and own.tolerated == set()
    assert [r.getMessage() for r in caplog.records] == [f"{message}; everybody ends"]


def test_a_failed_rank_leaves_the_others_time_for_their_last_words(
    own_death: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 3.0)
    monkeypatch.setattr(launcher._LOG, "error", lambda *_: Path("seen").touch())  # that one has failed
    own = watched(FAIL, "until('seen'); sys.exit(4)", tolerates=lambda: True)
    with pytest.raises(Killed):  # this process has not used its time
        own._watch_children()
    assert [p.returncode for p in own.procs] == [3, 4]


def test_the_watch_ends_when_somebody_else_takes_the_children_over(own_death: None) -> None:
    own = watched(FAIL, WAIT, tolerates=lambda: True)
    children = list(own.procs)
    children[0].wait()
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=own))
    with pytest.raises(RuntimeError, match="local rank 1 ended with code 3; local rank 2 had not finished"):
        end_children(trainer, failed=False, timeout_s=0.1)
    own._watch_children()
    assert [c.returncode for c in children] == [3, -9]


@pytest.mark.parametrize("fails", [False, True])
def test_the_watch_ends_with_what_was_launched(fails: bool, own_death: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = watched(WAIT, tolerates=lambda: True)
    external = SimpleNamespace(creates_processes_externally=True)
    own.cluster_environment = external  # type: ignore[assignment]
    monkeypatch.setattr(launcher, "_set_num_threads_if_needed", lambda **_: None)
    before = threading.enumerate()

    def work() -> list[str]:
        inside = [thread.name for thread in threading.enumerate() if thread not in before]
        return inside if not fails else [1 / 0]  # type: ignore[list-item]

    for _ in range(2):  # children outlive a run: the next one watches them again
        if fails:
            with pytest.raises(ZeroDivisionError):
                own.launch(work)
        else:
            assert own.launch(work) == ["child-watch"]
        assert threading.enumerate() == before
    for child in own.procs:
        child.kill()
        child.wait()


PARENT_DIES = """
import os, signal, sys, time
from lightning_hetero.lightning_compat import launchers as launcher
from lightning_hetero.lightning_compat.launchers import _PARENT, _ending_with_parent
launcher.GRACE_S = 0.5
done = os.memfd_create("done")
os.pwrite(done, (1).to_bytes(8, "little"), 0)
os.environ[_PARENT] = f"{os.getpid()}:{done}"
os.environ["LOCAL_RANK"] = "1"
if os.fork() == 0:
    with _ending_with_parent(2):
        open("inside", "w").close()
        time.sleep(60)
os.environ["LOCAL_RANK"] = "4"
if os.fork() == 0:
    reads, writes = os.pipe()
    os.close(reads)
    sys.stderr = open(writes, "w")  # a screen that has gone with rank 0
    with _ending_with_parent(2):
        open("inside again", "w").close()
        time.sleep(60)
os.environ["LOCAL_RANK"] = "2"
if os.fork() == 0:
    with _ending_with_parent(2):
        open("inside too", "w").close()
        while os.getppid() != 1 and not os.path.exists("dead"): time.sleep(.01)
    time.sleep(1)  # finished in time; what comes after is its own business
    open("finished", "w").close()
    os._exit(0)
os.environ["LOCAL_RANK"] = "3"
if os.fork() == 0:
    with _ending_with_parent(1):  # of which rank 0 has come to the end
        open("inside as well", "w").close()
        time.sleep(2)
    open("finished as well", "w").close()
    os._exit(0)
while not all(map(os.path.exists, ("inside", "inside too", "inside as well", "inside again"))): time.sleep(.01)
open("dead", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_children_end_with_their_launcher_unless_they_or_it_have_finished(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PARENT_DIES)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.run(["script.py"], tmp_path, environ, 60.0)  # to the end of the last that holds its output
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == "local rank 0 is gone; local rank 1 ends, too\n"
    assert (tmp_path / "finished").exists() and (tmp_path / "finished as well").exists()


# ---- process launcher -----------------------------------------------------------------------------------------


def rank_of() -> int:
    return int(os.environ["LOCAL_RANK"])


def ended(rank: int) -> bool:
    """Whether the launcher has seen the end of another rank's process, which has noted its number."""
    file = Path(f"rank-{rank}")
    return file.exists() and not Path("/proc", file.read_text()).exists()


def play(codes: list[str]) -> str:
    """What a rank does: wait for its turn, seconds or ``>`` and the rank that ends first, then die, fail, or return."""
    do, turn = codes[rank_of()].split()
    note = Path(f"noted-{rank_of()}")
    note.write_text(str(os.getpid()))
    note.rename(f"rank-{rank_of()}")
    while turn.startswith(">") and not ended(int(turn[1:])):
        time.sleep(0.01)
    time.sleep(0.0 if turn.startswith(">") else float(turn))
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "fail":
        raise ValueError(f"the cause on rank {rank_of()}")
    if do == "exit":
        os._exit(5)
    if do == "left":
        raise LeftBehindError("silent for 9 s")
    if do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return f"from rank {rank_of()}"


def processes(codes: list[str], tolerates: Any) -> ProcessLauncher:
    strategy: Any = SimpleNamespace(
        num_processes=len(codes), cluster_environment=SimpleNamespace(main_port=1), accelerator=None,
        on_exception=lambda error: None,
    )  # fmt: skip
    return ProcessLauncher(strategy, "fork", tolerates=tolerates)


@pytest.fixture
def quiet_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    warnings.filterwarnings("ignore", r".*use of fork\(\) may lead to deadlocks", DeprecationWarning)  # Python 3.12


def in_rank_zero() -> bool:
    while "LOCAL_RANK" not in os.environ:  # asked while this process begins: another one may have died at once
        time.sleep(0.001)
    return rank_of() == 0


@pytest.mark.parametrize("codes", [["end 1.5", "die 0", "end .6"], ["end 1.5", "die .3", "die 0"]], ids=["one", "two"])
def test_processes_go_on_without_one(codes: list[str], quiet_forks: None, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="lightning_hetero")
    own = processes(codes, in_rank_zero)
    assert own.launch(play, codes) == "from rank 0"
    dead = {rank for rank, code in enumerate(codes) if code.startswith("die")}
    assert own.tolerated == dead and all(not p.is_alive() for p in own.procs)
    assert {r.getMessage().split(";")[0] for r in caplog.records} == {
        f"local rank {rank} was killed by SIGKILL" for rank in dead
    }


@pytest.mark.parametrize("codes", [["end .6", "left 0"], ["end 0", "left .4"], ["end 0", "stop 0"]], ids=str)
def test_processes_go_on_without_one_that_was_silent(codes: list[str], quiet_forks: None) -> None:
    """It ends by itself, also after rank 0; or it is still stopped when rank 0 has come to the end."""
    own = processes(codes, lambda: False)
    assert own.launch(play, codes) == "from rank 0"
    assert own.tolerated == {1} and all(not p.is_alive() for p in own.procs)


@pytest.mark.parametrize(
    ("codes", "tolerates", "error", "message"),
    [
        (["end 60", "die 0", "end 60"], False, mp.ProcessExitedException, "process 1 terminated with signal SIGKILL"),
        (["die 0", "end 60", "end 60"], True, mp.ProcessExitedException, "process 0 terminated with signal SIGKILL"),
        (["end 60", "end 60", "fail 0"], True, mp.ProcessRaisedException, "ValueError: the cause on rank 2"),
        (["fail >1", "fail 0", "end 60"], True, mp.ProcessRaisedException, "ValueError: the cause on rank 1"),
        (["end 60", "exit 0"], True, mp.ProcessExitedException, "process 1 terminated with exit code 5"),
        (["end 0", "die >0"], True, mp.ProcessExitedException, "process 1 terminated with signal SIGKILL"),
        (["die >1", "die 0", "end 60"], False, mp.ProcessExitedException, "process 1 terminated with signal SIGKILL"),
    ],
    ids=["not tolerated", "rank 0", "exception", "the first exception", "exit code", "after rank 0", "the first death"],
)
def test_processes_end_together_with_the_cause(
    codes: list[str], tolerates: bool, error: type[Exception], message: str, quiet_forks: None
) -> None:
    own = processes(codes, lambda: tolerates)
    with pytest.raises(error, match=message):
        own.launch(play, codes)
    assert all(not p.is_alive() for p in own.procs) and own.tolerated == set()


def test_a_child_that_comes_too_late_does_not_wait_for_the_dead(monkeypatch: Any) -> None:
    """Rank 0 died while it imported: nobody would meet it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    monkeypatch.setenv(launcher._PARENT, f"{process.pid}:-1")
    while not launcher.has_ended(process.pid, 0.0):  # soon it waits to be reaped
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="local rank 0, which started this process, has ended"):
            launcher._ending_with_parent(1).__enter__()
        process.wait()
    monkeypatch.setenv(launcher._PARENT, f"{os.getpid()}:-1")
    with launcher._ending_with_parent(1):  # a child of a child of ours
        pass


def test_a_late_answer_is_not_that_to_the_next_question(monkeypatch: Any) -> None:
    monkeypatch.setattr(process_launchers, "_ANSWER_S", 0.2)
    questions, answers = mp.Pipe()
    alive, _end = mp.Pipe()
    rank_zero = SimpleNamespace(sentinel=alive)
    assert not process_launchers._tolerated(questions, rank_zero)  # it takes its time
    late = answers.recv_bytes() + b"1"
    answers.send_bytes(late)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process_launchers._tolerated, questions, rank_zero)
        answers.send_bytes(answers.recv_bytes() + b"0")
        assert asked.result() is False


def test_a_rank_zero_that_cannot_say_tolerates_nothing(quiet_forks: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(process_launchers, "_ANSWER_S", 0.2)
    codes = ["end 60", "die .1"]
    for tolerates in (lambda: 1 / 0, lambda: time.sleep(60)):
        with pytest.raises(mp.ProcessExitedException, match="process 1 terminated"):
            processes(codes, tolerates).launch(play, codes)


# ---- private names --------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_private_names_of_lightning() -> None:
    script, process = _SubprocessScriptLauncher, _MultiProcessingLauncher
    assert parameters(script.__init__) == ["self", "cluster_environment", "num_processes", "num_nodes"], VERSIONS
    assert parameters(script.launch) == parameters(ScriptLauncher.launch), VERSIONS
    assert parameters(script._call_children_scripts) == ["self"], VERSIONS
    assert "procs" in inspect.getsource(script._call_children_scripts), VERSIONS
    assert parameters(process.__init__) == ["self", "strategy", "start_method"], VERSIONS
    assert parameters(process.launch) == parameters(ProcessLauncher.launch), VERSIONS
    wrapped = ["self", "process_idx", "trainer", "function", "args", "kwargs", "return_queue", "global_states"]
    assert parameters(process._wrapping_function) == wrapped, VERSIONS
    assert parameters(process._recover_results_in_main_process) == ["self", "worker_output", "trainer"], VERSIONS
    assert parameters(launcher._set_num_threads_if_needed) == ["num_processes"], VERSIONS
    for check in (process_launchers._check_bad_cuda_fork, process_launchers._check_missing_main_guard):
        assert parameters(check) == [], VERSIONS
    state = process_launchers._GlobalStateSnapshot.capture()
    state.restore()


def test_what_lightnings_launch_does_before_the_join() -> None:
    """Ours repeats it; a change there must be looked at."""
    source = inspect.getsource(_MultiProcessingLauncher.launch)
    for line in (
        "_check_bad_cuda_fork()",
        "_check_missing_main_guard()",
        'os.environ["MASTER_PORT"] = str(self._strategy.cluster_environment.main_port)',
        "process_args = [trainer, function, args, kwargs, return_queue, global_states]",
        "self._recover_results_in_main_process(worker_output, trainer)",
        "return worker_output.trainer_results",
    ):
        assert line in source, VERSIONS
    context = mp.start_processes(abs, nprocs=1, join=False, start_method="fork")
    assert context is not None and list(context.sentinels.values()) == [0] and len(context.processes) == 1, VERSIONS
    assert context.join(), VERSIONS
