"""Makes lightning-hetero's strategies, clusters and emulations visible in any Hydra app, as ``hetero/...``.

Every Hydra app on the machine imports this file at its start, whether it uses us or not. So it imports
nothing of ours, and hands Hydra a folder rather than ``pkg://lightning_hetero.conf``: to resolve that address
Hydra would import `lightning_hetero`.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

ENGINES = ("balanced", "stale", "pipeline", "federated", "auto")


def _folders() -> tuple[Path, Path] | None:
    """Returns the folder of what is for other apps, and the one of the command's own configuration."""
    spec = find_spec("lightning_hetero")
    for location in (spec.submodule_search_locations if spec else None) or ():
        package = Path(location)
        for folder in (package / "conf", package.parent / "conf"):  # wheel, then checkout
            if (folder / "__init__.py").is_file():
                return folder, package / "cli" / "conf"
    return None


def _register_names() -> None:
    """Lets ``trainer.strategy=hetero_balanced`` be a plain string in an app that has imported Lightning by now.

    Lightning asks no entry point before it looks the string up: its ``callbacks_factory`` comes later. Importing
    `lightning_hetero`, here or by the app, replaces these entries by its own.
    """
    strategies = sys.modules.get("lightning.pytorch.strategies")
    registry = getattr(strategies, "StrategyRegistry", None)
    if strategies is None or registry is None:
        return
    stock = [name for name, entry in registry.items() if entry["strategy"] is strategies.DDPStrategy]
    names = [name.replace("ddp", f"hetero_{engine}", 1) for engine in ENGINES for name in stock]
    for ours in [*names, "hetero_sharded"]:  # which takes no arguments of DDP's
        if ours not in registry:
            described = "of lightning-hetero, which is imported when this is chosen"
            registry.register(ours, partial(_strategy_named, registry, ours), description=described)


def _strategy_named(registry: Any, name: str) -> object:
    import_module("lightning_hetero")
    return registry.get(name)


class LightningHeteroSearchPath(SearchPathPlugin):
    """Appends our ``conf`` to the search path: last, so that an app's own file of the same name wins.

    It holds nothing but the group ``hetero``. Our own command sees the groups in there by their short names.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folders = _folders()
        if folders is not None:
            ours, own_command = folders
            mains = [Path((element.path or "").removeprefix("file://")) for element in search_path.get_path()]
            folder = ours / "hetero" if own_command in mains else ours
            search_path.append(provider="lightning-hetero", path=f"file://{folder.as_posix()}")
        _register_names()
