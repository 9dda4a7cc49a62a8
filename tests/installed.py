"""What is installed is read once in a process: every new Trainer reads the metadata of all packages, and most of the
time that it takes is that."""

from __future__ import annotations

import functools
import sys


def read_once() -> None:
    if (registry := sys.modules.get("lightning.fabric.utilities.registry")) is not None:
        vars(registry)["entry_points"] = functools.cache(vars(registry)["entry_points"])
