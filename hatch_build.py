"""Build hook: ships the top-level ``conf/`` and the Hydra plugin inside the wheel.

Only a standard wheel needs it: in an editable install the plugin is found through ``dev-mode-dirs`` in
pyproject.toml and finds ``conf/`` beside the package, and hatchling would refuse the mapping there.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConfAndPluginHook(BuildHookInterface[Any]):
    """Maps ``conf`` to ``lightning_hetero/conf`` and the plugin to the top level, ``hydra_plugins``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the mappings to ``build_data``; ``version`` is ``"standard"`` or ``"editable"``."""
        if version == "standard":
            build_data["force_include"].update(
                {
                    "conf": "lightning_hetero/conf",
                    "lightning_hetero/_hydra/hydra_plugins": "hydra_plugins",
                }
            )
