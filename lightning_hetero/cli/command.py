"""How the commands start: ``--version``, ``--help`` and files given as a cluster, before torch is imported (layer A).

The text of a Hydra command's ``--help`` is its own yaml file: the comments at its head, and each key with its comment.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_hetero._version import __version__

CONF = Path(__file__).resolve().parent / "conf"
"""The commands' own configuration; groups for every app are in the top-level ``conf``, found by our Hydra plugin."""

_WIDTH, _INDENT = 110, 22
_KEY = re.compile(r"(?:  - )?(?!override)(\w+):(?: ([^#]*?))? *# (.*)")
_FLAGS = "Flags: --version, --help, and --cfg job, which prints the composed configuration instead of running"


def start(name: str) -> Any:
    """Runs the command of this name with the arguments of the process."""
    given = sys.argv[1:]
    if "--version" in given:
        return print(f"lightning-hetero {__version__}")
    if (CONF / f"{name}.yaml").exists():
        from omegaconf import OmegaConf

        OmegaConf.register_new_resolver("hetero_help", help_text, replace=True)
        sys.argv[1:] = overrides(given)
        if {"--help", "-h"} & set(given):
            import hydra

            return hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(lambda cfg: None)()
        if name == "plan":  # ranks of a training get their own
            return _in_one_line(name)
    return import_module(f"lightning_hetero.cli.{name}").main()


def _in_one_line(name: str) -> Any:
    """Runs a command whose wrong arguments, of which Hydra says much, are reported in one line."""
    from hydra.errors import HydraException

    os.environ["HYDRA_FULL_ERROR"] = "1"  # it raises, then
    try:
        return import_module(f"lightning_hetero.cli.{name}").main()
    except HydraException as error:
        said = " ".join(re.split(r"\n(?:Config search path|To append|See https)", str(error))[0].split()).rstrip(".")
        sys.exit(f"lightning-hetero-{name}: {said}; lightning-hetero-{name} --help lists the keys")


def overrides(given: Sequence[str]) -> list[str]:
    """Returns a Hydra command's arguments; a file that is given as the cluster is its description, and no group's.

    >>> overrides(["cluster=islands", "cluster=my/own.yaml"])
    ['cluster=islands', 'cluster.spec=my/own.yaml']
    """
    return [re.sub(r"^cluster=(?=.*\.ya?ml$)", "cluster.spec=", one) for one in given]


def train() -> Any:
    """Entry point of ``lightning-hetero-train``."""
    return start("train")


def plan() -> Any:
    """Entry point of ``lightning-hetero-plan``."""
    return start("plan")


def help_text(name: str) -> str:
    """Returns what ``--help`` of a Hydra command says, for ``string.Template``."""
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    head, _, keys = (CONF / f"{name}.yaml").read_text().partition("\ndefaults:")
    lines = [line.removeprefix("#").removeprefix(" ") for line in head.splitlines()]
    lines += ["", "Keys, given as key=value:"]
    for line in keys.partition("\nhydra:")[0].splitlines():
        if found := _KEY.fullmatch(line):
            key, default, comment = found.groups()
            if line.startswith("  - "):
                comment = f"{comment} [{', '.join(sorted(loader.get_group_options(key)))}]"
            shown, indent = f"  {key}={default}" if default else f"  {key}", " " * _INDENT
            wrapped = textwrap.wrap(comment, _WIDTH, initial_indent=indent, subsequent_indent=indent)
            if len(shown) < _INDENT - 1:
                wrapped[0] = shown.ljust(_INDENT) + wrapped[0][_INDENT:]
            else:
                lines.append(shown)
            lines += wrapped
    return "\n".join([*lines, "", _FLAGS]).replace("$", "$$")


def command_parser(name: str, about: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command that Hydra does not compose, with ``--version`` and examples."""
    made = argparse.ArgumentParser(
        prog=f"lightning-hetero-{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["examples:", *(f"  lightning-hetero-{name} {one}".rstrip() for one in examples)]),
    )  # fmt: skip
    made.add_argument("--version", action="version", version=f"lightning-hetero {__version__}")
    return made
