"""Which code a benchmark runs: its files by the graph of imports, and a digest that comments do not change.

A benchmark's files are all in its folder but what it writes, and what these import of this project, directly or not. A
name imported from a package stands for the module that defines it: ``from lightning_hetero import Scenario`` is
``emulate/scenario.py`` and not the three engines. A string that is a dotted name of ours is an import, too. Left out is
what measures nothing: the report's own code, the version number, and what is only imported before ranks are forked.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("benchmarks", "lightning_hetero", "tests")
LEFT_OUT = (
    "benchmarks/provenance.py", "benchmarks/report.py", "benchmarks/kit/minutes.py", "lightning_hetero/_version.py",
    "tests/preload.py",
)  # fmt: skip
_WRITTEN = ("results.json", "results.md")
_LAZY = "lightning_hetero.public"  # where the package has its names from


def provenance(name: str, *, root: Path = ROOT, since_s: float | None = None) -> dict[str, Any]:
    """Returns what results carry of the code they were measured with.

    Args:
        name: of the benchmark, a folder in ``benchmarks/``.
        root: of the checkout.
        since_s: when the run began [s since the epoch].

    Returns:
        ``commit``: of the checkout, None without git. ``uncommitted``: files among those below that are not as in that
        commit. ``edited_while_running``: those written after ``since_s``. ``digest``: of the code. ``files``: path ->
        digest of each file.

    Raises:
        ValueError: no such benchmark.
    """
    paths = files_of(name, root=root)
    files = {path: _digest(root / path) for path in paths}
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--no-renames", "--", *paths) or ""
    edited = [path for path in paths if since_s is not None and (root / path).stat().st_mtime > since_s]
    return {
        "commit": commit and commit.strip(),
        "uncommitted": [line[3:] for line in status.splitlines()],
        "edited_while_running": edited,
        "digest": _joined(files),
        "files": files,
    }


def changed_files(name: str, recorded: dict[str, Any], *, root: Path = ROOT) -> list[str]:
    """Returns the files whose code is not what was recorded; files that came and went are among them."""
    now = {path: _digest(root / path) for path in files_of(name, root=root)}
    then = recorded["files"]
    return sorted(path for path in {*now, *then} if now.get(path) != then.get(path))


# ---- the files ------------------------------------------------------------------------------------------------------


def files_of(name: str, *, root: Path = ROOT) -> list[str]:
    """Returns the files a benchmark depends on, as paths below ``root``, sorted.

    Raises:
        ValueError: no such benchmark.
    """
    folder = root / "benchmarks" / name
    if not (folder / "__main__.py").is_file():
        raise ValueError(f"benchmarks/{name} is no benchmark: it has no __main__.py")
    own = [f for f in folder.rglob("*") if f.is_file() and not {"__pycache__", ".cache"} & {*f.parts}]
    own = [f for f in own if f.name not in _WRITTEN]
    found: set[Path] = set()
    ahead = own
    while ahead:
        file = ahead.pop()
        if file not in found and str(file.relative_to(root)) not in LEFT_OUT:
            found.add(file)
            ahead += _imported(file, root) if file.suffix == ".py" else ()
    return sorted(str(file.relative_to(root)) for file in found)


def _imported(file: Path, root: Path) -> list[Path]:
    names = set(_names(file.read_text(encoding="utf-8")))
    if "lightning_hetero" in names:  # imported whole, and with it what it imports when it is needed
        names.add(_LAZY)
    elif file == root / "lightning_hetero/__init__.py":
        names.discard(_LAZY)
    return [found for name in names if (found := _defining(name, root)) is not None]


@cache
def _names(source: str) -> tuple[str, ...]:
    """Returns the dotted names of ours that a file uses, those only for type checking left out."""
    found: set[str] = set()
    for node in _run_nodes(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                found |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)+", text):
                found.add(text)
            case _:
                pass
    return tuple(sorted(name for name in found if name.split(".")[0] in PACKAGES))


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes but those below ``if TYPE_CHECKING:``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from _run_nodes(child)


def _defining(dotted: str, root: Path) -> Path | None:
    """Returns the file that a dotted name is, or is defined in; None: there is none."""
    at = root.joinpath(*dotted.split("."))
    for file in (at.with_name(at.name + ".py"), at / "__init__.py"):
        if file.is_file():
            return file
    parent, _, name = dotted.rpartition(".")
    holder = _defining(parent, root) if parent else None
    if holder is not None and holder.name == "__init__.py":
        lazy = root.joinpath(*_LAZY.split(".")).with_suffix(".py") if parent == "lightning_hetero" else holder
        origins = [_origins(file.read_text(encoding="utf-8")) for file in (holder, lazy) if file.is_file()]
        origin = next((found[name] for found in origins if name in found), None)
        return _defining(origin, root) if origin else holder
    return holder


@cache
def _origins(source: str) -> dict[str, str]:
    """Returns where a package has its names from: name -> dotted name."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


# ---- the digest -----------------------------------------------------------------------------------------------------


def code_of(source: str) -> str:
    """Returns a Python program without comments, docstrings, blank lines and blanks at ends of lines."""
    lines = source.splitlines(keepends=True)
    passed_over = (tokenize.NL, tokenize.COMMENT)
    every = list(tokenize.generate_tokens(io.StringIO(source).readline))
    cut = [token for token in every if token.type == tokenize.COMMENT]
    tokens = [token for token in every if token.type not in passed_over]
    begins = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for i, token in enumerate(tokens[:-1]):
        alone = (i == 0 or tokens[i - 1].type in begins) and tokens[i + 1].type == tokenize.NEWLINE
        if token.type == tokenize.STRING and alone:
            cut.append(token)
    for token in sorted(cut, key=lambda token: token.start, reverse=True):
        (first, left), (last, right) = token.start, token.end
        lines[first - 1 : last] = [lines[first - 1][:left] + lines[last - 1][right:]]
    kept = (line.rstrip() for line in "".join(lines).splitlines())
    return "\n".join(line for line in kept if line)


def _digest(file: Path) -> str:
    content = file.read_bytes()
    return _digest_of_code(content.decode()) if file.suffix == ".py" else _short(content)


@cache
def _digest_of_code(source: str) -> str:
    return _short(code_of(source).encode())


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _joined(files: dict[str, str]) -> str:
    return _short("\n".join(f"{path} {digest}" for path, digest in files.items()).encode())


def _git(root: Path, *words: str) -> str | None:
    """Returns what git prints, None where there is no git or no repository."""
    try:
        return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
