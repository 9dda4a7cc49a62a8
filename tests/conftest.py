"""Tiers by folder, one seed, one thread, and guards around every test (see `tests.guards`)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.garbage import search_rarely
from tests.installed import read_once

TIERS = ("pure", "ranks", "e2e", "faults", "gpu", "simgpu")
HERE = Path(__file__).resolve().parent

# Many processes import the package and these tests: compiled once, whatever the environment says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Also in the processes that tests start: an error of a callback that only observes is an error here.
os.environ["LIGHTNING_HETERO_OBSERVERS_RAISE"] = "1"
# No speeds that a test has learned are known to the next one.
os.environ["LIGHTNING_HETERO_CACHE"] = os.devnull

# Same examples in every run, and no deadlines: a busy machine must not fail a test.
# HYPOTHESIS_PROFILE=explore searches further, with new examples each time.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _tier(path: Path) -> str | None:
    parts = path.relative_to(HERE).parts if path.is_relative_to(HERE) else ()
    return parts[0] if parts and parts[0] in TIERS else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="tests/faults: all cells of the fault matrix (an hour)")
    parser.addoption("--long", action="store_true", help="also what is marked so: more launches of what others show")
    parser.addoption("--matrix-rows", metavar="FILE", help="append what came of each cell to this file")


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands tests out to others (``-n``) has no use for Lightning, which takes seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all is collected
        advice = "lightning.fabric.utilities.warnings.PossibleUserWarning"  # about workers and logging intervals
        config.addinivalue_line("filterwarnings", f"ignore::{advice}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What imports and collection make stays: no search for garbage looks at it, neither now nor in any test."""
    try:
        return (yield)
    finally:
        read_once()
        search_rarely()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its folder's tier; skips tests/gpu where there is no CUDA, and tests/simgpu where it cannot
    be simulated; leaves out what is long."""
    import torch

    from tests.simgpu.sim.build import why_not

    no_cuda = pytest.mark.skip(reason="needs CUDA")
    no_simulation = why_not()
    for item in items:
        tier = _tier(item.path)
        if tier is not None:
            item.add_marker(tier)
        if tier == "gpu" and not torch.cuda.is_available():
            item.add_marker(no_cuda)
        if tier == "simgpu" and no_simulation:
            item.add_marker(pytest.mark.skip(reason=no_simulation))
    if not config.getoption("--long") and not any("::" in asked for asked in config.args):
        left_out = [item for item in items if _is_long(item)]
        items[:] = [item for item in items if not _is_long(item)]
        config.hook.pytest_deselected(items=left_out)


def _is_long(item: pytest.Item) -> bool:
    short = item.get_closest_marker("short")
    case = item.name.partition("[")[2].removesuffix("]")
    rare = short is not None and not any(f"-{of}-" in f"-{case}-" for of in short.args)
    return rare or item.get_closest_marker("long") is not None


@pytest.fixture(autouse=True)
def leak_guards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wraps every test; tests/pure skips what pure code cannot leak. Others run in their own empty folder."""
    from tests import guards

    with ExitStack() as stack:
        # Entered first, checked last: a process group must be gone before its sockets are counted.
        stack.enter_context(guards.environment())
        stack.enter_context(guards.process_state())
        if _tier(request.path) != "pure":
            stack.enter_context(guards.droppings())
            stack.enter_context(guards.listening_ports())
            stack.enter_context(guards.child_processes())
            stack.enter_context(guards.process_group())
            folder = Path.cwd()
            stack.callback(os.chdir, folder)
            os.chdir(request.getfixturevalue("tmp_path"))
        stack.enter_context(guards.threads())
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_processes() -> Iterator[None]:
    """Ends what serves many tests, if any of them started it: the rank harness's workers, the warm Python."""
    yield
    if (harness := sys.modules.get("tests.ranks.harness")) is not None:
        harness.close_pools()
    for name in ("tests.warm", "tests.simgpu.harness"):
        if (module := sys.modules.get(name)) is not None:
            module.close()
