"""docs/reference/troubleshooting.md: every message in it is one of ours."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.docs.kit import REFERENCE, ROOT, rows


def strings_in(node: ast.AST) -> list[str]:
    """Returns the texts inside a piece of code, cut where an f-string inserts a value."""
    constants = (c.value for c in ast.walk(node) if isinstance(c, ast.Constant))
    return [value for value in constants if isinstance(value, str) and value.strip()]


# Functions whose text somebody reads.
TELLS = {"rank_zero_warn", "warn", "warn_once", "notify", "fail", "report", "warning", "dismiss"}


@cache
def messages() -> dict[str, list[str]]:
    """Texts of each raise and warning of the package, by place and class of the error."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "lightning_hetero").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            kind = ""
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func)
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
                kind = name if name in TELLS else ""
            if kind and (texts := strings_in(node)):
                found[f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {kind}"] = texts
    return found


@cache
def troubles() -> set[str]:
    """Pieces of messages that the page answers."""
    cells = [row[0] for row in rows((REFERENCE / "troubleshooting.md").read_text())]
    return {piece for cell in cells if cell.startswith("`") for piece in re.findall(r"`([^`]+)`", cell)}


REASONS = (
    "balanced/strategy.py", "stale/fit/refusals.py", "pipeline/fit/refusals.py", "federated/fit/settings.py",
)  # each engine's `Refusals`


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    source = [text for texts in messages().values() for text in texts]
    # These files also word what others raise or show.
    for file in (
        "balanced/decide/rows.py",
        "base/checks.py",
        "base/nodes.py",
        "stale/decide/report/summary.py",
        "federated/decide/rounds.py",
        "transport/roll_call.py",
        "lightning_compat/launchers.py",
        "pipeline/runtime/step/layer_calls/chain.py",
        "pipeline/fit/hints.py",
        *REASONS,
    ):
        source += strings_in(ast.parse((ROOT / "lightning_hetero" / file).read_text()))
    strange = {piece for piece in troubles() if not any(piece in text for text in source)}
    assert not strange

