"""No wait without a bound: every call of the package that may block has a deadline, or stands here with its reason.

What is looked for has no deadline to be seen: ``join()``, ``wait()``, ``get()``, ``acquire()``, ``result()`` without an
argument, operations on sockets and pipes, ``select`` without a limit, processes that are waited for, loops that sleep
until something has happened. Collectives are not: a process group has a timeout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_hetero

PACKAGE = Path(lightning_hetero.__file__).resolve().parent

# What bounds a wait that has no deadline of its own, by file and function.
BOUNDED: dict[str, set[str]] = {
    "the device's own work, which waits for nobody": {
        "federated/fit/local_steps.py::LocalSteps.settle",
        "measure/step_clock.py::StepProbe.arm",
        "measure/step_clock.py::Stopwatch.passed_s",
        "measure/step_clock.py::Stopwatch.wait",
        "measure/timer.py::Timer.seconds",
        "pipeline/runtime/execute/stage_link.py::StageLink._let_out",
        "pipeline/runtime/execute/direct_ways.py::DirectWays.prepare",
        "pipeline/runtime/execute/pace.py::BusyTime.busy_s",
        "pipeline/runtime/measure/layer_clock.py::_total",
        "stale/fit/step_loop.py::StepLoop._push.compute_s",
        "stale/runtime/work/gradient_writer.py::GradientWriter.detach",
        "stale/runtime/work/gradient_writer.py::Image.wait",
    },
    "a process group's timeout": {
        "balanced/decide/controller.py::ShareController._receive",
        "callbacks/straggler.py::StragglerMonitor._compare_told",
        "measure/link_probe.py::LinkProbe._settle",
        "pipeline/runtime/ownership/owner_groups.py::spread",
        "transport/side_channel.py::SideChannel.all_gather_row.wait",
        "transport/side_channel.py::PartChannel.all_gather_row",
        "transport/side_channel.py::SideChannel.sum_async.wait",
    },
    "as the caller says, by default a process group's timeout": {
        "transport/objects.py::gathered",
        "transport/objects.py::receive",
        "transport/objects.py::send",
    },
    "waited for by the failure board, or before": {
        "lightning_compat/process_launchers.py::ProcessLauncher._end_all",
        "lightning_compat/process_launchers.py::ProcessLauncher._join",
        "lightning_compat/process_launchers.py::ProcessLauncher.launch",
        "lightning_compat/process_launchers.py::_tolerated",
        "pipeline/fit/logs.py::StepLogs._start_sum.wait",
        "pipeline/fit/place.py::RankInPlan.look",
        "pipeline/fit/run.py::PipelineRun.finish",
        "pipeline/runtime/ownership/gradients.py::Bucket.collect",
        "pipeline/runtime/ownership/gradients.py::GradientSync._total",
        "base/elastic/exchange.py::ElasticExchange._summed",
        "base/elastic/exchange.py::ElasticExchange._wait",
        "transport/failures.py::FailureBoard._poll",
        "transport/failures.py::FailureBoard.wait",
        "transport/failures.py::FailureBoard.wait_for_peer",
        "transport/roll_call.py::GuestRollCall._too_late",
        "transport/run_store.py::RunStore.ask",
        "transport/run_store.py::_within",
    },
    "another thread looks at the clock and at the failure board, and closes what this one waits for": {
        "lightning_compat/process_launchers.py::ProcessLauncher._answer",
        "pipeline/runtime/execute/direct_ways.py::DirectWay._carried",
        "pipeline/runtime/execute/stage_link.py::StageLink._announce",
        "pipeline/runtime/execute/stage_link.py::StageLink._clear",
        "pipeline/runtime/execute/stage_link.py::StageLink._go_out",
        "pipeline/runtime/execute/stage_link.py::StageLink._next",
        "pipeline/runtime/execute/stage_link.py::StageLink._rest",
        "pipeline/runtime/execute/stage_link.py::StageLink._send_on",
        "pipeline/runtime/execute/stage_link.py::StageLink._take_in",
    },
    "a daemon thread's own, without an end": {"transport/awake.py::_ProcessClock._look"},
    "the run's store, which answers in time or raises; a rank that is silent is not waited for": {
        "base/elastic/admission.py::Admission._come_together",
        "base/elastic/join.py::JoiningRank._ask",
        "base/elastic/join.py::JoiningRank.come",
        "base/elastic/join.py::JoiningRank.wait",
    },
    "the server's process is watched by a thread of its own, which ends it": {
        "stale/runtime/serve/thread_shards.py::ThreadShards.close",
        "stale/runtime/serve/thread_shards.py::ThreadShards.run",
    },
    "the link gives up when the server shows no progress": {
        "stale/runtime/work/worker.py::Worker._call",
        "stale/runtime/work/worker.py::Worker.abort",
    },
    "the socket waits for a beat at most, or not at all": {
        "transport/run_store.py::HostLines.ended",
        "transport/run_store.py::_read",
        "transport/run_store.py::guest_line",
        "transport/listener.py::Listener._read",
        "transport/sockets.py::accept_from",
        "transport/sockets.py::connect_to_unix",
        "transport/sockets.py::receive_into",
        "transport/sockets.py::receive_welcome",
        "transport/sockets.py::wait_in_turns",
    },
    "a rank that wants to join waits as long as there is a run; the members, as long as it is heard of": {
        "base/elastic/admission.py::Admission._come_together",
        "base/elastic/join.py::JoiningRank._ask",
        "base/elastic/join.py::JoiningRank.come",
        "base/elastic/join.py::JoiningRank.wait",
    },
    "memory is copied": {"transport/seqlock.py::copy_bytes"},
    "another function of that name, which stands here if it waits": {
        "pipeline/runtime/ownership/stand_ins.py::StandIn.__torch_dispatch__",
    },
}

# Deadlines by another clock than `awake_s`, and why.
OTHER_CLOCKS = {
    "measure/link_probe.py::LinkProbe.measure": "how long it measures",
    "measure/probe.py::measure_speed": "its own work",
    "measure/timer.py::Timer.warm_up": "its own work",
    "pipeline/runtime/measure/around_backbone.py::_Bench.runs": "its own work",
    "transport/failures.py::FailureBoard._poll": "how often it looks",
    "transport/listener.py::Listener.events": "accuses nobody: it says how long to wait for news of anybody",
}

ALWAYS = {"recv_into", "recv_fds", "recvmsg", "recvfrom", "sendall", "recv_bytes"}
NO_ARGUMENT = {"join", "wait", "get", "acquire", "result", "select", "communicate", "recv", "accept"}
PROCESSES = {"run", "call", "check_call", "check_output"}
DEADLINE = re.compile(r"(deadline|end|early|limit|most|waited)_s|timeout")
CONSTANT = re.compile(r"_?[A-Z]\w*")  # a class, or a variable of a context: no queue


def name_of(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def waits(call: ast.Call) -> bool:
    """Whether a call may wait without end, as far as that can be seen."""
    name, args = name_of(call.func), [arg for arg in call.args if not is_none(arg)]
    given = {keyword.arg for keyword in call.keywords if not is_none(keyword.value)}
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if "timeout" in given or "timeout_s" in given:
        return False
    if name in ALWAYS:
        return True
    if name == "recv":  # of torch.distributed, of a pipe or a socket; a group's own returns what is waited for
        return len(args) < 3 or owner in ("dist", "torch.distributed")
    if name in NO_ARGUMENT and not args and not given:
        return (bool(owner) or name == "wait") and not CONSTANT.fullmatch(owner)
    if name == "wait":  # of works, and of several futures or connections
        return ast.unparse(call).endswith("(FOREVER)") or (not owner and len(args) < 2)
    if name == "call" and owner.endswith("link"):
        return True
    if owner == "subprocess" and name in PROCESSES:
        return True
    if name == "waitpid":
        return "WNOHANG" not in ast.unparse(call)
    if name == "create_connection":
        return len(args) < 2
    if name == "connect":
        return "socket" in owner or "connection" in owner
    return (name == "shutdown" and "wait" in given) or ast.unparse(call).endswith("setblocking(True)")


def is_of_the_wall(node: ast.expr) -> bool:
    return ast.unparse(node) in ("time.monotonic()", "time.time()", "time.perf_counter()")


class Waits(ast.NodeVisitor):
    """Collects where a module waits."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self.clocks: set[str] = set()  # where a deadline is reckoned by another clock than `awake_s`
        self.within: list[str] = []
        self.visit(tree)

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.within.append(node.name)
        self.generic_visit(node)
        self.within.pop()

    visit_FunctionDef = visit_ClassDef = _enter  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> None:
        if waits(node):
            self.found.add(".".join(self.within))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add) and (is_of_the_wall(node.left) or is_of_the_wall(node.right)):
            self.clocks.add(".".join(self.within))
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        text = ast.unparse(node)
        if "time.sleep(" in text and not DEADLINE.search(text.replace("time.sleep(", "")):
            self.found.add(".".join(self.within))
        self.generic_visit(node)


