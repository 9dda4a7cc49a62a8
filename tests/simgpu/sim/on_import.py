"""Simulated GPUs for programs that know nothing of them: torch, when it is imported, has them.

`arm` is for the process itself; `environment` for those that it starts: their Python imports `site/sitecustomize.py`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tests.simgpu import sim

_ROOT = Path(__file__).resolve().parents[3]
_SITE = Path(__file__).resolve().parent / "site"
_GPUS = "LIGHTNING_HETERO_SIMGPUS"


class _Loader(Loader):
    def __init__(self, plain: Loader) -> None:
        self._plain = plain

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        sim.install(int(os.environ[_GPUS]), nccl=True)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        sim.prepare()
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def environment(gpus: int) -> dict[str, str]:
    """Returns the variables with which a Python, and those that it starts, have simulated GPUs."""
    paths = [str(_SITE), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {_GPUS: str(gpus), "PYTHONPATH": os.pathsep.join(paths)}


def armed() -> bool:
    """Whether the environment of this process asks for simulated GPUs."""
    return _GPUS in os.environ


def arm() -> None:
    """Gives this process simulated GPUs as soon as it imports torch, if its environment asks for them."""
    if armed() and "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())
