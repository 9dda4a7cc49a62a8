"""A pytest plugin: Lightning's tests run with another class in the place of `DDPStrategy`, each in its own processes.

Which class and how many ranks stand in the environment (`CLASS`, `RANKS`), because Lightning's launchers start
children that must do the same. See ``python -m benchmarks.drop_in --help``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.transport.awake import awake_s

CLASS = "DROP_IN_CLASS"  # class path, e.g. lightning_hetero.LoadBalancedStrategy
RANKS = "DROP_IN_RANKS"  # 1, or 2: every test in two processes, `Trainer()` means both of them
ONLY = "DROP_IN_ONLY"  # a file with a list of tests to run, or null: all
LIMIT = "DROP_IN_LIMIT_S"  # longest a test may take
_PRELOADED = (
    "torch._dynamo", "torch.utils.tensorboard", "torch.distributed.nn", "torch.utils.flop_counter", "rich.table",
    "rich.progress", "psutil", "lightning.pytorch.loggers.tensorboard", "tensorboard.compat.tensorflow_stub",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook", "torch.distributed.optim",
)  # fmt: skip
_GRACE_S = 5.0  # for the second rank, after the first has failed

_seen = {"ran": False, "ranks": 0}  # in a test's own process: was the strategy set up, and for how many ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky(reruns): of pytest-rerunfailures, whose server forks would inherit")
    os.environ["PL_RUN_STANDALONE_TESTS"] = "1" if _ranks() > 1 else "0"  # read when test modules are imported
    _replace_strategy()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    os.environ["PL_RUN_STANDALONE_TESTS"] = "0"  # else Lightning's conftest drops all other tests
    path = os.environ.get(ONLY)
    only = None if path is None else json.loads(Path(path).read_text())
    only = None if only is None else set(only)
    chosen = [item for item in items if only is None or item.nodeid in only]
    items[:] = [item for item in chosen if isinstance(item, pytest.Function)]  # no doctests


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imports what a first fit imports, once instead of in every test's process."""
    if not session.config.option.collectonly:
        for name in _PRELOADED:
            try:
                importlib.import_module(name)
            except ImportError:
                continue


# ---- which strategy ---------------------------------------------------------------------------------------------


def _ranks() -> int:
    return int(os.environ.get(RANKS, "1"))