def looked_at(folder: Path) -> Iterator[tuple[str, Waits]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), Waits(ast.parse(path.read_text(encoding="utf-8")))


def waiting(folder: Path) -> set[str]:
    return {f"{place}::{where}" for place, seen in looked_at(folder) for where in seen.found}


def test_no_wait_is_without_a_bound() -> None:
    found, known = waiting(PACKAGE), set[str]().union(*BOUNDED.values())
    unknown = sorted(found - known)
    assert unknown == [], "give it a deadline by `awake_s`, or write down what bounds it"
    assert sorted(known - found) == [], "does not wait any more"


def test_others_are_waited_for_by_one_clock() -> None:
    found = {f"{place}::{where}" for place, seen in looked_at(PACKAGE) for where in seen.clocks}
    unknown = sorted(found - OTHER_CLOCKS.keys())
    assert unknown == [], "reckon it by `awake_s`: time in which this process was stopped does not count"
    assert sorted(OTHER_CLOCKS.keys() - found) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("thread.join()", True), ("thread.join(1.0)", False), ("', '.join(names)", False),
        ("over.wait()", True), ("over.wait(BEAT_S)", False), ("work.wait(FOREVER)", True), ("wait(futures)", True),
        ("wait([connection], 1.0)", False), ("wait([connection], None)", True), ("work.wait(None)", True),
        ("queue.get()", True), ("queue.get(timeout=1.0)", False), ("names.get(key)", False),
        ("lock.acquire()", True), ("lock.acquire(blocking=False)", False), ("future.result()", True),
        ("selector.select()", True), ("selector.select(0.0)", False), ("connection.recv(8)", True),
        ("door.accept()", True), ("dist.recv(tensor, 0, group)", True), ("wire.recv([room], there, tag)", False),
        ("self.link.call(request)", True), ("route.call(3)", False), ("process.communicate()", True),
        ("subprocess.run(command)", True), ("subprocess.run(command, timeout=3.0)", False),
        ("os.waitpid(pid, 0)", True), ("os.waitpid(pid, os.WNOHANG)", False),
        ("threads.shutdown(wait=True)", True), ("connection.setblocking(True)", True),
        ("while not there():\n        time.sleep(0.1)", True),
        ("while awake_s() < deadline_s:\n        time.sleep(0.1)", False),
    ],
)  # fmt: skip
def test_a_planted_wait_is_found(tmp_path: Path, planted: str, found: bool) -> None:
    (tmp_path / "planted.py").write_text(f"class Planted:\n  def waits(self):\n    {planted}\n")
    assert waiting(tmp_path) == ({"planted.py::Planted.waits"} if found else set())


def test_a_planted_deadline_by_another_clock_is_found() -> None:
    assert Waits(ast.parse("def f():\n    end_s = time.monotonic() + 3.0")).clocks == {"f"}
    assert Waits(ast.parse("def f():\n    end_s = awake_s() + 3.0")).clocks == set()
