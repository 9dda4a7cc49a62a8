"""A pytest process, and the ranks that it starts, on simulated GPUs.

    python -m pytest -p tests.simgpu.plugin --simgpus 2 tests/gpu
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.simgpu import sim
from tests.simgpu.sim import on_import


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--simgpus", type=int, metavar="N", help="simulate N GPUs in this process and its ranks")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Starts this pytest again, before it has redirected anything, as a Python that simulates.

    Lightning and with it torch have been imported by now: by pytest, for ``filterwarnings`` in pyproject.toml.
    """
    asked = early_config.known_args_namespace
    if asked.simgpus and not on_import.armed():
        if reason := sim.why_not():
            raise pytest.UsageError(reason)
        environ = {**os.environ, **on_import.environment(asked.simgpus)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
    yield
