"""The groups' names before ``hetero/...``, for one release: ``+strategy@trainer.strategy=hetero_balanced`` still works.

An app that has a group of such a name keeps it to itself: there, nothing here answers. Nothing is listed, either.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from hydra.plugins.config_source import ConfigResult, ConfigSource

GROUPS = ("strategy", "cluster", "controller", "emulation")
# With + or @: an app that has a value ``strategy: ddp`` means that one by ``strategy=ddp``.
_OVERRIDE = re.compile(rf"(?=\+|\w+@)\+?({'|'.join(GROUPS)})(?:@[^=]+)?=(.+)")


def _typed(group: str) -> dict[str, list[str]]:
    """Returns the overrides of the command line that may mean ours, with the options they name."""
    found = ((text, _OVERRIDE.fullmatch(text)) for text in sys.argv[1:] if text != "+strategy=ddp")
    return {text: match[2].split(",") for text, match in found if match and match[1] == group}


def _others() -> Sequence[ConfigSource]:
    """Returns all other sources of the repository that asks; Hydra tells a source nothing of them."""
    asking = sys._getframe(2).f_locals.get("self")
    return [source for source in getattr(asking, "sources", ()) if not isinstance(source, OldNames)]


def _source_of(config_path: str, sources: Sequence[ConfigSource]) -> ConfigSource | None:
    """Returns where the file is that an old name means; None: it means none of ours."""
    group = config_path.partition("/")[0]
    if group not in GROUPS or any(source.is_group(group) for source in sources):
        return None
    return next((source for source in sources if source.is_config(f"hetero/{config_path}")), None)


class OldNames(ConfigSource):
    """Answers for the old names where they are used, from the files under ``hetero/``."""

    @staticmethod
    def scheme() -> str:
        return "hetero"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        others, named = _others(), _typed(config_path).values()
        return any(all(_source_of(f"{config_path}/{name}", others) for name in options) for options in named)

    def is_config(self, config_path: str) -> bool:
        return _source_of(config_path, _others()) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        source: Any = _source_of(config_path, _others())
        result = source.load_config(f"hetero/{config_path}")
        group, _, option = config_path.partition("/")
        old = next((text for text, options in _typed(group).items() if option in options), f"{group}: {option}")
        new = old.replace(group, f"hetero/{group}", 1)
        if group == "emulation":
            result.config.pop("_target_", None)  # the old way has it on the command line
            new += " and needs no _target_"
        elif group != "strategy" and result.header["package"] is None:
            result.header["package"] = f"hetero.{group}"  # where the strategies' files look
        if os.environ.get("LOCAL_RANK", "0") == "0":
            text = f"lightning-hetero: {old} is now {new}; the old name will be removed in the next release"
            warnings.warn(text, FutureWarning, stacklevel=1)
        return result

    def list(self, config_path: str, results_filter: Any) -> list[str]:
        return []
