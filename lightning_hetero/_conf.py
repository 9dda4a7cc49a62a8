"""Where the YAML files are: in the installed package, or in the checkout's ``conf/`` (layer P)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["config_root"]


def config_root() -> str:
    """Returns the ``config_path`` for ``hydra.main``: ``pkg://...`` when installed, else an absolute path.

    A wheel carries the files as ``lightning_hetero/conf`` (see ``hatch_build.py``); an editable install or a
    plain checkout has them beside the package, where Hydra's ``pkg://`` cannot find them.

    Raises:
        FileNotFoundError: neither place holds a ``conf/__init__.py``.
    """
    package = Path(__file__).resolve().parent
    if (package / "conf" / "__init__.py").is_file():
        return "pkg://lightning_hetero.conf"
    checkout = package.parent / "conf"
    if (checkout / "__init__.py").is_file():
        return str(checkout)
    raise FileNotFoundError(
        f"no configuration in {package / 'conf'} or {checkout}: "
        "install the wheel, or run from a full checkout"
    )
