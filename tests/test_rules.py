"""Rules of CONTRIBUTING.md that no linter knows; each check is shown to bite by planted cases."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

import lightning_hetero
from lightning_hetero import lightning_compat

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(lightning_hetero.__file__).resolve().parent


@cache
def sources(folder: Path) -> list[tuple[str, ast.Module]]:
    """Every Python file below ``folder``, parsed, with its path from there."""
    paths = sorted(folder.rglob("*.py"))
    return [
        (path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths
    ]


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted name of all that is imported anywhere in a module, under ``TYPE_CHECKING``, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


# ---- test modules share through kits ---------------------------------------------------------------------------


def of_test_modules(tree: ast.Module) -> list[str]:
    names = (name for name in imported(tree) if name.startswith("tests."))
    return [name for name in names if re.search(r"\.test_\w+(\.|$)", name)]


def test_no_test_module_is_imported() -> None:
    found = {place: names for place, tree in sources(TESTS) if (names := of_test_modules(tree))}
    assert found == {}


@pytest.mark.parametrize(
    "planted",
    [
        "from tests.ranks.data.test_loader import Pairs",
        "from tests.ranks.data import test_loader",
        "import tests.pure.test_types as types",
    ],
)
def test_an_imported_test_module_is_found(planted: str) -> None:
    assert of_test_modules(ast.parse(f"def late():\n    {planted}")) != []
    assert of_test_modules(ast.parse("from tests.ranks.data.kit import test_data, Pairs\nimport test_x")) == [
        "tests.ranks.data.kit.test_data"
    ]


# ---- no test sleeps to prove a speed ---------------------------------------------------------------------------

POLL_S = 0.05  # at most so long between two looks
STALL_S = 60.0  # at least so long: only a kill ends it, as a test may take two minutes

# A sleep beyond these is allowed for a reason only: by folder and function, or name of a program in a string.
SLEEPS = {
    "e2e::SCRIPT.Noted.training_step": "a device's work: a join falls into its middle",
    "e2e/stale::SCRIPT.Model.training_step": "a device's work: deaths and joins fall into its middle",
    "e2e/stale::SCRIPT.happen": "a stopped process needs somebody who wakes it",
    "faults::": "the others' imports take their time, and rank 0 is dead before they end",
    "faults::Model.training_step": "a device's work: faults fall into its middle",
    "faults::Slow.__reduce__": "a checkpoint's writing takes its time: faults fall into its middle",
    "ranks/base::test_a_job_that_was_suspended_as_a_whole_goes_on.suspend": "the job is suspended for that long",
    "ranks/lightning_compat::PARENT_DIES": "outlives the time after which it would be ended",
    "ranks/lightning_compat::play": "ranks die in turns, the next within the time that the first one leaves",
    "ranks/measure::MeetingPeer.loss": "a device's work: the one place where real time is measured",
    "ranks/measure::Peer.loss": "a device's work, likewise",
    "ranks/measure::Peer.on_after_backward": "a device's work, likewise",
    "ranks/measure::_SlowGradient.backward": "a device's work, likewise",
    "ranks/measure::sleep_s": "a layer's work, in ranks of unequal speed that wait for one another in every layer",
    "ranks/pipeline::Sleepy.forward": "a device's work that nobody has announced: what the controller is there for",
    "ranks/pipeline::Unhurried.validation_step": "the others wait, and must not give up",
    "ranks/stale::Diary.training_step": "a device's work: ranks of unequal speed",
    "ranks/stale::Killer.on_train_batch_end": "the others come to a meeting, which says so to nobody",
    "simgpu/sim::_sleep_until": "a simulated device's work: what torch.cuda._sleep asks for",
    "ranks/stale::Slow.on_before_backward": "a device's work: ranks of unequal speed",
    "ranks/stale::Watched.training_step": "a device's work: ranks of unequal speed",
    "ranks/transport::SUSPENDED": "a stopped process needs somebody who wakes it",
    "ranks/transport::SUSPENDED.main": "likewise",
    "ranks/transport::_STOPPED": "a stopped process needs somebody who wakes it",
    "ranks/transport::forks_and_waits": "a child that only a kill ends",
}


def constants(tree: ast.Module) -> dict[str, float]:
    """Numbers that the module's names stand for."""
    return {
        target.id: float(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


class Sleeps(ast.NodeVisitor):
    """Collects where a module sleeps, also inside of programs that it holds as text.

    Left out are looks at a condition, at most `POLL_S` apart in a ``while`` loop, and what hangs for `STALL_S` or more.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.known = constants(tree)
        self.found: list[str] = []
        self.within: list[str] = []
        self.loops = 0
        self.called: set[ast.AST] = set()
        self.visit(tree)

    def _enter(self, name: str, node: ast.AST) -> None:
        loops, self.loops = self.loops, 0
        self.within.append(name)
        self.generic_visit(node)
        self.within.pop()
        self.loops = loops

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node.name, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.within:
            self.generic_visit(node)
        else:
            self._enter(ast.unparse(node.targets[0]), node)

    def visit_While(self, node: ast.While) -> None:
        self.loops += 1
        self.generic_visit(node)
        self.loops -= 1

    def visit_Call(self, node: ast.Call) -> None:
        if self._sleeps(node.func):
            self.called.add(node.func)
            seconds = self._seconds(node)
            if not (self.loops and seconds <= POLL_S) and not seconds >= STALL_S:
                self.found.append(".".join(self.within))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._sleeps(node) and node not in self.called:  # given to somebody who calls it
            self.found.append(".".join(self.within))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "time" and any(name.name == "sleep" for name in node.names):
            self.found.append("from time import sleep")  # write time.sleep, which is found

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or not re.search(r"\bsleep(\(| +[\d.])", node.value):
            return
        try:
            program = ast.parse(textwrap.dedent(node.value))
        except SyntaxError:  # of a shell, or a piece of one
            self.found.append(".".join(self.within))
        else:
            self.generic_visit(program)

    @staticmethod
    def _sleeps(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == "sleep"
            and isinstance(node.value, ast.Name)
            and node.value.id in ("time", "asyncio")
        )

    def _seconds(self, node: ast.Call) -> float:
        (argument,) = node.args
        if isinstance(argument, ast.Name):
            return self.known.get(argument.id, 1.0)
        return float(argument.value) if isinstance(argument, ast.Constant) else 1.0  # type: ignore[arg-type]


def sleeping(folder: Path) -> set[str]:
    return {
        f"{place.rpartition('/')[0]}::{where}"
        for place, tree in sources(folder)
        if place not in ("test_rules.py", "test_waits.py")
        for where in Sleeps(tree).found
    }


def test_no_test_sleeps_without_a_reason() -> None:
    found = sleeping(TESTS)
    assert found - SLEEPS.keys() == set(), (
        "wait for an event, give a clock as an argument, or write down the reason"
    )
    assert SLEEPS.keys() - found == set(), "does not sleep any more"


@pytest.mark.parametrize(
    ("planted", "where"),
    [
        ("def test_fast():\n    time.sleep(0.2)", "test_fast"),
        ("class Slow:\n    def forward(self):\n        time.sleep(self.step_s)", "Slow.forward"),
        ("def test_poll():\n    while busy():\n        time.sleep(0.5)", "test_poll"),
        ("def test_once():\n    time.sleep(0.01)", "test_once"),
        ("def test_thread():\n    Thread(target=time.sleep, args=(0.2,)).start()", "test_thread"),
        ("from time import sleep", "from time import sleep"),
        ("PROGRAM = 'import time\\nif True:\\n    time.sleep(1)'", "PROGRAM"),
        ("def test_shell():\n    run('sleep 1.5; kill 7')", "test_shell"),
        ("def test_hang():\n    time.sleep(60)", None),
        ("WAIT_S = 0.01\ndef test_poll():\n    while busy(): time.sleep(WAIT_S)", None),
        ("PROGRAM = 'while busy(): time.sleep(.01)'", None),
    ],
)
def test_a_planted_sleep_is_found(tmp_path: Path, planted: str, where: str | None) -> None:
    (tmp_path / "test_planted.py").write_text(planted)
    assert sleeping(tmp_path) == (set() if where is None else {f"::{where}"})


# ---- private names of Lightning --------------------------------------------------------------------------------

LIBRARIES = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
HOLDERS = {
    "trainer",
    "pl_module",
    "lightning_module",
    "fit_loop",
}  # names that always stand for Lightning's objects


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def lightnings(dotted: str) -> bool:
    return dotted.partition(".")[0] in LIBRARIES


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of Lightning that a module imports, or asks of an object of Lightning."""
    for name in imported(tree):
        if lightnings(name) and any(private(part) for part in name.split(".")):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            asked = ast.unparse(node)
            if HOLDERS & set(re.findall(r"\w+", asked)[:-1]):
                yield asked


@cache
def private_parts(cls: type) -> set[str]:
    """Private names that a class defines, or uses of itself."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))))
    attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
    used = {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return {
        name for name in used | {n.name for n in nodes if isinstance(n, ast.FunctionDef)} if private(name)
    }


def inherited_parts(cls: type) -> set[str]:
    """Private names of a class that are Lightning's: overridden, used, or another's by accident."""
    bases = [base for base in cls.__mro__[1:] if lightnings(base.__module__)]
    return private_parts(cls) & {name for base in bases for name in private_parts(base)} if bases else set()


def classes() -> Iterator[tuple[str, type]]:
    """Every class of the package outside of `lightning_compat`, with its place."""
    for info in pkgutil.walk_packages(lightning_hetero.__path__, "lightning_hetero."):
        if any(part in info.name for part in ("._hydra", ".lightning_compat")):
            continue
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == info.name:
                yield f"{info.name.removeprefix('lightning_hetero.')}.{value.__name__}", value


def test_private_names_of_lightning_are_used_in_lightning_compat_only() -> None:
    found = {
        f"{place}: {name}"
        for place, tree in sources(PACKAGE)
        if not place.startswith("lightning_compat/")
        for name in private_names(tree)
    }
    found |= {f"{place}: self.{name}" for place, cls in classes() for name in inherited_parts(cls)}
    assert found == set()


@pytest.mark.parametrize(
    "planted",
    [
        "from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher",
        "if TYPE_CHECKING:\n    from lightning.pytorch.strategies.strategy import _StrategyRegistry",
        "from lightning.fabric.utilities._x import public",
        "import torchmetrics._private.public",
        "def f(trainer):\n    trainer._results",
        "def f(self):\n    self.trainer.fit_loop._data_source.instance",
        "def f(strategy):\n    strategy.lightning_module._current_fx_name = None",
    ],
)
def test_a_planted_private_name_is_found(planted: str) -> None:
    assert len(set(private_names(ast.parse(planted)))) == 1
    assert not set(private_names(ast.parse("import torch._x\nself._y = trainer.strategy\ntrainer.__class__")))


class Overrides(DDPStrategy):
    def _configure_launcher(self) -> None: ...


class Uses(ModelCheckpoint):
    def best(self) -> Any:
        return self._own, self._last_global_step_saved


def test_a_planted_private_part_is_found() -> None:
    assert inherited_parts(Overrides) == {"_configure_launcher"}
    assert inherited_parts(Uses) == {"_last_global_step_saved"}


COMPAT = ("batches", "empty_batches", "loaders", "logs", "norms", "progress", "results", "throughput")


def test_every_function_of_lightning_compat_is_pinned_by_a_test() -> None:
    tests = TESTS / "ranks" / "lightning_compat"
    names = {
        node.name for _, tree in sources(tests) for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    own = {f"{lightning_compat.__name__}.{module}" for module in COMPAT}
    functions = {
        name for name, found in vars(lightning_compat).items() if inspect.isfunction(found) and found.__module__ in own
    }
    assert len(functions) > 50
    assert {name for name in functions if f"test_{name}" not in names} == set()


# ---- one place knows what kinds of devices there are --------------------------------------------------------------

DEVICES = ("measure/device.py", "measure/kinds.py")
DEVICE_MODULES = {"torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator"}
DEVICE_TYPES = {"cuda", "xpu", "mps", "hpu", "mtia"}


def of_devices(tree: ast.Module) -> list[str]:
    """What a module says of a kind of device: torch's modules of it, or its name in a string that is all its name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in DEVICE_MODULES:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node.value in DEVICE_TYPES:
            found.append(repr(node.value))
    return found


def test_one_place_knows_the_kinds_of_devices() -> None:
    found = {
        place: what for place, tree in sources(PACKAGE) if place not in DEVICES and (what := of_devices(tree))
    }
    assert found == {}


@pytest.mark.parametrize(
    "planted", ["x = torch.cuda.Event()", "if x.type == 'cuda': pass", "torch.accelerator.synchronize()"]
)
def test_a_kind_of_device_is_found(planted: str) -> None:
    assert of_devices(ast.parse(planted)) != []
    assert of_devices(ast.parse("x = 'CUDA is slow'\ndevice_of(device).stamp()")) == []
