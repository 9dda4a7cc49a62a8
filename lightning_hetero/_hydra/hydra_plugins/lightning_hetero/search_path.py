"""Makes lightning-hetero's config groups (``strategy: hetero_balanced``) visible by name in any Hydra app.

Every Hydra app on the machine imports this file at its start, whether it uses us or not. So it imports
nothing of ours, and hands Hydra a folder rather than ``pkg://lightning_hetero.conf``: to resolve that address
Hydra would import `lightning_hetero` and with it torch and Lightning, seconds for a stranger.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["LightningHeteroSearchPath"]


def _conf_folder() -> Path | None:
    spec = find_spec("lightning_hetero")
    for location in (spec.submodule_search_locations if spec else None) or ():
        package = Path(location)
        for folder in (package / "conf", package.parent / "conf"):  # wheel, then checkout
            if (folder / "__init__.py").is_file():
                return folder
    return None


class LightningHeteroSearchPath(SearchPathPlugin):
    """Appends our ``conf`` to the search path: last, so that an app's own file of the same name wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = _conf_folder()
        if folder is not None:
            search_path.append(provider="lightning-hetero", path=f"file://{folder.as_posix()}")
