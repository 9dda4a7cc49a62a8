"""The pages: README.md, CONTRIBUTING.md and docs/, cut into sections and tables; the engines they describe."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lightning_hetero import (
    AutoStrategy,
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
    ShardedBalancedStrategy,
)
from lightning_hetero.base.strategy import HeteroStrategy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
THEORY, REFERENCE = DOCS / "theory", DOCS / "reference"
WRITTEN = {DOCS / "results", DOCS / "_build"}  # by a build of the site
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if WRITTEN.isdisjoint(page.parents)),
]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>run|not run: [^>\n]{5,}) -->\n+)?(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<code>.*?)^ *```$",
    re.M | re.S,
)


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    info: str
    mark: str | None
    code: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(value: Any) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        line = text[: match.start("code")].count("\n") + 1
        code = inspect.cleandoc(match["code"]) if match["indent"] else match["code"]
        yield Block(page, line, match["info"], match["mark"], code)


def section(page: Path, title: str) -> str:
    """Returns a page's text below a heading, up to the next of the same level."""
    parts = re.split(rf"^## {re.escape(title)}$", page.read_text(), flags=re.M)
    assert len(parts) == 2, f"{page.name} has no section {title!r}"
    return re.split(r"^## ", parts[1], flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """Returns the cells of all tables in ``text``, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = [i - 1 for i, line in enumerate(lines) if set(line) <= set("|-: ")]
    dropped = {*heads, *(i + 1 for i in heads)}
    kept = [line for i, line in enumerate(lines) if i not in dropped]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def source_nodes() -> Iterator[tuple[str, list[ast.AST]]]:
    """Yields the syntax of each file of the package, with the file's path in it."""
    package = ROOT / "lightning_hetero"
    for file in sorted(package.rglob("*.py")):
        yield file.relative_to(package).as_posix(), list(ast.walk(ast.parse(file.read_text())))


def source_strings() -> list[str]:
    """Returns all texts in the package's code, cut where an f-string inserts a value."""
    constants = (node for _, nodes in source_nodes() for node in nodes if isinstance(node, ast.Constant))
    return [node.value for node in constants if isinstance(node.value, str)]


NOT_THEIRS = "self", "ddp", "stock", "arguments", "model_averaging_period"


class Engine(NamedTuple):
    """An engine, and where its arguments are described."""

    strategy: type[HeteroStrategy]
    page: Path
    group: Path

    def __str__(self) -> str:
        return self.page.stem

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its own, the shared ones, and the stock strategy's, but for one that all refuse on several devices."""
        mro = self.strategy.__mro__
        bases = [*mro[: mro.index(HeteroStrategy) + 1], self.strategy.stock[0]]
        named = {name: p for base in reversed(bases) for name, p in inspect.signature(base.__init__).parameters.items()}
        return {name: p for name, p in named.items() if name not in NOT_THEIRS}


ENGINES = [
    Engine(LoadBalancedStrategy, REFERENCE / "balanced.md", ROOT / "conf/hetero/strategy/hetero_balanced.yaml"),
    Engine(BoundedStalenessStrategy, REFERENCE / "stale.md", ROOT / "conf/hetero/strategy/hetero_stale.yaml"),
    Engine(HeteroPipelineStrategy, REFERENCE / "pipeline.md", ROOT / "conf/hetero/strategy/hetero_pipeline.yaml"),
    Engine(AutoStrategy, REFERENCE / "auto.md", ROOT / "conf/hetero/strategy/hetero_auto.yaml"),
    Engine(FederatedStrategy, REFERENCE / "federated.md", ROOT / "conf/hetero/strategy/hetero_federated.yaml"),
    Engine(ShardedBalancedStrategy, REFERENCE / "sharded.md", ROOT / "conf/hetero/strategy/hetero_sharded.yaml"),
]