def _replace_strategy() -> None:
    import lightning.pytorch.strategies as strategies
    from lightning.pytorch.strategies import StrategyRegistry, ddp
    from lightning.pytorch.strategies.launchers import multiprocessing, subprocess_script
    from lightning.pytorch.trainer.connectors import accelerator_connector

    stock = ddp.DDPStrategy
    module, _, name = os.environ.get(CLASS, "lightning.pytorch.strategies.DDPStrategy").rpartition(".")
    ours = getattr(importlib.import_module(module), name)
    for alias in [alias for alias, entry in StrategyRegistry.items() if entry["strategy"] is stock]:
        StrategyRegistry[alias]["strategy"] = ours
    strategies.DDPStrategy = ddp.DDPStrategy = ours  # type: ignore[misc]

    connector: Any = accelerator_connector._AcceleratorConnector
    choose, check_devices = connector._choose_strategy, connector._check_device_config_and_set_final_flags
    popen, spawn = subprocess_script._SubprocessScriptLauncher, multiprocessing._MultiProcessingLauncher
    observe = subprocess_script._launch_process_observer
    popen_launch, spawn_launch, set_up = popen.launch, spawn.launch, ours.setup_environment

    def choose_strategy(self: Any) -> Any:
        on_cpu = all(getattr(device, "type", None) == "cpu" for device in self._parallel_devices)
        return "ddp" if on_cpu and self._accelerator_flag == "cpu" else choose(self)

    def check_device_config(self: Any, devices: Any, num_nodes: Any) -> None:
        plain = self._strategy_flag in ("auto", "ddp") or type(self._strategy_flag) is ours
        if _ranks() > 1 and plain and self._accelerator_flag == "cpu" and devices in ("auto", 1) and num_nodes == 1:
            devices = _ranks()
        check_devices(self, devices=devices, num_nodes=num_nodes)

    def launch_script(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_processes > 1 and not self.cluster_environment.creates_processes_externally:
            pytest.skip("several ranks that are started from outside: run with two ranks")
        return popen_launch(self, function, *args, **kwargs)

    def launch_processes(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if _ranks() > 1:
            pytest.skip("starts its ranks itself: run with one rank")
        if isinstance(self._strategy, ours):
            _seen["ran"] = True
            _seen["ranks"] = max(_seen["ranks"], self._strategy.num_processes)
        return spawn_launch(self, function, *args, **kwargs)

    def setup_environment(self: Any) -> Any:
        _seen["ran"] = True
        _seen["ranks"] = max(_seen["ranks"], self.world_size)
        return set_up(self)

    def observe_children(processes: list[Any]) -> None:
        if processes:  # the observer of no child is looked at every five seconds, and every test waits for it
            observe(processes)

    subprocess_script._launch_process_observer = observe_children  # type: ignore[assignment]
    connector._choose_strategy = choose_strategy
    connector._check_device_config_and_set_final_flags = check_device_config
    popen.launch, spawn.launch = launch_script, launch_processes
    ours.setup_environment = setup_environment


# ---- a test in its own processes --------------------------------------------------------------------------------


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """The same folder on all ranks, as on a cluster's file system."""
    path = Path(os.environ["DROP_IN_FOLDER"]) / "tmp"
    path.mkdir(exist_ok=True)
    yield path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.excinfo is not None:
        report.user_properties.append(("cause", _cause(call.excinfo)))
    return report


def _cause(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """Returns "refused", if one of our own files raised on purpose, else "failed"; and the last line."""
    path = str(excinfo.traceback[-1].path) if excinfo.traceback else ""
    text = str(excinfo.value)
    own = "lightning_hetero/" in path or "lightning_hetero/" in text.rsplit("File ", 1)[-1].split("\n", 1)[0]
    refused = own and (
        isinstance(excinfo.value, TypeError | ValueError) or text.rstrip().rsplit("\n", 1)[-1].startswith(_REFUSALS)
    )
    last = text.strip().splitlines()[-1] if "Traceback (most recent" in text else " ".join(text.split())
    return f"{'refused' if refused else 'failed'}: {type(excinfo.value).__name__}: {last[:300]}"


_REFUSALS = ("TypeError", "ValueError")


def pytest_runtest_protocol(item: pytest.Item) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if any(mark.name == "skip" or (mark.name == "skipif" and mark.args == () and mark.kwargs.get("condition"))
           for mark in item.iter_markers()):  # fmt: skip
        from _pytest.runner import runtestprotocol

        awake_s()  # one thread per process, for its whole life; Lightning's tests look for new ones after each test
        runtestprotocol(item, nextitem=None, log=True)
    else:
        for report in _run_in_processes(item):
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_in_processes(item: pytest.Item) -> list[pytest.TestReport]:
    """Runs a test in one forked process per rank; returns the reports of the first rank that did not pass."""
    ranks, limit_s = _ranks(), float(os.environ.get(LIMIT, "40"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="drop_in_", ignore_cleanup_errors=True) as folder:
        started_s = time.monotonic()
        pids = {_fork(item, rank, ranks, port, Path(folder)): rank for rank in range(ranks)}
        running, deadline = dict(pids), started_s + limit_s
        while running and time.monotonic() < deadline:
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    rank = running.pop(pid)
                    if status != 0 or not _passed(_load(item, Path(folder), rank)):
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.005)
        for pid in pids:  # with whatever the test has started and left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)
        results = [_load(item, Path(folder), rank) for rank in range(ranks)]
        took_s = time.monotonic() - started_s
        known = [result for result in results if result is not None]
        failed = [result for result in known if not _passed(result)]
        if failed:
            return failed[0]["reports"]
        if len(known) < ranks:
            rank = results.index(None)
            over = took_s >= limit_s
            text = f"rank {rank} " + (f"was not done after {limit_s:g} s" if over else "died")
            output = (Path(folder) / f"output-{rank}").read_text(errors="replace")[-4000:]
            return [_lost(item, text, output, took_s)]
        return known[0]["reports"]


def _passed(result: dict[str, Any] | None) -> bool:
    return result is not None and all(report.outcome != "failed" for report in result["reports"])


def _lost(item: pytest.Item, text: str, output: str, took_s: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", when="call",
        longrepr=f"{text}\n{output}", duration=took_s, user_properties=[("cause", f"failed: {text}")],
    )  # fmt: skip


def _load(item: pytest.Item, folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        stored = pickle.loads((folder / f"reports-{rank}").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    hook = item.config.hook
    reports = [hook.pytest_report_from_serializable(config=item.config, data=data) for data in stored["reports"]]
    for report in reports:
        report.user_properties.append(("seen", stored["seen"]))
    return {"reports": reports}


def _fork(item: pytest.Item, rank: int, ranks: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["DROP_IN_FOLDER"] = str(folder)
        own = folder / f"cwd-{rank}"
        own.mkdir()
        os.chdir(own)
        if ranks > 1:
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0",
                WORLD_SIZE=str(ranks),
            )  # fmt: skip
            from lightning.fabric.utilities.rank_zero import rank_zero_only

            rank_zero_only.rank = rank
        from _pytest.runner import runtestprotocol

        awake_s()  # one thread per process, for its whole life; Lightning's tests look for new ones after each test
        reports = runtestprotocol(item, nextitem=None, log=False)
        hook = item.config.hook
        data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
        stored = pickle.dumps({"reports": data, "seen": dict(_seen)})
        (folder / f"reports-{rank}.part").write_bytes(stored)
        (folder / f"reports-{rank}.part").rename(folder / f"reports-{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(3)


# ---- what came out ----------------------------------------------------------------------------------------------


class _Results:
    """Writes one line per test: outcome, whether the strategy ran and with how many ranks, cause."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = self._lines.setdefault(report.nodeid, {"outcome": "passed", "ranks": 0, "s": 0.0})
        line["s"] = round(line["s"] + report.duration, 2)
        properties = dict(report.user_properties)
        if "seen" in properties:
            line["ranks"] = properties["seen"]["ranks"] if properties["seen"]["ran"] else 0
        xfailed = hasattr(report, "wasxfail")
        if report.outcome == "skipped" and line["outcome"] == "passed":
            line["outcome"] = "xfailed" if xfailed else "skipped"
        elif report.outcome == "failed" and line["outcome"] in ("passed", "skipped"):
            cause = properties.get("cause", "failed: ?")
            line.update(outcome=cause.split(":", 1)[0], cause=cause.split(": ", 1)[1], when=report.when)

    def pytest_runtest_logfinish(self) -> None:  # also what an interrupted run leaves behind is of use
        if len(self._lines) % 20 == 0:
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        Path(self._path).write_text(json.dumps(self._lines, indent=1, sort_keys=True) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    path = os.environ.get("DROP_IN_RESULTS")
    if path:
        session.config.pluginmanager.register(_Results(path), "drop_in_results")
